"""Weights by data size: FedAvg (McMahan et al. 2017, arXiv:1602.05629)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Contributions, Info, State, Weights

# Smaller than any number of examples: a cohort without examples gets weights 0 instead of 0 / 0.
_TINY = 1e-12


@register("weighting", "samples")
@dataclass(frozen=True)
class Samples(Weighting):
    """``p_k = n_k / sum_S n``, over the participants of the round.

    A client that took no step counts by its examples, because the average is over all examples of the cohort.
    When to use it: the objective is the loss of the average example.
    """

    weight_bound: ClassVar[float | None] = 1.0

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        sizes = cohort.stats["num_examples"]
        return sizes / sizes.sum().clamp(min=_TINY), state, {}
