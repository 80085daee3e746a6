"""Weights learned online when few of many clients take part: AAggFF-D (Hahn et al. 2024, arXiv:2405.20821)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Contributions, Info, State, Weights
from fedalloy.methods.weightings.aaggff_s import check_responses
from fedalloy.methods.weightings.attendance import among, usable
from fedalloy.methods.weightings.cdf import Cdf, CdfName, respond

# Up to this many clients the whole vectors are recorded, above it only the participants' entries.
RECORDED = 2000


# No range for C1: it must stay below C2, which follows from the federation, and papers keep it at 0.
@register("weighting", "aaggff_d")
@dataclass(frozen=True)
class AaggffD(Weighting):
    """Follow the regularised leader on doubly robust, linearised gradients; a round takes O(K).

    With ``C = m / K`` and responses ``r_i = C1 + (C2 - C1) CDF(F_i / mean_S F)`` of the m participants, ``rbar`` their
    mean: ``dr_i = rbar`` for absent clients, ``rbar + (r_i - rbar) / C`` for present ones,
    ``g = -dr / (1 + rbar) + rbar <p, dr - rbar> / (1 + rbar)^2``, ``G += g``, and
    ``p = softmax(-sqrt(log K) G / (L sqrt(t + 1)))`` with ``L = C2/(1+C1) + 2 (C2-C1) / (C (1+C1))``.
    Participants are weighted by p, renormalised over them. ``C2 = None`` means C, and ``C = None`` means m / K exactly
    (published values are rounded).

    ``mode = "official"`` is the public code: ``dr_i = (r_i - rbar) / C`` for present clients, which *lowers* their
    weight against absent ones each time they take part; p starts at C for every client, so it needs C.
    A client that took no step still has a loss and counts by it; its share stays on the received model.
    The estimate is slightly biased: rbar depends on the participants, which shrinks it by about 1 / m.
    When to use it: many clients, a few per round, with unequal losses.

    >>> from fedalloy.core.types import Cohort
    >>> from fedalloy.core.keys import Key
    >>> cohort = Cohort(torch.tensor([3, 8]), {}, {"loss_before": torch.tensor([1.0, 3.0])})
    >>> AaggffD().weigh(cohort, AaggffD().init(10), Context(1, 10, Key.of(0)))[0]
    tensor([0.4267, 0.5733], dtype=torch.float64)
    """

    requires: ClassVar[frozenset[str]] = frozenset({"loss_before"})
    weight_bound: ClassVar[float | None] = 1.0

    cdf: CdfName | Cdf = "weibull"
    C1: float = 0.0
    C2: float | None = None
    C: float | None = None
    mode: Literal["paper", "official"] = "paper"

    def __post_init__(self) -> None:
        check_responses(self.C1, self.C2)
        if self.C is not None and not 0 < self.C <= 1:
            raise ValueError(f"C, the share of clients in a round, must lie in (0, 1], got {self.C}")
        if self.C is not None and self.C2 is None and not self.C1 < self.C:
            raise ValueError(f"C1 = {self.C1} must be below C2, which is C = {self.C} unless given")
        if self.mode == "official" and self.C is None:
            raise ValueError(
                "mode 'official' starts from p = C for every client: give C, the share of clients in a round"
            )

    def least_clients(self, population: int) -> int:
        """Responses need ``C1 < C2``, and C2 defaults to the share of clients in the round."""
        return 1 if self.C is not None or self.C2 is not None else math.floor(self.C1 * population) + 1

    def init(self, population: int) -> State:
        first = self.C if self.mode == "official" and self.C else 1 / population
        return {
            "p": torch.full((population,), first, dtype=torch.float64),
            "G": torch.zeros(population, dtype=torch.float64),
            "objective": torch.zeros((), dtype=torch.float64),
        }

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        K, ids, p = ctx.population, cohort.ids, state["p"]
        C = len(cohort) / K if self.C is None else self.C
        high = C if self.C2 is None else self.C2
        r = respond(usable(cohort.stats["loss_before"]), self.cdf, self.C1, high)
        mean = r.mean()
        # The difference of a participant's estimate from the mean, which is the estimate of absent clients.
        apart = (r - mean) / C - (mean if self.mode == "official" else 0.0)
        earned = mean * p.sum() if self.mode == "official" else mean  # p sums to 1, except the official first p
        surplus = p[ids] @ apart
        absent = -mean / (1 + earned) + mean * surplus / (1 + earned) ** 2
        G = (state["G"] + absent).index_add_(0, ids, -apart / (1 + earned))
        gradient = (high + 2 * (high - self.C1) / C) / (1 + self.C1)
        new = torch.softmax(G * (-math.sqrt(math.log(K)) / (gradient * math.sqrt(ctx.round + 1))), 0)
        loss = -torch.log((1 + earned + surplus).clamp(min=1e-12))
        info: Info = {"responses": r, "decision_loss": loss, "objective": state["objective"] + loss}
        if K <= RECORDED:
            info |= {"p": new, "estimate": _spread(mean, apart, ids, K), "gradient": G - state["G"]}
        else:
            info |= {
                "p_present": new[ids],
                "estimate_present": mean + apart,
                "gradient_present": G[ids] - state["G"][ids],
            }
        return among(new, ids), {"p": new, "G": G, "objective": info["objective"]}, info


def _spread(mean: Tensor, apart: Tensor, ids: Tensor, population: int) -> Tensor:
    """``dr``: the mean for every client, plus the participants' differences from it."""
    return mean.expand(population).clone().index_add_(0, ids, apart)
