"""Engines whose clients are somewhere else: what the driver asks them besides running a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Literal, Protocol, TypeGuard, runtime_checkable

from torch import Tensor

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.protocols import Engine, Shared
from fedalloy.core.types import Cohort, State

ModelName = Literal["global", "personal"] | float
"""The model that is scored: the common one, a client's own, or so much of the local one mixed in."""


@runtime_checkable
class DistantEngine(Engine, Protocol):
    """An engine whose clients keep their data and their states where they are. What the server holds of a client's
    state is a mark: ``{"round": r}`` with the round in which the state that counts was made, ``{}`` before the first.
    """

    def cross_score(self, algorithm: Algorithm, shared: Shared, cohort: Cohort) -> Tensor:
        """``[C, C]``: the accuracy of every client's model on every client's validation part, NaN where unknown."""

    def scores(
        self,
        algorithm: Algorithm,
        shared: Shared,
        states: Mapping[int, State],
        ids: Tensor,
        metrics: tuple[str, ...],
        models: Sequence[ModelName],
    ) -> list[dict[str, Tensor]]:
        """Every client's metrics on its own test part, ``[K]`` each, once per model; NaN for who does not answer."""

    def notes(self) -> dict[str, Any]:
        """What has happened since the last call, for the record of a round."""


def is_distant(engine: Engine) -> TypeGuard[DistantEngine]:
    """Whether an engine's clients are somewhere else. Asked several times a round, and a protocol's own answer takes as
    long as a small model's step, so a class is looked at once."""
    return _is_distant(type(engine))


@cache
def _is_distant(kind: type) -> bool:
    return issubclass(kind, DistantEngine)
