"""AMSGrad at the server: FedAMS (Wang et al. 2022, arXiv:2205.02719)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.moments import check_moments, second_moment
from fedalloy.core.protocols import ServerOptimizer
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Info, State, Tree


@register("server", "amsgrad", search={"lr": Range(1e-3, 1.0, log=True)})
@dataclass(frozen=True)
class AmsGrad(ServerOptimizer):
    """Moments as in Adam; the step is divided by the root of the largest second moment so far.

    ``option="max"``: ``vhat <- max(vhat, v, eps)``, ``w <- w + lr m / sqrt(vhat)``, as first published.
    ``option="plus"``: ``vhat <- max(vhat, v)``, ``w <- w + lr m / (sqrt(vhat) + eps)``; with ``vhat0=1e-3`` and
    ``bias_correction`` (``m / (1 - beta1^t)`` and ``vhat / (1 - beta2^t)`` in the server's t-th step) this is what
    the public code of EWWA-FL compares against.
    When to use it: like Adam, when rare large updates must not be forgotten; with compressed updates (FedCAMS).

    >>> from fedalloy.core.keys import Key
    >>> rule, w = AmsGrad(lr=1.0, beta1=0.0, beta2=0.0), {"w": torch.tensor([0.0])}
    >>> rule.apply({"w": torch.tensor([3.0])}, rule.init(w), w, Context(1, 1, Key.of(0)))[0]
    {'w': tensor([1.])}
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3
    option: Literal["max", "plus"] = "max"
    vhat0: float = 0.0
    bias_correction: bool = False

    def __post_init__(self) -> None:
        if self.vhat0 < 0:
            raise ValueError(f"vhat0 must be 0 or more, got {self.vhat0}")
        check_moments(self.beta1, self.beta2, lr=self.lr, eps=self.eps)

    def init(self, target: Tree) -> State:
        largest = tree.map_leaves(lambda leaf: torch.full_like(leaf, self.vhat0), target)
        return {"m": tree.zeros_like(target), "v": tree.zeros_like(target), "vhat": largest, "steps": 0}

    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        steps = state["steps"] + 1
        m = tree.map_leaves(lambda m, u: self.beta1 * m + (1 - self.beta1) * u, state["m"], update)
        v = tree.map_leaves(lambda v, u: second_moment("adam", v, u, self.beta2), state["v"], update)
        first, second = (1 - beta**steps if self.bias_correction else 1.0 for beta in (self.beta1, self.beta2))
        vhat = tree.map_leaves(self._largest, state["vhat"], v)
        step = tree.map_leaves(lambda m, largest: m / first / self._divisor(largest / second), m, vhat)
        return tree.add(target, step, self.lr), {"m": m, "v": v, "vhat": vhat, "steps": steps}, {}

    def _largest(self, vhat: Tensor, v: Tensor) -> Tensor:
        largest = torch.maximum(vhat, v)
        return largest.clamp(min=self.eps) if self.option == "max" else largest

    def _divisor(self, vhat: Tensor) -> Tensor:
        return vhat.sqrt() if self.option == "max" else vhat.sqrt() + self.eps
