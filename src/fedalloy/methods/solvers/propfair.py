"""Clients that minimise ``-log(1 - loss / M)``: PropFair as in its public code (arXiv:2202.01666)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.protocols import Carry, GradAt, Shared
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Payload, State, Tree
from fedalloy.methods.solvers.descent import descend, descend_start, gradient
from fedalloy.methods.solvers.training import LocalTraining


@register("solver", "propfair", search={"M": Range(1.0, 10.0, log=True)})
@dataclass(frozen=True)
class PropFair(LocalTraining):
    """``y <- y - lr grad phi(l)`` for the batch loss ``l``, with ``phi(l) = -log(1 - l / M)``.

    Where ``M - l < gap`` the code takes ``phi(l) = l / M`` instead (a "huberised" logarithm).
    The gradient is that of the loss divided by ``M - l``, or by ``M`` where ``M - l < gap``. There the factor drops
    from ``1 / gap`` to ``1 / M``, so a client with a larger loss counts less than one just below that limit. The
    weighting ``propfair`` does the same at the server, with a floor instead of the jump (Zhang et al. 2022).
    When to use it: to reproduce published numbers of PropFair, with FedAvg's weights.
    """

    M: float = 3.0
    gap: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.gap <= self.M:
            raise ValueError(f"gap must lie in (0, M], got gap = {self.gap} with M = {self.M}")

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        return {"params": shared["params"], "memory": descend_start(self, shared["params"])}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        grads = gradient(self, grad_at, carry["params"], carry["memory"], of=self.welfare)
        params, memory = descend(self, carry["params"], grads, carry["memory"], draws, ctx)
        return {"params": params, "memory": memory}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        return {"delta": tree.subtract(carry["params"], shared["params"])}, mine

    def welfare(self, loss: Tensor) -> Tensor:
        """``phi`` of a batch loss.

        >>> PropFair(M=2.0).welfare(torch.tensor([1.0, 5.0]))
        tensor([0.6931, 2.5000])
        """
        # The branch not taken must stay finite: torch.where would turn its infinite gradient into NaN.
        left = (self.M - loss).clamp(min=self.gap)
        return torch.where(self.M - loss < self.gap, loss / self.M, -(left / self.M).log())
