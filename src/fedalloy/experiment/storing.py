"""Where a run keeps what clients send and the states that they keep: in memory, in its folder or in another one."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

from fedalloy.core.algorithm import ServerState
from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import ClientStore
from fedalloy.core.store import Kept
from fedalloy.engines.out_of_core import LIMIT_MB, StorageLimit
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.opening import RUN_ID
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.reading import read_json
from fedalloy.experiment.records.store import open_store
from fedalloy.experiment.round import Federation


def contributions_limit(fed: Federation, folder: RunFolder | None) -> StorageLimit:
    """Where the contributions of a round are kept."""
    config = fed.config
    if not fed.engine.uses_storage:
        _check_not_given(config, type(fed.engine).__name__)
    place = config.contributions_folder or (folder.path if folder else None)
    return StorageLimit(config.contributions_mb, None if place is None else Path(place))


def _check_not_given(config: RunConfig, engine: str) -> None:
    """Refuse what such an engine would ignore."""
    changed = config.contributions_mb != LIMIT_MB
    name = "contributions_mb" if changed else "contributions_folder" if config.contributions_folder else None
    if name is not None:
        raise SpecError(
            f"{name} has no effect with the engine {engine}, which keeps contributions in the memory of its workers: "
            "leave it out, or use the engine 'loop', 'batched' or 'workers'"
        )


def make_store(fed: Federation, state: ServerState, folder: RunFolder | None) -> ClientStore:
    """The store of client states: in memory or on disk, by the size of one state."""
    config, one = fed.config, {}
    if fed.algorithm.stateful and not fed.engine.clients_keep_states:
        one = fed.algorithm.init_client(state["shared"], fed.root, fed.task.objective.init)
    place = folder.clients if folder else None
    if fed.engine.clients_keep_states:
        fed.engine.claim_states(_name_of_its_own(folder))
    return open_store(one, fed.task.population, config.client_memory_mb, place, config.device)


def check_states(fed: Federation, store: ClientStore, kept: Kept) -> None:
    """Refuse a checkpoint whose states of clients are missing, or kept where this run does not look for them."""
    if fed.algorithm.stateful:
        fed.engine.check_states(kept)
    store.check(kept)


def _name_of_its_own(folder: RunFolder | None) -> str:
    """A name that no other run has: neither another one of this process, nor one in a folder of the same name on
    another machine."""
    if folder is None:
        return f"a run in memory, {uuid.uuid4().hex[:12]}, of process {os.getpid()}"
    begun = (read_json(folder.path / "environment.json") or {}).get(RUN_ID)  # earlier versions noted none
    return f"{folder.path.resolve()}{f', begun as {begun}' if begun else ''}"
