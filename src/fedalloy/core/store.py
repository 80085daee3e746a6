"""What a store of the clients' states promises; how one is made is the business of ``records``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fedalloy.core.types import State


class ClientStore(Protocol):
    """Where the states of clients live between rounds.

    A round is safe once it is committed and the checkpoint that holds what ``commit`` returned is written; what was
    put later is undone by ``restore``.
    """

    def get(self, ids: Sequence[int]) -> dict[int, State]:
        """The states that are known."""

    def put(self, round: int, states: Mapping[int, State]) -> None:
        """Remember the states of a round; clients that took no part keep theirs."""

    def commit(self, round: int) -> dict[int, State]:
        """What a checkpoint of this round must hold for every known client: its state, or where it lies."""

    def check(self, kept: Mapping[int, State]) -> None:
        """Raise a ``CheckpointError`` where something that a checkpoint holds cannot be found any more."""

    def restore(self, round: int, kept: Mapping[int, State]) -> None:
        """Go back to what was committed in a round; ``restore(0, {})`` forgets everybody."""
