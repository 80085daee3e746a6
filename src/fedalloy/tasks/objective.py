"""Any ``nn.Module`` and a loss as pure functions of parameters and buffers."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.func import grad_and_value

from fedalloy.core.buckets import Buckets
from fedalloy.core.errors import SpecError
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.core.objective import ApplyCapability, Objective, StepGradient
from fedalloy.core.types import Tree
from fedalloy.tasks.augmentation import Augmentation
from fedalloy.tasks.calling import scores_in
from fedalloy.tasks.huggingface import scored_by
from fedalloy.tasks.losses.loss import Loss, PerExample, choose, name_of
from fedalloy.tasks.losses.model_loss import ModelLoss, own_loss
from fedalloy.tasks.pure_module import Factory, PureModule
from fedalloy.tasks.skeletons import own_buffers
from fedalloy.tasks.trainable import Patterns

_ALIKE = 1e-3
"""How far the model's own loss may be from that of its scores, as a share of it; models compute theirs in float32."""
_LOSS_IS = ("loss", "_called")
"""Methods that compute the loss; if a subclass overrides one, kernels for named losses must not be used."""


@dataclass(eq=False)
class ModuleGradient(StepGradient):
    """``grad_at`` for a module, by autograd itself wherever no transform is active."""

    def __call__(
        self,
        params: Tree,
        *,
        track: bool | Tensor = True,
        of: Callable[[Tensor], Tensor] | None = None,
        by: Callable[[ApplyCapability, Tensor, Tensor], Tensor] | None = None,
        fixed: Tree | None = None,
    ) -> Tree:
        inside = torch.is_grad_enabled() or peek_interpreter_stack() is not None
        if by or fixed or (inside and (track is not True or of)):
            return self.answer(params, track, of, by, fixed)
        if inside:
            return self._by_transform(params)
        # Autograd itself, where nobody differentiates through it: a transform wraps every tensor of the model, which
        # takes longer than the operations of a small batch, and refuses functions that were written for autograd only.
        with torch.enable_grad():
            leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
            loss, buffers = self.objective.loss(leaves, self.buffers, self.x, self.y, self.mask, self.draw)
            asked = loss if of is None else of(loss)
        buffers = {name: leaf.detach() for name, leaf in buffers.items()}
        if track is True:
            self.buffers = buffers
        else:
            self.keep(buffers, track)
        self.loss = loss.detach() if self.loss is None else self.loss
        if not asked.requires_grad:
            return {name: torch.zeros_like(leaf) for name, leaf in params.items()}
        grads = torch.autograd.grad(asked, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(leaves, grads, strict=True))

    def _by_transform(self, params: Tree) -> Tree:
        """The same inside other transforms, or where somebody differentiates through it."""
        gradient = grad_and_value(self.objective.loss, has_aux=True)
        grads, (loss, self.buffers) = gradient(params, self.buffers, self.x, self.y, self.mask, self.draw)
        self.loss = loss if self.loss is None else self.loss
        return dict(grads)


