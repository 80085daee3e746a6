"""A model and its loss as pure functions, and what a local step gets of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad

from fedalloy.core import renamed
from fedalloy.core.declared import declared
from fedalloy.core.errors import SpecError
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.core.types import Tree

ApplyCapability = Callable[..., Any]
"""``model(capability, *inputs)``: what a capability returns, in training mode, with the model's present leaves."""
Outputs = Callable[[Tree, Tensor], Tensor]
"""``outputs(params, x)``: what the model says in evaluation mode, with the buffers of this moment."""
Fresh = Callable[[Key], tuple[Tree, Tree]]
"""Draws a new model, parameters and buffers, from a key: ``Objective.init``."""


class GradAt(Protocol):
    """Gradients of this step's batch, and what the model says elsewhere.

    ``grad_at(params)`` is the gradient of the mean loss of this step's batch at ``params``;
    ``grad_at(params, of=function)`` that of a function of this mean loss. With ``track`` false (a bool, or a tensor of
    one) the batch statistics met on the way do not enter the buffers. ``grad_at(params, by=loss, fixed=others)`` is for
    models that do more than classify: the gradient of the mean of ``loss(model, x, y)``, one value per example, in
    ``params`` alone, where ``model(capability, *inputs)`` has the leaves of ``fixed`` too.
    """

    @abstractmethod
    def __call__(
        self,
        params: Tree,
        *,
        track: bool | Tensor = True,
        of: Callable[[Tensor], Tensor] | None = None,
        by: Callable[[ApplyCapability, Tensor, Tensor], Tensor] | None = None,
        fixed: Tree | None = None,
    ) -> Tree:
        """The gradient."""

    def outputs(self, params: Tree, x: Tensor) -> Tensor:
        """What the model says about any ``x``, in evaluation mode: for gradients with respect to inputs."""


