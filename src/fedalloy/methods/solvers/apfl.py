"""A mixture of the shared model and a local one: APFL (Deng et al. 2020, arXiv:2003.13461)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.aspects import Fusible, Fusing, Personalised
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Carry, GradAt, Shared
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.types import Context, Payload, State, Tree
from fedalloy.methods.solvers.descent import descend, descend_start, gradient
from fedalloy.methods.solvers.mixing import mixture
from fedalloy.methods.solvers.training import LocalTraining, plain_sgd_hint


@register("solver", "apfl", search={"alpha": Range(0.05, 0.95)})
@dataclass(frozen=True)
class Apfl(LocalTraining, Personalised, Fusible):
    """``w <- w - lr grad F(w)`` and ``v <- v - lr alpha grad F(m)`` at the mixture ``m = alpha v + (1 - alpha) w``.

    Parameters are mixed, not outputs. ``adaptive`` also learns each client's weight on its local model,
    ``alpha <- clip(alpha - lr <v - w, grad F(m)>, 0, 1)``; otherwise alpha is constant. All three updates start from
    the same w, v and alpha. A client starts with v = w, the first model it receives. Batch statistics are those of w.
    When to use it: some clients are close to the average client and others far from it.
    """

    stateful: ClassVar[bool] = True
    mixable: ClassVar[bool] = True

    alpha: float = 0.25
    adaptive: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha must lie in [0, 1], got {self.alpha}")

    @property
    def fusing(self) -> Fusing | None:
        plain = type(self) is Apfl and not self.adaptive  # see Sgd
        return plain_sgd_hint(self, kind="mixed_descent") if plain else None

    def init_client(self, shared: Shared, key: Key) -> State:
        first = next(iter(shared["params"].values()))
        alpha = torch.tensor(self.alpha, dtype=first.dtype, device=first.device)
        return {"personal": shared["params"], "alpha": alpha}

    def personal(self, shared: Shared, mine: State, mix: float | None = None) -> tuple[Tree, Tree]:
        return mixture(shared["params"], mine["personal"], mine["alpha"] if mix is None else mix), shared["buffers"]

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        start = descend_start(self, shared["params"])
        return {"params": shared["params"], "memory": start, **mine, "personal_memory": start}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        w, v, alpha = carry["params"], carry["personal"], carry["alpha"]
        grads = gradient(self, grad_at, w, carry["memory"])
        mixed = gradient(self, grad_at, mixture(w, v, alpha), carry["personal_memory"], track=False)
        params, memory = descend(self, w, grads, carry["memory"], draws, ctx)
        own = tree.map_leaves(lambda leaf: alpha * leaf, mixed)
        personal, own_memory = descend(self, v, own, carry["personal_memory"], draws, ctx)
        if self.adaptive:
            lr = self.step_lr(draws, ctx)
            alpha = (alpha - lr * tree.dot(tree.subtract(v, w), mixed)).clamp(0, 1).to(alpha.dtype)
        return {
            "params": params,
            "memory": memory,
            "personal": personal,
            "alpha": alpha,
            "personal_memory": own_memory,
        }

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        kept = {"personal": carry["personal"], "alpha": carry["alpha"]}
        return {"delta": tree.subtract(carry["params"], shared["params"])}, kept
