"""Momentum that is applied every few rounds: FedFa's server (Huang et al. 2020, arXiv:2012.10069)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedalloy.core import tree
from fedalloy.core.protocols import ServerOptimizer
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Info, State, Tree


@register("server", "period_momentum", search={"lr": Range(0.1, 2.0, log=True), "gamma": Range(0.0, 0.95)})
@dataclass(frozen=True)
class PeriodMomentum(ServerOptimizer):
    """``m <- gamma m + lr (w - average)`` in every round; ``w <- w - m`` when ``t mod period = 0``, else the average.

    Corrections: as printed, ``m`` grows with ``average - w``, which moves the model away from the average; and the
    printed step size is the clients', which would barely move the model, so ``lr`` is the server's here. With
    ``gamma = 0`` and ``lr = 1`` the model is the average. The other half of FedFa's double momentum is that of the
    clients (``momentum`` of the solver). The state holds ``-m``, which is added.
    When to use it: with FedFa's weights; ``period`` above 1 applies the momentum only every ``period`` rounds.

    >>> server, w = PeriodMomentum(gamma=0.5), {"w": torch.zeros(1)}
    >>> from fedalloy.core.keys import Key
    >>> server.apply({"w": torch.ones(1)}, {"momentum": {"w": torch.ones(1)}}, w, Context(1, 2, Key.of(0)))[0]
    {'w': tensor([1.5000])}
    """

    lr: float = 1.0
    gamma: float = 0.5
    period: int = 1

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")
        if not 0 <= self.gamma < 1:
            raise ValueError(f"gamma must lie in [0, 1), got {self.gamma}")
        if self.period < 1:
            raise ValueError(f"period must be 1 or more, got {self.period}")

    def init(self, target: Tree) -> State:
        return {"momentum": tree.zeros_like(target)}

    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        momentum = tree.map_leaves(lambda m, u: self.gamma * m + self.lr * u, state["momentum"], update)
        followed = ctx.round % self.period == 0
        moved = tree.add(target, momentum if followed else update)
        return moved, {"momentum": momentum}, {"momentum_followed": torch.tensor(float(followed))}