@dataclass(eq=False)
class StepGradient(GradAt):
    """``grad_at`` of one step: it remembers the loss, the plain one where it was first asked, and the buffers."""

    objective: Objective
    x: Inputs
    y: Inputs
    mask: Tensor | None
    buffers: Tree
    draw: Tensor | None
    loss: Tensor | None = None
    _applied: int = 0

    def outputs(self, params: Tree, x: Tensor) -> Tensor:
        """What the model says about any ``x``, in evaluation mode."""
        return self.objective.outputs(params, self.buffers, x)

    def under(self, objective: Objective | None) -> StepGradient:
        """The same batch asked again, under another objective where one is given."""
        asked = objective or self.objective
        return asked.gradient(asked, self.x, self.y, self.mask, self.buffers, self.draw)

    def answer(
        self,
        params: Tree,
        track: bool | Tensor,
        of: Callable[[Tensor], Tensor] | None,
        by: Callable[[ApplyCapability, Tensor, Tensor], Tensor] | None,
        fixed: Tree | None,
    ) -> Tree:
        """The gradient for any question, by the objective's ``loss`` and ``act`` alone."""

        def loss_of(leaves: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
            whole = {**(fixed or {}), **leaves}
            if by is None:
                loss, buffers = self.objective.loss(whole, self.buffers, self.x, self.y, self.mask, self.draw)
            else:
                loss, buffers = self._own_loss(whole, by)
            return (loss if of is None else of(loss)), (loss, buffers)

        grads, (loss, buffers) = grad(loss_of, has_aux=True)(params)
        if isinstance(track, Tensor):
            old = self.buffers
            self.buffers = {name: torch.where(track.to(new.device), new, old[name]) for name, new in buffers.items()}
        elif track:
            self.buffers = buffers
        self.loss = loss if self.loss is None else self.loss
        return dict(grads)

    def _own_loss(self, leaves: Tree, by: Callable[[ApplyCapability, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tree]:
        """The masked mean of a loss that calls the model itself; every call of a step has dropout masks of its own."""
        buffers = self.buffers

        def apply_capability(capability: str, *inputs: Tensor) -> Any:
            nonlocal buffers
            draw = None if self.draw is None else torch.as_tensor(Key(self.draw).fold("act", self._applied).state)
            self._applied += 1
            result, buffers = self.objective.apply_capability(capability, leaves, buffers, inputs, draw, training=True)
            return result

        losses, mask = by(apply_capability, self.x, self.y), self.mask
        if mask is None:
            return losses.mean(), buffers
        return torch.where(mask, losses, torch.zeros_like(losses)).sum() / mask.sum().clamp(min=1), buffers


@dataclass(eq=False)
class BatchGradient(StepGradient):
    """``grad_at`` for any objective."""

    def __call__(
        self,
        params: Tree,
        *,
        track: bool | Tensor = True,
        of: Callable[[Tensor], Tensor] | None = None,
        by: Callable[[ApplyCapability, Tensor, Tensor], Tensor] | None = None,
        fixed: Tree | None = None,
    ) -> Tree:
        return self.answer(params, track, of, by, fixed)


class Objective(ABC):
    """A model and its loss as pure functions of parameters and buffers. One's own inherits from this class and writes
    the five functions without a default."""

    gradient: ClassVar[type[StepGradient]] = BatchGradient
    """What steps get as ``grad_at``. One of the objective's own may go a shorter way to the same numbers."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse a class that answers a question by its old name."""
        super().__init_subclass__(**given)
        renamed.refuse_old_members(cls, renamed.OBJECTIVE)

    @abstractmethod
    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Fresh parameters and buffers."""

    @abstractmethod
    def loss(
        self, params: Tree, buffers: Tree, x: Inputs, y: Inputs, mask: Tensor | None, draw: Tensor | None
    ) -> tuple[Tensor, Tree]:
        """Mean training loss over the (masked) batch, and the buffers after it. ``x`` is a tensor, or a dict of them
        for a model with several inputs."""

    @abstractmethod
    def outputs(self, params: Tree, buffers: Tree, x: Inputs) -> Tensor:
        """What the model says, in evaluation mode."""

    @abstractmethod
    def losses(self, outputs: Tensor, y: Inputs) -> Tensor:
        """The loss of every example."""

    @abstractmethod
    def hits(self, outputs: Tensor, y: Inputs) -> Tensor:
        """Whether every example is classified correctly, as 0 or 1."""

    @declared
    def needs_full_batches(self) -> bool:
        """Whether examples of a training batch see each other (BatchNorm), so that no row may be padding."""
        return False

    @declared
    def needs_draw(self) -> bool:
        """Whether ``loss`` needs a random draw (the model has dropout)."""
        return False

    @declared
    def scores_by_batch(self) -> bool:
        """Whether examples see each other in evaluation too."""
        return False

    @declared
    def structure(self) -> nn.Module | None:
        """The module, for engines that look for a structure they have a fast kernel for. Read only."""
        return None

    @declared
    def loss_name(self) -> str | None:
        """The loss by name, for engines that have a fast kernel for it; None where it has none."""
        return None

    @declared
    def loss_rule(self) -> object:
        """What the loss is, as a value that tells it from others; None where the class of the objective says it."""
        return None

    @declared
    def frozen(self) -> Tree:
        """The leaves that are neither trained nor exchanged."""
        return {}

    @declared
    def forms(self) -> Mapping[str, Tree]:
        """Names, shapes and types of what is exchanged, ``params`` and ``buffers``, without content; empty where that
        is known only from ``init``."""
        return {}

    @declared
    def capabilities(self) -> frozenset[str]:
        """What the model can do, by name; an ordinary one only classifies."""
        return frozenset({"classify"})

    @declared
    def classes(self) -> int:
        """How many classes a model with capabilities knows; 0 for an ordinary one, which has outputs instead."""
        return 0

    def trains_on_one(self, x: Inputs) -> bool:
        """Whether the model can be trained on the one example ``x`` (BatchNorm over vectors cannot)."""
        return True

    def apply_capability(
        self,
        capability: str,
        params: Tree,
        buffers: Tree,
        inputs: tuple[Tensor, ...],
        draw: Tensor | None,
        training: bool,
    ) -> tuple[Any, Tree]:
        """What one of the model's capabilities returns, and the buffers after it."""
        raise SpecError(
            f"objective {type(self).__name__} has no capability '{capability}': "
            f"it can {', '.join(sorted(self.capabilities))}"
        )
