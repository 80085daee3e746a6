"""Personal models by a Moreau envelope: pFedMe (Dinh et al. 2020, arXiv:2006.08848)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.aspects import Personalised
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Carry, GradAt, Shared
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Payload, State, Tree
from fedalloy.methods.solvers.descent import descend, descend_start, gradient
from fedalloy.methods.solvers.phases import chosen
from fedalloy.methods.solvers.training import LocalTraining


@register("solver", "pfedme", search={"lam": Range(0.1, 50.0, log=True), "inner_lr": Range(1e-3, 0.3, log=True)})
@dataclass(frozen=True)
class PFedMe(LocalTraining, Personalised):
    """Per batch: ``inner`` steps of ``theta`` on ``F + lam/2 |theta - w|^2``, then ``w <- w - lr lam (w - theta)``.

    ``theta`` starts every round at the received w and is carried from batch to batch; ``inner_lr`` decays with ``lr``.
    The local optimizer's settings apply to theta; w takes plain steps. The paper's server mixing ``beta`` is ``lr`` of
    the server ``sgd``. A client that never took part uses the shared model.
    When to use it: personal models with a pull strong enough to keep them near each other.
    """

    stateful: ClassVar[bool] = True
    linear: ClassVar[bool] = False

    lam: float = 15.0
    inner: int = 5
    inner_lr: float = 0.09
    lr: float = field(default=0.005, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.accumulate > 1:
            raise ValueError("pFedMe takes several steps on every batch: leave accumulate out")
        if self.lam < 0 or self.inner < 1 or self.inner_lr <= 0:
            given = f"got lam = {self.lam}, inner = {self.inner}, inner_lr = {self.inner_lr}"
            raise ValueError(f"pFedMe needs lam of 0 or more, inner of 1 or more and inner_lr above 0; {given}")

    def init_client(self, shared: Shared, key: Key) -> State:
        return {"personal": shared["params"]}

    def personal(self, shared: Shared, mine: State, mix: float | None = None) -> tuple[Tree, Tree]:
        return mine["personal"], shared["buffers"]

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        received = shared["params"]
        return {"params": received, "personal": received, "memory": descend_start(self, received)}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        w, theta, memory = carry["params"], carry["personal"], carry["memory"]
        lr = self.step_lr(draws, ctx)
        for _ in range(self.inner):
            grads = tree.add(gradient(self, grad_at, theta, memory), tree.subtract(theta, w), self.lam)
            theta, memory = descend(self, theta, grads, memory, draws, ctx, self.inner_lr / self.lr)
        moved = tree.add(w, tree.subtract(w, theta), -lr * self.lam)
        return {"params": moved, "personal": theta, "memory": memory}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        kept = chosen(steps > 0, carry["personal"], mine["personal"])
        return {"delta": tree.subtract(carry["params"], shared["params"])}, {"personal": kept}
