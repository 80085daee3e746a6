"""Weights learned online over a few clients: AAggFF-S (Hahn et al. 2024, arXiv:2405.20821)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Contributions, Info, State, Weights
from fedalloy.methods.weightings.attendance import among, everyone, imputed, usable
from fedalloy.methods.weightings.cdf import Cdf, CdfName, respond
from fedalloy.methods.weightings.simplex import minimise, require_solver


# No range for C1: it must stay below C2, which follows from the federation, and papers keep it at 0.
@register("weighting", "aaggff_s")
@dataclass(frozen=True)
class AaggffS(Weighting):
    """Online Newton step on the decision loss ``-log(1 + <p, r>)``, solved exactly over the simplex.

    ``r_k = C1 + (C2 - C1) CDF(F_k / mean F)``, ``g = -r / (1 + <p, r>)``, and p becomes the minimum of
    ``sum_t <g_t, p> + alpha/2 |p|^2 + beta/2 sum_t <g_t, p - p_t>^2`` with ``L = C2 / (1 + C1)``, ``alpha = 4 K L``,
    ``beta = 1 / (4 L)``. It starts at ``1 / K``, and ``C2 = None`` means ``1 / K``.

    ``mode = "official"`` is the public code: no ``p_t`` in the quadratic term, the ridge a second time inside beta,
    and a first p of all ones. Its normal CDF is ``cdf = Cdf("normal", variant="affine_erfc")``, which gives *less*
    weight to larger losses. If losses keep differing, p becomes one-hot (five clients: 0.8 on the worst after twenty
    rounds); the code's ridge makes that slower by ``1 + beta``.
    A client that took no step still has a loss and counts by it; its share stays on the received model.
    A client that drops out gets the mean response of those present, and the weights are renormalised over the latter.
    When to use it: a few clients that always take part, with unequal losses; fairness without a temperature to tune.

    >>> from fedalloy.core.types import Cohort
    >>> from fedalloy.core.keys import Key
    >>> cohort = Cohort(torch.arange(2), {}, {"loss_before": torch.tensor([1.0, 3.0])})
    >>> AaggffS().weigh(cohort, AaggffS().init(2), Context(1, 2, Key.of(0)))[0]
    tensor([0.4672, 0.5328], dtype=torch.float64)
    """

    requires: ClassVar[frozenset[str]] = frozenset({"loss_before"})
    weight_bound: ClassVar[float | None] = 1.0
    needs_everyone: ClassVar[bool] = True

    cdf: CdfName | Cdf = "weibull"
    C1: float = 0.0
    C2: float | None = None
    mode: Literal["paper", "official"] = "paper"

    def __post_init__(self) -> None:
        check_responses(self.C1, self.C2)

    def init(self, population: int) -> State:
        require_solver()
        first = 1.0 if self.mode == "official" else 1 / population
        return {
            "p": torch.full((population,), first, dtype=torch.float64),
            "linear": torch.zeros(population, dtype=torch.float64),
            "gram": torch.zeros(population, population, dtype=torch.float64),
            "objective": torch.zeros((), dtype=torch.float64),
        }

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        K, p = ctx.population, state["p"]
        high = 1 / K if self.C2 is None else self.C2
        losses = usable(cohort.stats["loss_before"])
        present = respond(losses, self.cdf, self.C1, high)
        r = everyone(present, cohort.ids, K)
        earned = p @ r
        g, loss = -r / (1 + earned), -torch.log1p(earned)
        new = self._decide({**state, "objective": state["objective"] + loss}, g, high / (1 + self.C1))
        info = {"responses": r, "gradient": g, "decision_loss": loss, "p": new["p"], "objective": new["objective"]}
        info["weighted_loss"] = among(p, cohort.ids) @ losses
        return among(new["p"], cohort.ids), new, {**info, **imputed(cohort.ids, K)}

    def _decide(self, state: State, g: Tensor, gradient: float) -> State:
        """The state after one more gradient, which is at most ``gradient`` in every entry."""
        K, official = len(g), self.mode == "official"
        alpha, beta = 4 * K * gradient, 1 / (4 * gradient)
        linear = state["linear"] + (g if official else g * (1 - beta * (g @ state["p"])))
        gram = state["gram"] + torch.outer(g, g)
        ridge = alpha * (1 + beta) if official else alpha
        p = minimise(ridge * torch.eye(K, dtype=g.dtype) + beta * gram, linear)
        return {**state, "p": p, "linear": linear, "gram": gram}


def check_responses(low: float, high: float | None) -> None:
    """Refuse responses that are not bounded from both sides."""
    if low < 0:
        raise ValueError(f"C1 must be 0 or more, got {low}")
    if high is not None and not low < high:
        raise ValueError(f"C2 must be above C1 = {low}, got {high}")
