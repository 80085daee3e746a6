"""FedAvg whose clients keep the model that they have fine-tuned (Yu et al. 2020, arXiv:2002.04758)."""

from __future__ import annotations

from dataclasses import dataclass
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


@register("solver", "finetune", search={"personal_epochs": Range(0, 10)})
@dataclass(frozen=True)
class FineTune(LocalTraining, Personalised):
    """``w`` as in FedAvg; then ``v <- v - lr grad F(v)`` from the trained w for ``personal_epochs``; v stays there.

    A client's own model is therefore the last model that it received after ``epochs + personal_epochs`` epochs on its
    own examples; a client that has not taken part yet uses the shared one. Batch statistics are those of w.
    When to use it: as the baseline of every method with personal models.
    """

    stateful: ClassVar[bool] = True
    linear: ClassVar[bool] = False
    """False: steps of the second phase do not change what is sent."""

    personal_epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.personal_epochs < 0:
            raise ValueError(f"personal_epochs must be 0 or more, got {self.personal_epochs}")

    @property
    def second_epochs(self) -> int:
        return self.personal_epochs

    def init_client(self, shared: Shared, key: Key) -> State:
        return {"personal": shared["params"]}

    def personal(self, shared: Shared, mine: State, mix: float | None = None) -> tuple[Tree, Tree]:
        return mine["personal"], shared["buffers"]

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        received = shared["params"]
        return {"params": received, "personal": received, "memory": descend_start(self, received)}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        own = phase.to(next(iter(carry["params"].values())).device) == 1
        grads = gradient(self, grad_at, carry["personal"], carry["memory"], track=~own)
        moved, memory = descend(self, carry["personal"], grads, carry["memory"], draws, ctx)
        return {"params": chosen(own, carry["params"], moved), "personal": moved, "memory": memory}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        # Without a step there is nothing to keep: the model that was fine-tuned before is the better one.
        kept = chosen(steps > 0, {"personal": carry["personal"]}, {"personal": mine["personal"]})
        return {"delta": tree.subtract(carry["params"], shared["params"])}, kept
