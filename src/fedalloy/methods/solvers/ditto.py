"""A personal model that is pulled towards the shared one: Ditto (Li et al. 2021, arXiv:2012.04221)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.aspects import Fusible, Fusing, Personalised
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Carry, GradAt, Shared
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Payload, State, Tree
from fedalloy.methods.solvers.descent import descend, descend_start, gradient
from fedalloy.methods.solvers.phases import chosen
from fedalloy.methods.solvers.training import LocalTraining, plain_sgd_hint


@register("solver", "ditto", search={"lam": Range(1e-3, 10.0, log=True)})
@dataclass(frozen=True)
class Ditto(LocalTraining, Personalised, Fusible):
    """``w`` as in FedAvg; then ``v <- v - lr (grad F(v) + lam (v - w))`` for ``personal_epochs``, with w as received.

    The penalty is the squared norm over the whole model, ``lam/2 |v - w|^2``. Both models use the local optimizer's
    settings. A client starts with v = w, the first model it receives. Batch statistics are those of w.
    When to use it: every client needs a personal model and the shared model must stay useful.
    """

    stateful: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    """False: steps of the second phase do not change what is sent."""

    lam: float = 1.0
    personal_epochs: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam < 0 or self.personal_epochs < 0:
            raise ValueError(f"lam and personal_epochs must be 0 or more, got {self.lam} and {self.personal_epochs}")

    @property
    def second_epochs(self) -> int:
        return self.personal_epochs

    @property
    def fusing(self) -> Fusing | None:
        return plain_sgd_hint(self, self.lam, "two_phase_descent") if type(self) is Ditto else None  # see Sgd

    def init_client(self, shared: Shared, key: Key) -> State:
        return {"personal": shared["params"]}

    def personal(self, shared: Shared, mine: State, mix: float | None = None) -> tuple[Tree, Tree]:
        return mine["personal"], shared["buffers"]

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        received, memory = shared["params"], descend_start(self, shared["params"])
        personal = {"params": mine["personal"], "memory": memory}
        return {"anchor": received, "params": received, "memory": memory, "personal": personal}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        shared, personal = {"params": carry["params"], "memory": carry["memory"]}, carry["personal"]
        own = phase.to(next(iter(carry["anchor"].values())).device) == 1
        now = chosen(own, personal, shared)
        pull = tree.subtract(now["params"], carry["anchor"])
        grads = gradient(self, grad_at, now["params"], now["memory"], track=~own)
        grads = tree.add(grads, pull, self.lam * own.double())
        params, memory = descend(self, now["params"], grads, now["memory"], draws, ctx)
        moved = {"params": params, "memory": memory}
        return {**carry, **chosen(own, shared, moved), "personal": chosen(own, moved, personal)}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        delta = tree.subtract(carry["params"], shared["params"])
        return {"delta": delta}, {"personal": carry["personal"]["params"]}