class ModuleObjective(Objective):
    """A model built by ``factory``, or a module that is every seed's starting point, and a loss.

    Examples that are dicts of tensors are passed to the model as keyword arguments, tuples as positional ones.
    ``loss`` is the name of a loss, a loss, or a function of ``(outputs, y)`` with one value per example; ``unit`` says
    what ``num_examples`` counts. Parameters with ``requires_grad`` are trained and exchanged, or those whose names
    match the patterns ``trainable`` (``head.*``); all others are frozen: the objective keeps them. All functions are
    pure, so they work under ``torch.func.grad`` and ``vmap`` (:class:`fedalloy.tasks.pure_module.PureModule`).
    ``example`` are a few rows of the data: lazy layers get their sizes from them, and the model is called with them
    once, to see what it draws and whether batches may be padded. ``augment`` changes training examples at random,
    ``buckets`` are the lengths to which batches of sequences are cut.

    >>> objective = ModuleObjective(lambda: nn.Linear(4, 3))
    >>> params, buffers = objective.init(Key.of(1))
    >>> params["weight"].shape, buffers
    (torch.Size([3, 4]), {})
    """

    gradient = ModuleGradient

    def __init__(
        self,
        factory: Factory | nn.Module,
        loss: str | PerExample | Loss = "cross_entropy",
        *,
        trainable: Patterns = None,
        dtype: torch.dtype = torch.float32,
        hits: PerExample | None = None,
        unit: Literal["examples", "targets"] = "examples",
        example: Inputs | None = None,
        augment: Augmentation | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        self._augment = augment or None
        self.buckets: Buckets | None = buckets
        if buckets is not None and example is not None:
            buckets.check(example)
        self.unit: Literal["examples", "targets"] = unit
        self._loss = choose(loss)
        self._model = PureModule(factory, trainable, dtype, example)
        if self._loss == ModelLoss():
            self._loss = ModelLoss(scored_by(self._model.training))
        self._named = name_of(self._loss)
        self._hits = hits or self._loss.hits

    @property
    def needs_full_batches(self) -> bool:
        """Whether the training loss depends on the whole batch (BatchNorm, random draws whose first axis is not the
        batch, a loss that the model computes itself), so that no row may be padding."""
        return self._model.couples or isinstance(self._loss, ModelLoss)

    @property
    def single_start(self) -> bool:
        """Whether every key gives the same initial values: the model was given as a module, not as a function."""
        return self._model.single_start

    def module(self, params: Tree, buffers: Tree) -> nn.Module:
        """The model as the user gave it, in evaluation mode, with these parameters and buffers."""
        return self._model.filled({**params, **buffers})

    @property
    def told_model(self) -> dict[str, Any] | None:
        """How to build the model again, as plain values, if it is a named one with all its parameters trained."""
        return self._model.told

    @property
    def takes_integers(self) -> bool:
        """Whether whole numbers reach the model as they are; false if it accepts them only as floats."""
        return not self._model.casts

    def trains_on_one(self, x: Inputs) -> bool:
        """Whether the model can be trained on the single example ``x``; with BatchNorm over vectors it cannot."""
        if not self._model.has_batchnorm:
            return True
        params, buffers = self.init(Key.of(0))
        try:
            with torch.no_grad():
                self._model(True, params, buffers, x, torch.zeros((), dtype=torch.int64))
        except ValueError as error:
            return "more than 1 value per channel" not in str(error)
        return True

    @property
    def scores_by_batch(self) -> bool:
        """Whether outputs depend on the batch in evaluation too (BatchNorm without running statistics)."""
        norms = (m for m in self._model.evaluation.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        return any(norm.running_mean is None for norm in norms)

    @property
    def structure(self) -> nn.Module:
        """The module, for engines that have fast kernels for some structures. Read only."""
        return self._model.training

    @property
    def loss_name(self) -> str | None:
        """The name of the loss; None for a user's function, if a subclass or instance overrides the computation, or if
        examples are augmented before it: kernels for losses by name read the examples themselves."""
        mine = type(self)
        if (
            self._augment is not None
            or self.buckets is not None
            or any(name in vars(self) or getattr(mine, name) is not getattr(ModuleObjective, name) for name in _LOSS_IS)
        ):
            return None
        return self._named

    @property
    def loss_rule(self) -> Loss:
        """The loss as a value."""
        return self._loss

    @property
    def frozen(self) -> Tree:
        """The leaves that are neither trained nor exchanged."""
        return self._model.frozen

    @property
    def forms(self) -> dict[str, Tree]:
        """Names, shapes and types of the exchanged ``params`` and ``buffers``, as meta tensors without data."""
        module, selection = self._model.training, self._model.selection
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        chosen = {"params": selection.params, "buffers": selection.buffers}
        return {part: {name: named[name].detach().to("meta") for name in names} for part, names in chosen.items()}

    @property
    def needs_draw(self) -> bool:
        """Whether ``loss`` needs a random draw (the model has dropout, or draws other random numbers)."""
        return self._model.draws or self._augment is not None

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of parameters, buffers and inputs."""
        return self._model.dtype

    def to(self, device: torch.device | str) -> Self:
        """The same objective with its frozen leaves on a device; the caller places the exchanged leaves."""
        moved = copy.copy(self)
        moved._model = self._model.to(device)
        return moved

    def hollowed(self) -> Self:
        """The same objective, for whoever brings the parameters with every call, without those that the model was built
        with: at a node they would take as much memory as the received ones."""
        self._model.hollowed()
        return self

    def remodelled(self, change: Callable[[nn.Module], nn.Module]) -> ModuleObjective:
        """The same loss, patterns and precision for the model that ``change`` returns, with its initial values."""
        model = self._model
        return ModuleObjective(
            lambda: change(model.factory()), self._loss, trainable=model.patterns, dtype=model.dtype, hits=self._hits,
            unit=self.unit, augment=self._augment, buckets=self.buckets,
        )  # fmt: skip

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Fresh parameters and buffers: the model as ``factory`` initialises it under this key."""
        return self._model.init(key)

    def loss(
        self, params: Tree, buffers: Tree, x: Inputs, y: Inputs, mask: Tensor | None = None, draw: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        """Mean training loss over the (masked) batch, and the buffers after it.

        ``draw`` is the state of a key as an int64 scalar tensor: dropout number ``i`` uses the key
        ``Key(draw).fold("dropout", i)``.
        """
        if mask is not None and self.needs_full_batches:
            raise SpecError(
                "a padded batch would enter the statistics of BatchNorm, or change the model's random draws: give "
                "whole batches without a mask (engine 'loop'), or use GroupNorm"
            )
        if self._augment is not None:
            x, y = self._augmented(x, y, draw)
        if isinstance(self._loss, ModelLoss):
            return self._models_loss(params, buffers, x, y, draw)
        outputs, new = self._called(params, buffers, x, draw, mask is not None)
        losses = self._loss.losses(outputs, y)
        counts = None if isinstance(y, Tensor) and y.dim() == 1 else self._loss.counts(y)
        return losses.mean() if mask is None and counts is None else _mean(losses, mask, counts), new

    def _augmented(self, x: Inputs, y: Inputs, draw: Tensor | None) -> tuple[Inputs, Inputs]:
        if self._augment is None or draw is None:
            raise SpecError("augmentation in training needs a random draw: call loss(..., draw=key)")
        return self._augment.apply(x, y, draw, self._loss.ignored)

    @property
    def augmentation(self) -> Augmentation | None:
        """What happens to training examples."""
        return self._augment

    def outputs(self, params: Tree, buffers: Tree, x: Inputs) -> Tensor:
        """The model's outputs, in evaluation mode."""
        return scores_in(self._model(False, params, buffers, x)[0])

    @property
    def capabilities(self) -> frozenset[str]:
        """The names of the model's capabilities; an ordinary model only classifies."""
        known: frozenset[str] = getattr(self._model.training, "capabilities", frozenset({"classify"}))
        return known

    @property
    def classes(self) -> int:
        """The number of classes of a model with capabilities; 0 for an ordinary model, which does not declare it."""
        return int(getattr(self._model.training, "classes", 0))

    def apply_capability(
        self,
        capability: str,
        params: Tree,
        buffers: Tree,
        inputs: tuple[Tensor, ...],
        draw: Tensor | None = None,
        training: bool = False,
    ) -> tuple[Any, Tree]:
        """The result of one of the model's capabilities (:class:`fedalloy.tasks.models.capabilities.CapabilityModule`),
        and the buffers after it. ``draw`` is the key of the dropout masks, as in ``loss``."""
        named: dict[str, Any] = {"capability": capability} if hasattr(self._model.training, "capabilities") else {}
        new = own_buffers(buffers, inputs[0], params) if training and buffers else buffers
        return self._model(training, params, new, inputs, draw, **named)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of every example."""
        return self._loss.losses(outputs, y)

    def counts(self, y: Inputs) -> Tensor | None:
        """How many targets of every example count; None: every example counts once."""
        return self._loss.counts(y)

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Whether every example is classified correctly, as 0 or 1; NaN for a regression."""
        return self._hits(outputs, y)

    def _models_loss(
        self, params: Tree, buffers: Tree, x: Inputs, y: Tensor, draw: Tensor | None
    ) -> tuple[Tensor, Tree]:
        """The loss that the model computes itself; 0 where nothing counts, for which models return NaN."""
        new = own_buffers(buffers, x, params) if buffers else {}
        returned, new = self._model(True, params, new, x, draw, labels=y)
        loss, counts = own_loss(returned), self._loss.counts(y)
        return (loss if counts is None else torch.where(counts.sum() > 0, loss, torch.zeros_like(loss))), new

    @torch.no_grad()
    def compare_own_loss(self, x: Inputs, y: Tensor) -> None:
        """Warn if the loss that the model computes itself is another one for these examples than that of its scores."""
        y = y.to(self.dtype) if y.is_floating_point() else y
        try:
            params, buffers = self.init(Key.of(0))
            returned, _ = self._model(False, params, buffers, x, labels=y)
            own, each, counts = own_loss(returned), self.losses(scores_in(returned), y), self._loss.counts(y)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return  # training fails too, where the error can name the client
        scored = each.mean() if counts is None else _mean(each, None, counts)
        if bool((own - scored).abs() > _ALIKE * scored.abs().clamp(min=1.0)):
            warnings.warn(
                f"the loss that the model computes itself is {float(own):.4g} for the first examples, and that by "
                f"which it is scored {float(scored):.4g}: name that of the scores (loss = {{ kind = 'model', scored_by "
                "= ... }) or, for transformers, set problem_type in the model's configuration",
                RuntimeWarning,
                stacklevel=2,
            )

    def _called(self, params: Tree, buffers: Tree, x: Inputs, draw: Tensor | None, padded: bool) -> tuple[Tensor, Tree]:
        """The outputs in training mode, and the buffers after the call."""
        new = own_buffers(buffers, x, params) if buffers else {}
        returned, new = self._model(True, params, new, x, draw, padded)
        return (returned if isinstance(returned, Tensor) else scores_in(returned)), new


def _mean(losses: Tensor, mask: Tensor | None, counts: Tensor | None) -> Tensor:
    """The mean over the examples of a batch, or over all their targets that count."""
    if counts is None:
        assert mask is not None
        return torch.where(mask, losses, torch.zeros_like(losses)).sum() / mask.sum().clamp(min=1)
    counts = counts if mask is None else counts * mask
    kept = torch.where(counts > 0, losses * counts, torch.zeros_like(losses))
    return kept.sum() / counts.sum().clamp(min=1)
