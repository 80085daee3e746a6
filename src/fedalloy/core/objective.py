"""A model and its loss as pure functions, and what a local step gets of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from fedalloy.core.keys import Key
from fedalloy.core.types import Tree

Act = Callable[..., Any]
"""``model(role, *inputs)``: what the model does in one of its roles, in training mode, with its present leaves."""
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
    ``params`` alone, where ``model(role, *inputs)`` has the leaves of ``fixed`` too (see ``LocalSolver.roles``).
    """

    def __call__(
        self,
        params: Tree,
        *,
        track: bool | Tensor = True,
        of: Callable[[Tensor], Tensor] | None = None,
        by: Callable[[Act, Tensor, Tensor], Tensor] | None = None,
        fixed: Tree | None = None,
    ) -> Tree:
        """The gradient."""

    def outputs(self, params: Tree, x: Tensor) -> Tensor:
        """What the model says about any ``x``, in evaluation mode: for gradients with respect to inputs."""


class Objective(Protocol):
    """A model and its loss as pure functions of parameters and buffers."""

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Fresh parameters and buffers."""

    def loss(
        self, params: Tree, buffers: Tree, x: Tensor, y: Tensor, mask: Tensor | None, draw: Tensor | None
    ) -> tuple[Tensor, Tree]:
        """Mean training loss over the (masked) batch, and the buffers after it."""

    def outputs(self, params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        """What the model says, in evaluation mode."""

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of every example."""

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Whether every example is classified correctly, as 0 or 1."""


class Actor(Objective, Protocol):
    """An objective whose model does more than classify: what solvers with ``roles`` ask for."""

    @property
    def roles(self) -> frozenset[str]:
        """What the model can do, by name."""

    @property
    def classes(self) -> int:
        """How many classes the model knows."""

    def act(
        self, role: str, params: Tree, buffers: Tree, inputs: tuple[Tensor, ...], draw: Tensor | None, training: bool
    ) -> tuple[Any, Tree]:
        """What the model does in one of its roles, and the buffers after it."""
