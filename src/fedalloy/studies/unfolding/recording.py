"""A solver that also sums the loss and the gradient of every local step, for the learning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.errors import SpecError
from fedalloy.core.objective import ApplyCapability, StepGradient
from fedalloy.core.protocols import Carry, GradAt, Objective, Shared
from fedalloy.core.types import Context, Part, Payload, State, Tree
from fedalloy.core.wrappers import SolverWrapper

_NOTED = "noted"
"""The key of the sums in the carry, beside the inner solver's keys."""


class Noted:
    """``grad_at`` that records the loss and the gradient of its first call in a step.

    For a solver that minimises a function of the loss, the loss itself is recorded.
    """

    def __init__(self, grad_at: GradAt, outer: Objective | None) -> None:
        self._grad_at, self._outer = grad_at, outer
        self.loss: Tensor | None = None
        self.gradient: Tree = {}

    def __call__(
        self,
        params: Tree,
        *,
        track: bool | Tensor = True,
        of: Callable[[Tensor], Tensor] | None = None,
        by: Callable[[ApplyCapability, Tensor, Tensor], Tensor] | None = None,
        fixed: Tree | None = None,
    ) -> Tree:
        if by is not None or fixed is not None:
            raise SpecError("weights are learned only for solvers that minimise the task's loss; this one has another")
        grads = self._grad_at(params, track=track, of=of)
        if self.loss is None:
            self._note(params, grads if of is None else None)
        return grads

    def outputs(self, params: Tree, x: Tensor) -> Tensor:
        """The model's outputs, as from the batch's ``grad_at``."""
        return self._grad_at.outputs(params, x)

    def _note(self, params: Tree, grads: Tree | None) -> None:
        base = self._grad_at
        assert isinstance(base, StepGradient)
        if self._outer is None and grads is not None:
            self.loss, self.gradient = base.loss, grads
            return
        asked = base.under(self._outer)
        self.gradient = asked(params, track=False)
        self.loss = asked.loss


@dataclass(frozen=True)
class Recording(SolverWrapper):
    """The inner solver, and beside its update the parts ``slope`` (the sum of the gradients) and ``tally`` (the sum
    of the losses); with ``outer`` they are those of another objective."""

    outer: Objective | None = None

    @property
    def parts(self) -> Mapping[str, Part]:
        return {**self.inner.parts, "slope": Part("sum"), "tally": Part("stack", like="tally")}

    def init_shared(self, params: Tree) -> Shared:
        first = next(iter(params.values()))
        return {**self.inner.init_shared(params), "tally": {"loss": first.new_zeros(())}}

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        noted = {"slope": tree.zeros_like(shared[self.target]), "tally": dict(shared["tally"])}
        return {**self.inner.begin(shared, mine, ctx), _NOTED: noted}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        noted, sums = Noted(grad_at, self.outer), carry[_NOTED]
        moved = self.inner.step(_without(carry), noted, draws, phase, ctx)
        if noted.loss is not None:
            loss: Tensor = sums["tally"]["loss"] + noted.loss
            sums = {"slope": tree.add(sums["slope"], noted.gradient), "tally": {"loss": loss}}
        return {**moved, _NOTED: sums}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        payload, kept = self.inner.end(_without(carry), shared, mine, steps, ctx)
        return {**payload, **carry[_NOTED]}, kept


def _without(carry: Carry) -> Carry:
    """The inner solver's own carry."""
    return {name: value for name, value in carry.items() if name != _NOTED}
