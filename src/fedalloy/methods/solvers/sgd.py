"""Plain local training: what FedAvg's clients do (McMahan et al. 2017, arXiv:1602.05629)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedalloy.core.aspects import Fusible, Fusing
from fedalloy.core.protocols import Carry, GradAt, Shared
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Payload, State, Tree
from fedalloy.methods.solvers.descent import descend, descend_start, gradient
from fedalloy.methods.solvers.training import LocalTraining, plain_sgd_hint


@register("solver", "sgd")
@dataclass(frozen=True)
class Sgd(LocalTraining, Fusible):
    """``y <- y - lr grad F_k(y)`` over the local batches, with momentum, Nesterov, weight decay or Adam.

    When to use it: as the first choice and as the baseline; the other solvers extend it.
    """

    @property
    def fusing(self) -> Fusing | None:
        # A subclass may change the step, so it must declare by itself that it is still plain SGD.
        return plain_sgd_hint(self) if type(self) is Sgd else None

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        return {"params": shared["params"], "memory": descend_start(self, shared["params"])}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        params, memory = carry["params"], carry["memory"]
        if self.direct:  # what ``gradient`` and ``descend`` do then, without the calls
            params, memory = self.rule.move(params, grad_at(params), memory, ctx.local_lr)
        else:
            grads = gradient(self, grad_at, params, memory)
            params, memory = descend(self, params, grads, memory, draws, ctx)
        return {"params": params, "memory": memory}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        received = shared["params"]
        return {"delta": {name: leaf - received[name] for name, leaf in carry["params"].items()}}, mine
