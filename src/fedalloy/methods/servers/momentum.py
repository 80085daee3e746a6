"""Momentum at the server: FedAvgM (Hsu et al. 2019, arXiv:1909.06335)."""

from __future__ import annotations

from dataclasses import dataclass

from fedalloy.core import tree
from fedalloy.core.protocols import ServerOptimizer
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Info, State, Tree


@register("server", "momentum", search={"lr": Range(0.1, 2.0, log=True), "beta": Range(0.0, 0.97)})
@dataclass(frozen=True)
class Momentum(ServerOptimizer):
    """``v <- beta v + update``, ``w <- w + lr v``; the velocity is kept for the whole run.

    When to use it: small cohorts whose updates point in changing directions.
    """

    lr: float = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")
        if not 0 <= self.beta < 1:
            raise ValueError(f"beta must lie in [0, 1), got {self.beta}")

    def init(self, target: Tree) -> State:
        return {"velocity": tree.zeros_like(target)}

    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        velocity = tree.map_leaves(lambda v, u: self.beta * v + u, state["velocity"], update)
        return tree.add(target, velocity, self.lr), {"velocity": velocity}, {}
