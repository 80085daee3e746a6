"""Load a run from its folder, in the state of its last checkpoint."""

from __future__ import annotations

from pathlib import Path

from fedalloy.core.errors import CheckpointError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import ClientStore
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.experiment.machinery import make_engine
from fedalloy.experiment.placement import on_device, placed
from fedalloy.experiment.recipe.reading import load
from fedalloy.experiment.recipe.resolving import resolve
from fedalloy.experiment.records.folder import Checkpoint, RunFolder
from fedalloy.experiment.records.lock import holder
from fedalloy.experiment.records.store import read_store
from fedalloy.experiment.round import Federation
from fedalloy.experiment.trained import Trained

_TRIES = 10


def reopen(folder: str | Path) -> Trained:
    """The run in a folder at its last checkpoint; its data are loaded again from its recipe. The folder is not changed.

    Only for runs of a recipe: for a run started from Python, whose folder has no data, use ``RunResult.trained``.
    """
    opened = RunFolder.open(folder)
    experiment = resolve(load(opened.path))
    config = experiment.config
    saved, store = _last(opened, config.device)
    if config.engine == "flower" and experiment.algorithm.stateful:
        raise CheckpointError(
            f"{folder} is a run over a federation: its clients' states are on their nodes, and the folder only "
            "holds the rounds in which they were made"
        )
    task, root = placed(experiment.task(), config.device), Key.of(config.seed)
    engine = make_engine(config)
    # Where states lie in a folder of the engine's, only the engine can read them; it starts nothing for that.
    # The engine that trains the server's classifier in the run trains it here too: another one rounds other sums.
    reads = engine.clients_keep_states and engine.data_at_hand
    reader = engine if reads or isinstance(engine, Batched) else Loop()
    fed = Federation(experiment.algorithm.bind(task, root), task, reader, config, root)
    return Trained(fed, on_device(saved.server, config.device), store, saved.round)


def _last(opened: RunFolder, device: str, tries: int = _TRIES) -> tuple[Checkpoint, ClientStore]:
    """The last checkpoint with the clients' states. A run that goes on meanwhile may rewrite what an earlier one needs:
    then there is a newer one."""
    saved = opened.latest()
    if saved is None:
        raise CheckpointError(f"{opened.path} holds no checkpoint yet; wait for the first one, or resume the run")
    try:
        return saved, read_store(saved.clients, opened.clients, device)
    except (CheckpointError, FileNotFoundError):
        if tries == 1 or holder(opened.path / "lock") is None:
            raise
    return _last(opened, device, tries - 1)
