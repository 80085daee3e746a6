"""A model and its loss as pure functions, and the gradients that a local step gets from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.func import grad

from fedalloy.core import renamed
from fedalloy.core.buckets import Buckets
from fedalloy.core.declared import declared
from fedalloy.core.errors import SpecError
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.core.types import Tree

ApplyCapability = Callable[..., Any]
"""``model(capability, *inputs)``: the result of a capability in training mode, with the model's current leaves."""
Outputs = Callable[[Tree, Tensor], Tensor]
"""``outputs(params, x)``: the model's outputs in evaluation mode, with the current buffers."""
Fresh = Callable[[Key], tuple[Tree, Tree]]
"""Draws a new model, parameters and buffers, from a key: ``Objective.init``."""


class GradAt(Protocol):
    """Gradients on this step's batch, and the model's outputs on any input.

    ``grad_at(params)`` is the gradient of the mean loss of this step's batch at ``params``;
    ``grad_at(params, of=function)`` that of a function of this mean loss. If ``track`` is false (a bool, or a tensor of
    one), the batch statistics of this call do not enter the buffers. ``grad_at(params, by=loss, fixed=others)`` is for
    models with further capabilities: the gradient of the mean of ``loss(model, x, y)``, one value per example, with
    respect to ``params`` only, where ``model(capability, *inputs)`` has the leaves of ``fixed`` too.
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
        """The model's outputs for any ``x``, in evaluation mode: for gradients with respect to inputs."""


@dataclass(eq=False)
class StepGradient(GradAt):
    """``grad_at`` of one step: it stores the plain loss of the first call and the current buffers."""

    objective: Objective
    x: Inputs
    y: Inputs
    mask: Tensor | None
    buffers: Tree
    draw: Tensor | None
    loss: Tensor | None = None
    _applied: int = 0

    def outputs(self, params: Tree, x: Tensor) -> Tensor:
        """The model's outputs for any ``x``, in evaluation mode."""
        return self.objective.outputs(params, self.buffers, x)

    def under(self, objective: Objective | None) -> StepGradient:
        """A new ``grad_at`` for the same batch, with another objective if given."""
        asked = objective or self.objective
        return asked.gradient(asked, self.x, self.y, self.mask, self.buffers, self.draw)

    def counted(self) -> Tensor | None:
        """Whether anything in this batch counts, as a bool tensor; None if something always does."""
        counts = self.objective.counts(self.y)
        if counts is None:
            return None
        return (counts > 0).any() if self.mask is None else ((counts > 0) & self.mask).any()

    def answer(
        self,
        params: Tree,
        track: bool | Tensor,
        of: Callable[[Tensor], Tensor] | None,
        by: Callable[[ApplyCapability, Tensor, Tensor], Tensor] | None,
        fixed: Tree | None,
    ) -> Tree:
        """The gradient for any arguments, by the objective's ``loss`` and ``apply_capability``."""

        def loss_of(leaves: Tree) -> tuple[Tensor, tuple[Tensor, Tree]]:
            whole = {**(fixed or {}), **leaves}
            if by is None:
                loss, buffers = self.objective.loss(whole, self.buffers, self.x, self.y, self.mask, self.draw)
            else:
                loss, buffers = self._own_loss(whole, by)
            return (loss if of is None else of(loss)), (loss, buffers)

        grads, (loss, buffers) = grad(loss_of, has_aux=True)(params)
        self.keep(buffers, track)
        self.loss = loss if self.loss is None else self.loss
        return dict(grads)

    def keep(self, buffers: Tree, track: bool | Tensor) -> None:
        """Take over the buffers after a call, if it is to enter them."""
        if isinstance(track, Tensor):
            old = self.buffers
            self.buffers = {name: torch.where(track.to(new.device), new, old[name]) for name, new in buffers.items()}
        elif track:
            self.buffers = buffers

    def _own_loss(self, leaves: Tree, by: Callable[[ApplyCapability, Tensor, Tensor], Tensor]) -> tuple[Tensor, Tree]:
        """The masked mean of a loss that calls the model itself; every call within a step has new dropout masks."""
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
    """A model and its loss as pure functions of parameters and buffers. A custom objective inherits from this class and
    implements the five functions without a default."""

    gradient: ClassVar[type[StepGradient]] = BatchGradient
    """The class of ``grad_at``. An objective may have its own class that computes the same numbers faster."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse a class that defines a member by its old name."""
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
        """The model's outputs, in evaluation mode."""

    @abstractmethod
    def losses(self, outputs: Tensor, y: Inputs) -> Tensor:
        """The loss of every example."""

    @abstractmethod
    def hits(self, outputs: Tensor, y: Inputs) -> Tensor:
        """Whether every example is classified correctly, as 0 or 1."""

    def counts(self, y: Inputs) -> Tensor | None:
        """How many targets of every example count, ``[N]`` (the tokens of a sequence that are no padding): the loss of
        a batch is the mean over all of them, and a batch without any is no step. None: every example counts once, as
        always with one target per example."""
        return None

    @declared
    def unit(self) -> Literal["examples", "targets"]:
        """What ``num_examples`` counts: examples, or the targets that count."""
        return "examples"

    @declared
    def told_model(self) -> dict[str, Any] | None:
        """How to build the model again, as plain values; None if only its own program can."""
        return None

    @declared
    def augmentation(self) -> object:
        """What identifies the random changes of training examples; None if there are none."""
        return None

    @declared
    def buckets(self) -> Buckets | None:
        """The lengths to which batches of sequences are cut; None: they keep their padded length."""
        return None

    @declared
    def needs_full_batches(self) -> bool:
        """Whether examples of a training batch affect each other (BatchNorm), so that no row may be padding."""
        return False

    @declared
    def needs_draw(self) -> bool:
        """Whether ``loss`` needs a random draw (the model has dropout)."""
        return False

    @declared
    def takes_integers(self) -> bool:
        """Whether whole numbers reach the model as they are; false if it accepts them only as floats."""
        return True

    @declared
    def scores_by_batch(self) -> bool:
        """Whether examples of a batch affect each other in evaluation too."""
        return False

    @declared
    def structure(self) -> nn.Module | None:
        """The module, for engines that have fast kernels for some structures. Read only."""
        return None

    @declared
    def loss_name(self) -> str | None:
        """The name of the loss, for engines that have a fast kernel for it; None if it has no name."""
        return None

    @declared
    def loss_rule(self) -> object:
        """A value that identifies the loss; None if the objective's class identifies it."""
        return None

    @declared
    def frozen(self) -> Tree:
        """The leaves that are neither trained nor exchanged."""
        return {}

    @declared
    def single_start(self) -> bool:
        """Whether ``init`` gives the same values for every key, as for a model that was built before."""
        return False

    @declared
    def forms(self) -> Mapping[str, Tree]:
        """Names, shapes and dtypes of ``params`` and ``buffers``, without values; empty if they are known only from
        ``init``."""
        return {}

    @declared
    def capabilities(self) -> frozenset[str]:
        """The names of the model's capabilities; an ordinary model only classifies."""
        return frozenset({"classify"})

    @declared
    def classes(self) -> int:
        """The number of classes of a model with further capabilities; 0 for an ordinary one, which has outputs."""
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
        """The result of one of the model's capabilities, and the buffers after it."""
        raise SpecError(
            f"objective {type(self).__name__} has no capability '{capability}': "
            f"it can {', '.join(sorted(self.capabilities))}"
        )
