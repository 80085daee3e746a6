"""More even losses with a step length that needs no tuning: q-FedAvg (Li et al. 2020, arXiv:1905.10497)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Contributions, Info, State, Weights
from fedalloy.methods.weightings.attendance import usable
from fedalloy.methods.weightings.mirror import Prior, prior_of

# Smaller than the losses of real models; a loss of 0 to a negative power would be infinite.
_LEAST_LOSS = 1e-10


@register("weighting", "qfedavg", search={"q": Range(1e-3, 10.0, log=True)})
@dataclass(frozen=True)
class QFedAvg(Weighting):
    """``w <- w - sum_k c_k F_k^q D_k / sum_k c_k h_k``: losses to the power ``q``, with a controlled step length.

    ``D_k = (w - w_k) / lr`` and ``h_k = q F_k^(q-1) |D_k|^2 + F_k^q / lr``, which bounds the curvature of
    ``F_k^(q+1)``: the step shrinks where losses are steep, and weights sum to at most one. ``q = 0`` is the unweighted
    mean. ``c_k`` is 1, as in both public codes, or ``n_k / n`` with ``weights = "samples"``: then a client that took no
    step counts by its examples, otherwise it is left out. A loss that is not finite counts as the largest finite one.
    Corrections: tables that list ``n_k F_k^q`` leave the step control out; ``lr`` is the local step size of the round,
    whereas one public code keeps using the initial one after it has decayed.
    When to use it: more even accuracies over clients, with a ``q`` that works for any local step size.

    >>> from fedalloy.core.types import Cohort
    >>> from fedalloy.core.keys import Key
    >>> cohort = Cohort(torch.arange(2), {"delta": {"w": torch.ones(2, 1)}}, {"loss_before": torch.tensor([1.0, 1.0])})
    >>> QFedAvg().weigh(cohort, {}, Context(1, 2, Key.of(0), local_lr=1.0))[0]
    tensor([0.2500, 0.2500], dtype=torch.float64)
    """

    reads_payload: ClassVar[bool] = True
    asks: ClassVar[frozenset[str]] = frozenset({"norms"})
    weight_bound: ClassVar[float | None] = 1.0

    q: float = 1.0
    weights: Prior = "uniform"

    def __post_init__(self) -> None:
        if self.q < 0:
            raise ValueError(f"q must be 0 or more, got {self.q}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"loss_before", "num_examples"} if self.weights == "samples" else {"loss_before"})

    @property
    def counts_idle(self) -> bool:
        return self.weights == "samples"

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        losses = usable(cohort.stats["loss_before"]).clamp(min=_LEAST_LOSS)
        gradients = (cohort.norms("delta") / ctx.local_lr).square()
        shares = prior_of(cohort, self.weights)
        # Powers of losses relative to the largest cannot overflow; the factor cancels.
        powers = shares * (losses / losses.max()) ** self.q
        bound = (powers * (self.q * ctx.local_lr * gradients / losses + 1)).sum()
        h = self.q * losses ** (self.q - 1) * gradients + losses**self.q / ctx.local_lr
        return powers / bound.clamp(min=torch.finfo(torch.float64).tiny), state, {"h": h}
