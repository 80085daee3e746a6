"""A pull towards the received model: FedProx (Li et al. 2020, arXiv:1812.06127)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.aspects import Fusible, Fusing
from fedalloy.core.protocols import Carry, GradAt, Shared
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Payload, State, Stats, Tree
from fedalloy.methods.solvers.descent import descend, descend_start, gradient
from fedalloy.methods.solvers.training import LocalTraining, plain_sgd_hint, update_length


@register("solver", "prox", search={"mu": Range(1e-4, 1.0, log=True)})
@dataclass(frozen=True)
class Prox(LocalTraining, Fusible):
    """``y <- y - lr (grad F_k(y) + mu (y - w))``: the gradient of ``F_k + mu/2 |y - w|^2``.

    The norm is squared and taken over the whole model; public implementations without the square pull with the same
    force at any distance.
    When to use it: clients that take very different numbers of local steps.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu < 0:
            raise ValueError(f"mu must be 0 or more, got {self.mu}")

    @property
    def fusing(self) -> Fusing | None:
        return plain_sgd_hint(self, pull=self.mu) if type(self) is Prox else None  # see Sgd

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        return {"params": shared["params"], "anchor": shared["params"], "memory": descend_start(self, shared["params"])}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        pull = tree.subtract(carry["params"], carry["anchor"])
        grads = tree.add(gradient(self, grad_at, carry["params"], carry["memory"]), pull, self.mu)
        params, memory = descend(self, carry["params"], grads, carry["memory"], draws, ctx)
        return {"params": params, "anchor": carry["anchor"], "memory": memory}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        return {"delta": tree.subtract(carry["params"], shared["params"])}, mine

    def describe(self, steps: Tensor, ctx: Context) -> Stats:
        """As usual, but with a proximal term FedNova's effective number of steps is the plain count."""
        length = update_length(steps, self.momentum, self.nesterov, pull=ctx.local_lr * self.mu)
        return {"step_norm": length, "effective_steps": steps if self.mu else length}
