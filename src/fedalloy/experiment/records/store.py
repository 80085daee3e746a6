"""Where client states are kept between rounds: in memory, or on disk when they are many or large."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedalloy.core.errors import CheckpointError
from fedalloy.core.protocols import ClientStore
from fedalloy.core.store import Kept, StoredStates
from fedalloy.core.types import State
from fedalloy.experiment.records.client_files import OldClientFiles, is_place
from fedalloy.experiment.records.disk_store import DiskStore, placed


class MemoryStore:
    """All states in memory (:class:`fedalloy.core.protocols.ClientStore`); every checkpoint holds all of them.

    States are never modified in place, so they are not copied here. A client that was never put is
    unknown: the engine gives it the solver's initial state.

    >>> store = MemoryStore()
    >>> store.put(1, {7: {"solver": {"steps": 3}}})
    >>> store.get([4, 7])
    {7: {'solver': {'steps': 3}}}
    """

    def __init__(self, states: Mapping[int, State] | None = None, device: str = "cpu") -> None:
        self._states: dict[int, State] = dict(states or {})
        self._device = device

    def __len__(self) -> int:
        return len(self._states)

    def get(self, ids: Sequence[int]) -> dict[int, State]:
        """The known states of ``ids``."""
        return {client: self._states[client] for client in ids if client in self._states}

    def put(self, round: int, states: Mapping[int, State]) -> None:
        """Remember the states of a round; clients that took no part keep theirs."""
        self._states.update(states)

    def commit(self, round: int) -> dict[int, State]:
        """Every known state by id, in the order of ids."""
        return dict(sorted(self._states.items()))

    def check(self, kept: Kept) -> None:
        """Refuse a checkpoint that does not hold the states themselves."""
        if isinstance(kept, StoredStates) or any(map(is_place, kept.values())):
            raise CheckpointError(
                "this run keeps the states of its clients on disk: resume it with the client_memory_mb it began with"
            )

    def restore(self, round: int, kept: Kept) -> None:
        """Take the states of a checkpoint."""
        self.check(kept)
        self._states = {client: placed(state, self._device) for client, state in kept.items()}


def open_store(
    one: State, population: int, memory_mb: float, folder: Path | None = None, device: str = "cpu"
) -> ClientStore:
    """The store of a run whose clients each keep a state such as ``one``.

    In memory if the whole population's states fit into ``memory_mb``, on disk otherwise, no matter how many clients
    will take part. On disk means under ``folder``, or in a temporary folder for a run that has none.

    >>> type(open_store({"solver": {}}, 10**6, 64.0)).__name__
    'MemoryStore'
    """
    if nbytes(one) * population <= memory_mb * 1e6:
        return MemoryStore(device=device)
    return DiskStore(folder, device)


def read_store(kept: Kept, folder: Path, device: str = "cpu") -> ClientStore:
    """The states of a checkpoint, for readers other than the run itself: nothing on disk is changed."""
    if isinstance(kept, StoredStates):
        store = DiskStore(folder, device)
        store.look(kept)
        return store
    if not any(map(is_place, kept.values())):
        return MemoryStore({client: placed(state, device) for client, state in kept.items()}, device)
    old = OldClientFiles(folder, kept)
    old.check()
    return MemoryStore({client: placed(state, device) for client, _, state in old.get(old.clients())}, device)


def nbytes(state: Any) -> int:
    """The size of a nested state's tensors in bytes."""
    if isinstance(state, Mapping):
        return sum(map(nbytes, state.values()))
    if isinstance(state, list | tuple):
        return sum(map(nbytes, state))
    return state.numel() * state.element_size() if isinstance(state, Tensor) else 0
