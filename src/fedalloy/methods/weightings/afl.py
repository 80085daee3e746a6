"""Gradient ascent on the weights: AFL (Mohri, Sivek and Suresh 2019, arXiv:1902.00146)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Contributions, Info, State, Weights
from fedalloy.methods.weightings.attendance import among, everyone, imputed, usable
from fedalloy.methods.weightings.simplex import project


@register("weighting", "afl", search={"step": Range(1e-4, 1.0, log=True)})
@dataclass(frozen=True)
class Afl(Weighting):
    """``lambda <- Proj_simplex(lambda + step F)``, starting at ``1 / K``; the *new* lambda weights the updates.

    ``F_k`` is the loss of the received model on client k. Mohri et al. update the model with the old lambda; here the
    losses of the same round are used, as in every other rule. AFL is the limit q -> infinity of q-FFL, not q -> 0.
    A client that took no step still has a loss and counts by it; its share stays on the received model.
    A client that drops out gets the mean loss of those present, and the weights are renormalised over the latter.
    When to use it: a few clients that always take part, and the worst-served one matters most.

    >>> from fedalloy.core.types import Cohort
    >>> from fedalloy.core.keys import Key
    >>> cohort = Cohort(torch.arange(2), {}, {"loss_before": torch.tensor([1.0, 3.0])})
    >>> Afl(step=0.1).weigh(cohort, Afl().init(2), Context(1, 2, Key.of(0)))[0]
    tensor([0.4000, 0.6000], dtype=torch.float64)
    """

    requires: ClassVar[frozenset[str]] = frozenset({"loss_before"})
    weight_bound: ClassVar[float | None] = 1.0
    needs_everyone: ClassVar[bool] = True

    step: float = 0.01

    def __post_init__(self) -> None:
        if self.step <= 0:
            raise ValueError(f"step must be above 0, got {self.step}")

    def init(self, population: int) -> State:
        return {"lambda": torch.full((population,), 1 / population, dtype=torch.float64)}

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        losses = everyone(usable(cohort.stats["loss_before"]), cohort.ids, ctx.population)
        new = project(state["lambda"] + self.step * losses)
        return among(new, cohort.ids), {"lambda": new}, {"lambda": new, **imputed(cohort.ids, ctx.population)}
