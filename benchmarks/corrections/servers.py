"""Server optimizers as printed or coded elsewhere. For measurements only, not for use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedalloy.core import tree
from fedalloy.core.moments import Kind, second_moment
from fedalloy.core.protocols import ServerOptimizer
from fedalloy.core.types import Context, Info, State, Tree
from fedalloy.methods.servers.adaptive import Adam, Yogi
from fedalloy.methods.servers.period_momentum import PeriodMomentum
from fedalloy.methods.servers.sgd import ServerSgd


@dataclass(frozen=True)
class GrowingStep(ServerSgd):
    """A server whose step grows as fast as the clients' step decays."""

    decay: float = 0.9
    decay_every: int = 5

    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        grown = self.lr / self.decay ** ((ctx.round - 1) // self.decay_every)
        return tree.add(target, update, grown), state, {}


@dataclass(frozen=True)
class OnlyWeights(ServerSgd):
    """Averages the tensors whose name contains "weight"; the others stay as they were initialised."""

    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        kept = {name: leaf if "weight" in name else torch.zeros_like(leaf) for name, leaf in update.items()}
        return super().apply(kept, state, target, ctx)


@dataclass(frozen=True)
class AwayFromAverage(PeriodMomentum):
    """FedFa's server with the printed sign: ``m <- gamma m + lr (average - w)``, ``w <- w - m``."""

    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        return super().apply(tree.map_leaves(torch.neg, update), state, target, ctx)


@dataclass(frozen=True)
class AdamFromZero(Adam):
    """FedAdam whose second moment starts at zero."""

    def init(self, target: Tree) -> State:
        return {**super().init(target), "v": tree.zeros_like(target)}


@dataclass(frozen=True)
class YogiPrinted(Yogi):
    """FedYogi as S2 prints it: ``v <- beta2 v + (1 - beta2) u^2 sign(v - u^2)``."""

    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        m = tree.map_leaves(lambda m, u: self.beta1 * m + (1 - self.beta1) * u, state["m"], update)
        v = tree.map_leaves(
            lambda v, u: self.beta2 * v + (1 - self.beta2) * u * u * (v - u * u).sign(), state["v"], update
        )
        step = tree.map_leaves(lambda m, v: m / (v.sqrt() + self.tau), m, v)
        return tree.add(target, step, self.lr), {**state, "m": m, "v": v}, {}


@dataclass(frozen=True)
class Rebuilt(ServerOptimizer):
    """FedOpt with an optimizer that is rebuilt in every round and counts its first second moment twice.

    Nothing is remembered: ``m = (1 - beta1) u``. Yogi's first comparison is with the update instead of its square.
    """

    kind: Kind = "adam"
    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        step = tree.map_leaves(lambda u: (1 - self.beta1) * u / (self._second(u).sqrt() + self.tau), update)
        return tree.add(target, step, self.lr), state, {}

    def _second(self, update: torch.Tensor) -> torch.Tensor:
        start = torch.full_like(update, self.tau**2)
        if self.kind == "yogi":
            once = start - (1 - self.beta2) * update * update * (start - update).sign()
        else:
            once = second_moment(self.kind, start, update, self.beta2)
        return second_moment(self.kind, once, update, self.beta2)
