"""Control variates against client drift: SCAFFOLD, option II (Karimireddy et al. 2020, arXiv:1910.06378)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.aspects import Fusible, Fusing
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Carry, GradAt, Shared
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Contributions, Part, Payload, State, Tree
from fedalloy.methods.solvers.descent import descend, descend_start, gradient
from fedalloy.methods.solvers.training import LocalTraining, plain_sgd_hint


@register("solver", "scaffold")
@dataclass(frozen=True)
class Scaffold(LocalTraining, Fusible):
    """``y <- y - lr (grad - c_k + c)``, then ``c_k+ = c_k - c + (w - y) / (steps lr)``.

    The server adds ``(1/K) sum_S (c_k+ - c_k)`` to ``c``. The denominator counts steps, not epochs; with momentum it is
    the length of the update for unit gradients (FedNova's ``|a|_1``): momentum makes updates longer, and a control
    variate must stay a mean gradient. A client that took no step keeps its control variate and does not count, because
    it has no gradient to add to the mean.
    When to use it: strong label skew with full or frequent participation; clients must keep state.
    """

    parts: ClassVar[Mapping[str, Part]] = {"delta": Part(), "control": Part("mean")}
    stateful: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov or not self.plain_but("precision"):
            raise ValueError(
                "scaffold needs optimizer 'sgd' without nesterov and dampening, and no clipping, accumulation or "
                "schedule over steps: its control variates are mean gradients"
            )
        if self.precision == "fp16":
            raise ValueError("scaffold cannot skip steps, as precision 'fp16' does: choose 'bf16'")

    @property
    def fusing(self) -> Fusing | None:
        if type(self) is not Scaffold or plain_sgd_hint(self) is None:  # see Sgd
            return None
        return Fusing("shifted_descent", {"momentum": self.momentum, "weight_decay": self.weight_decay})

    def init_shared(self, params: Tree) -> Shared:
        return {"control": tree.zeros_like(params)}

    def init_client(self, shared: Shared, key: Key) -> State:
        return {"control": tree.zeros_like(shared["params"])}

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        shift = tree.subtract(shared["control"], mine["control"])
        return {"params": shared["params"], "shift": shift, "memory": descend_start(self, shared["params"])}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        grads = tree.add(gradient(self, grad_at, carry["params"], carry["memory"]), carry["shift"])
        params, memory = descend(self, carry["params"], grads, carry["memory"], draws, ctx)
        return {"params": params, "shift": carry["shift"], "memory": memory}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        delta = tree.subtract(carry["params"], shared["params"])
        moved = (steps > 0).to(steps.dtype)
        scale = moved / (self._length(steps.clamp(min=1)) * ctx.local_lr)
        change = tree.map_leaves(
            lambda d, control: -(scale * d + moved * control).to(d.dtype), delta, shared["control"]
        )
        kept = {"control": tree.add(mine["control"], change)}
        return {"delta": delta, "control": change}, kept

    def _length(self, steps: Tensor) -> Tensor:
        """``|a|_1`` in closed form, because under ``vmap`` the number of steps has no value to loop over."""
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho) if rho else steps

    def absorb(self, shared: Shared, aggregate: Payload, cohort: Contributions, ctx: Context) -> Shared:
        share = len(cohort) / ctx.population
        return {**shared, "control": tree.add(shared["control"], aggregate["control"], share)}
