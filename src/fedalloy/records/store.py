"""Where the states of clients live between rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedalloy.core.types import State


class MemoryStore:
    """All states in memory (:class:`fedalloy.core.protocols.ClientStore`).

    A state is a value that nobody writes in place, so none is copied here. A client that was never put is
    unknown: the engine starts it from the solver's own beginning.

    >>> store = MemoryStore()
    >>> store.put({7: {"solver": {"steps": 3}}})
    >>> store.get([4, 7])
    {7: {'solver': {'steps': 3}}}
    """

    def __init__(self, states: Mapping[int, State] | None = None) -> None:
        self._states: dict[int, State] = dict(states or {})

    def __len__(self) -> int:
        return len(self._states)

    def get(self, ids: Sequence[int]) -> dict[int, State]:
        """The states that are known."""
        return {client: self._states[client] for client in ids if client in self._states}

    def put(self, states: Mapping[int, State]) -> None:
        """Remember the states of a round; clients that took no part keep theirs."""
        self._states.update(states)

    def snapshot(self) -> dict[int, State]:
        """Every known state by id, in the order of ids: what a checkpoint keeps."""
        return dict(sorted(self._states.items()))
