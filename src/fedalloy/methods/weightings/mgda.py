"""The common descent direction: FedMGDA+ (Hu et al. 2020, arXiv:2006.11489)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Contributions, Info, State, Weights
from fedalloy.methods.weightings.mirror import Prior, prior_of
from fedalloy.methods.weightings.pairs import gram
from fedalloy.methods.weightings.simplex import minimise, require_solver

# Updates shorter than this have no meaningful direction. Above it, 1 / length still fits into float32.
_SMALLEST = 1e-30
# If several lambdas are optimal (clients with parallel updates), the one near the prior is wanted. Each pass minimises
# the norm plus a small penalty on the distance to the pass before (a proximal point method): where lambda is unique,
# three passes leave no trace of the penalty.
_PRICE = 1e-9
_PASSES = 3


@register("weighting", "fedmgda", search={"epsilon": Range(0.0, 1.0)})
@dataclass(frozen=True)
class FedMgda(Weighting):
    """``weight_k = lambda_k / |g_k|`` with ``lambda = argmin |sum_k lambda_k g_k / |g_k||^2``.

    The minimum is over the simplex, each entry at most ``epsilon`` away from the ``prior``: ``uniform`` (as in public
    code) or ``samples`` (as in the paper's experiments). ``epsilon = 0`` averages unit updates, ``epsilon = 1`` allows
    the whole simplex. The weights include the normalisation, so they need not sum to one, and the update's length is at
    most the server's ``lr`` however small the local one was: choose the server's ``lr`` with care. The quadratic
    programme is solved to rounding error (public code stops at 2e-5). A client that did not move has no direction: it
    gets weight 0, and the others share lambda; one that took no step is left out altogether.
    When to use it: no client's loss should rise, and none may count more by sending a longer update.

    >>> from fedalloy.core.types import Cohort
    >>> from fedalloy.core.keys import Key
    >>> cohort = Cohort(torch.arange(2), {"delta": {"w": torch.tensor([[3.0, 0.0], [0.0, 0.5]])}}, {})
    >>> FedMgda().weigh(cohort, {}, Context(1, 2, Key.of(0)))[0]
    tensor([0.1667, 1.0000], dtype=torch.float64)
    """

    reads_payload: ClassVar[bool] = True
    asks: ClassVar[frozenset[str]] = frozenset({"norms", "chunks"})
    counts_idle: ClassVar[bool] = False

    epsilon: float = 0.5
    prior: Prior = "uniform"

    def __post_init__(self) -> None:
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon must lie in [0, 1], got {self.epsilon}")

    @property
    def requires(self) -> frozenset[str]:
        return frozenset({"num_examples"} if self.prior == "samples" else ())

    def init(self, population: int) -> State:
        require_solver()
        return {}

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        norms = cohort.norms("delta")
        moved = (norms > _SMALLEST).nonzero().flatten()
        chosen = torch.zeros_like(norms)
        if len(moved):
            cosines = gram(cohort)[moved][:, moved] / norms[moved] / norms[moved].unsqueeze(1)
            chosen[moved] = self._mix(cosines, self._start(cohort, moved))
        return chosen / norms.clamp(min=_SMALLEST), state, {"lambda": chosen, "norms": norms}

    def _start(self, cohort: Contributions, moved: Tensor) -> Tensor:
        """The prior over the clients that moved; equal shares if they have no examples."""
        sizes = prior_of(cohort, self.prior)[moved]
        sizes = sizes if bool(sizes.any()) else torch.ones_like(sizes)
        return sizes / sizes.sum()

    def _mix(self, cosines: Tensor, start: Tensor) -> Tensor:
        if self.epsilon == 0:
            return start
        low, high = (start - self.epsilon).clamp(min=0), (start + self.epsilon).clamp(max=1)
        priced, found = cosines + _PRICE * torch.eye(len(start), dtype=start.dtype), start
        for _ in range(_PASSES):
            found = minimise(priced, -_PRICE * found, low, high)
        return found
