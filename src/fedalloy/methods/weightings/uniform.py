"""Every client counts the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Contributions, Info, State, Weights


@register("weighting", "uniform")
@dataclass(frozen=True)
class Uniform(Weighting):
    """``p_k = 1 / m`` for the ``m`` participants of the round.

    A client that took no step is left out: it would take a share of the step and add nothing to it.
    When to use it: the objective is the loss of the average client, however little data it has.
    """

    requires: ClassVar[frozenset[str]] = frozenset()
    weight_bound: ClassVar[float | None] = 1.0
    counts_idle: ClassVar[bool] = False

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        return torch.full((len(cohort),), 1.0 / len(cohort), dtype=torch.float64), state, {}
