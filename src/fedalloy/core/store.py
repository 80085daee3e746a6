"""The interface of a store of client states; implementations are in ``experiment.records``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fedalloy.core.types import State


class StoredStates(dict[int, State]):
    """What a checkpoint holds if a store keeps the states elsewhere: none of them, and ``where`` with what the store
    needs to find those of the round."""

    def __init__(self, where: State) -> None:
        super().__init__()
        self.where = where


Kept = Mapping[int, State]
"""What a checkpoint holds of the clients: every known state by client, or :class:`StoredStates`."""


class ClientStore(Protocol):
    """Holds the states of clients between rounds.

    A round is durable once it is committed and the checkpoint with the result of ``commit`` is written; ``restore``
    undoes everything put later.
    """

    def get(self, ids: Sequence[int]) -> dict[int, State]:
        """The states of those clients that have one."""

    def put(self, round: int, states: Mapping[int, State]) -> None:
        """Store the states of a round; clients that did not take part keep theirs."""

    def commit(self, round: int) -> Kept:
        """What a checkpoint of this round must hold."""

    def check(self, kept: Kept) -> None:
        """Raise a ``CheckpointError`` if something that a checkpoint refers to is missing."""

    def restore(self, round: int, kept: Kept) -> None:
        """Go back to the commit of a round; ``restore(0, {})`` removes all states."""
