"""Adaptive steps at the server: FedAdam, FedAdagrad, FedYogi (Reddi et al. 2021, arXiv:2003.00295)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedalloy.core import tree
from fedalloy.core.moments import Kind, check_moments, second_moment
from fedalloy.core.protocols import ServerOptimizer
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Info, State, Tree


@dataclass(frozen=True)
class Adaptive(ServerOptimizer):
    """``m <- beta1 m + (1 - beta1) u``, ``v`` by its kind, ``w <- w + lr m / (sqrt(v) + tau)`` for an update ``u``.

    ``v`` starts at ``tau^2`` without bias correction, as first published. ``bias_correction`` multiplies the step by
    ``sqrt(1 - beta2^t) / (1 - beta1^t)`` in the server's t-th step, for all three kinds.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    bias_correction: bool = False

    def __post_init__(self) -> None:
        check_moments(self.beta1, self.beta2, lr=self.lr, tau=self.tau)

    @property
    @abstractmethod
    def kind(self) -> Kind:
        """How the second moment is updated."""

    def init(self, target: Tree) -> State:
        start = tree.map_leaves(lambda leaf: torch.full_like(leaf, self.tau**2), target)
        return {"m": tree.zeros_like(target), "v": start, "steps": 0}

    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        steps = state["steps"] + 1
        m = tree.map_leaves(lambda m, u: self.beta1 * m + (1 - self.beta1) * u, state["m"], update)
        v = tree.map_leaves(lambda v, u: second_moment(self.kind, v, u, self.beta2), state["v"], update)
        step = tree.map_leaves(lambda m, v: m / (v.sqrt() + self.tau), m, v)
        return tree.add(target, step, self._lr(steps)), {"m": m, "v": v, "steps": steps}, {}

    def _lr(self, steps: int) -> float:
        if not self.bias_correction:
            return self.lr
        return float(self.lr * (1 - self.beta2**steps) ** 0.5 / (1 - self.beta1**steps))


@register("server", "adam", search={"lr": Range(1e-3, 1.0, log=True), "tau": Range(1e-5, 1e-1, log=True)})
@dataclass(frozen=True)
class Adam(Adaptive):
    """FedAdam: ``v <- beta2 v + (1 - beta2) u^2`` (see ``Adaptive`` for the step; Reddi et al. 2021).

    When to use it: parameters whose updates differ in size by orders of magnitude, as in models with embeddings.

    >>> from fedalloy.core.keys import Key
    >>> rule, w = Adam(lr=0.1, beta1=0.0, beta2=0.0, tau=1.0), {"w": torch.tensor([0.0])}
    >>> rule.apply({"w": torch.tensor([1.0])}, rule.init(w), w, Context(1, 1, Key.of(0)))[0]
    {'w': tensor([0.0500])}
    """

    kind: ClassVar[Kind] = "adam"


@register("server", "adagrad", search={"lr": Range(1e-3, 1.0, log=True), "tau": Range(1e-5, 1e-1, log=True)})
@dataclass(frozen=True)
class Adagrad(Adaptive):
    """FedAdagrad: ``v <- v + u^2``; no first moment by default, ``beta1`` is 0 (see ``Adaptive``; Reddi et al. 2021).

    ``beta2`` is used by ``bias_correction`` only.
    When to use it: convex problems and sparse updates; its step size never grows.
    """

    kind: ClassVar[Kind] = "adagrad"

    beta1: float = 0.0


@register("server", "yogi", search={"lr": Range(1e-3, 1.0, log=True), "tau": Range(1e-5, 1e-1, log=True)})
@dataclass(frozen=True)
class Yogi(Adaptive):
    """FedYogi: ``v <- v - (1 - beta2) u^2 sign(v - u^2)`` (see ``Adaptive``; Reddi et al. 2021).

    Correction: some later papers print ``beta2 v + (1 - beta2) u^2 sign(v - u^2)``; both the factor ``beta2`` and the
    sign are wrong.
    When to use it: like Adam, when small updates over some rounds must not make the next steps much larger.
    """

    kind: ClassVar[Kind] = "yogi"
