"""Any ``nn.Module`` and a loss as pure functions of parameters and buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from fedalloy.core import renamed
from fedalloy.core.errors import SpecError
from fedalloy.core.inputs import Inputs, device_of, each
from fedalloy.core.inputs import leaves as leaves_of
from fedalloy.core.keys import Key
from fedalloy.core.objective import ApplyCapability, Objective, StepGradient
from fedalloy.core.types import Tree
from fedalloy.tasks.dropout import Dropout
from fedalloy.tasks.losses.loss import Loss, PerExample, choose, name_of
from fedalloy.tasks.trainable import Selection, select

Factory = Callable[[], nn.Module]
_LOSS_IS = ("loss", "_called", "_input", "_others")
"""Methods that compute the loss; if a subclass overrides one, kernels for named losses must not be used."""


@dataclass(eq=False)
class ModuleGradient(StepGradient):
    """``grad_at`` for a module, with a fast path for the plain gradient, which nearly every step uses."""

    def __call__(
        self,
        params: Tree,
        *,
        track: bool | Tensor = True,
        of: Callable[[Tensor], Tensor] | None = None,
        by: Callable[[ApplyCapability, Tensor, Tensor], Tensor] | None = None,
        fixed: Tree | None = None,
    ) -> Tree:
        if track is not True or of or by or fixed:
            return self.answer(params, track, of, by, fixed)
        gradient = grad_and_value(self.objective.loss, has_aux=True)
        grads, (loss, self.buffers) = gradient(params, self.buffers, self.x, self.y, self.mask, self.draw)
        self.loss = loss if self.loss is None else self.loss
        return dict(grads)


class ModuleObjective(Objective):
    """A model built by ``factory`` and a loss.

    Examples that are dicts of tensors are passed to the model as keyword arguments.
    ``loss`` is the name of a loss, a loss, or a function of ``(outputs, y)`` with one value per example; ``unit`` says
    what ``num_examples`` counts.
    ``trainable`` are name patterns (``head.*``): leaves that they do not match are frozen: the
    objective keeps them, and they are neither trained nor exchanged. All functions are pure, so they work under
    ``torch.func.grad`` and ``vmap``: every call passes its leaves to one of two skeletons of the module, in training
    or in evaluation mode, which never change.

    >>> objective = ModuleObjective(lambda: nn.Linear(4, 3))
    >>> params, buffers = objective.init(Key.of(1))
    >>> params["weight"].shape, buffers
    (torch.Size([3, 4]), {})
    """

    gradient = ModuleGradient

    def __init__(
        self,
        factory: Factory,
        loss: str | PerExample | Loss = "cross_entropy",
        *,
        trainable: tuple[str, ...] = ("*",),
        dtype: torch.dtype = torch.float32,
        hits: PerExample | None = None,
        unit: Literal["examples", "targets"] = "examples",
    ) -> None:
        self._unit: Literal["examples", "targets"] = unit
        self._factory, self._dtype, self._patterns = factory, dtype, trainable
        self._loss = choose(loss)
        self._hits = hits or self._loss.hits
        module = self._build(Key.of(0).fold("skeleton"))
        _refuse_foreign_dropout(module)
        self._selection: Selection = select(module, trainable)
        renamed.refuse_old_attributes(module, renamed.MODEL)
        self._training = _skeleton(module).train()
        self._evaluation = _skeleton(module).eval()
        for name in self._selection.frozen_modules:
            self._training.get_submodule(name).training = False
        leaves = _leaves(module)
        self._constants = {name: leaves[name] for name in self._selection.constants}
        self._dropouts = [name for name, part in self._training.named_modules() if _drops(part)]

    @property
    def needs_full_batches(self) -> bool:
        """Whether training outputs depend on the whole batch (BatchNorm), so that no row may be padding."""
        return any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in self._training.modules())

    def trains_on_one(self, x: Inputs) -> bool:
        """Whether the model can be trained on the single example ``x``; with BatchNorm over vectors it cannot."""
        if not self.needs_full_batches:
            return True
        params, buffers = self.init(Key.of(0))
        leaves = {**self._others(x, torch.zeros((), dtype=torch.int64)), **params, **buffers}
        try:
            with torch.no_grad():
                self._called(self._training, leaves, x)
        except ValueError as error:
            return "more than 1 value per channel" not in str(error)
        return True

    @property
    def scores_by_batch(self) -> bool:
        """Whether outputs depend on the batch in evaluation too (BatchNorm without running statistics)."""
        norms = (m for m in self._evaluation.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        return any(norm.running_mean is None for norm in norms)

    @property
    def structure(self) -> nn.Module:
        """The module, for engines that have fast kernels for some structures. Read only."""
        return self._training

    @property
    def loss_name(self) -> str | None:
        """The name of the loss; None for a user's function, or if a subclass or instance overrides the computation."""
        mine = type(self)
        if any(name in vars(self) or getattr(mine, name) is not getattr(ModuleObjective, name) for name in _LOSS_IS):
            return None
        return name_of(self._loss)

    @property
    def loss_rule(self) -> Loss:
        """The loss as a value."""
        return self._loss

    @property
    def frozen(self) -> Tree:
        """The leaves that are neither trained nor exchanged."""
        return self._constants

    @property
    def forms(self) -> dict[str, Tree]:
        """Names, shapes and types of the exchanged ``params`` and ``buffers``, as meta tensors without data."""
        named = {**dict(self._training.named_parameters()), **dict(self._training.named_buffers())}
        chosen = {"params": self._selection.params, "buffers": self._selection.buffers}
        return {part: {name: named[name].detach().to("meta") for name in names} for part, names in chosen.items()}

    @property
    def needs_draw(self) -> bool:
        """Whether ``loss`` needs a random draw (the model has ``Dropout``)."""
        return bool(self._dropouts)

    @property
    def dtype(self) -> torch.dtype:
        """The floating-point type of parameters, buffers and inputs."""
        return self._dtype

    def to(self, device: torch.device | str) -> Self:
        """The same objective with its frozen leaves on a device; the caller places the exchanged leaves."""
        moved = copy.copy(self)
        moved._constants = {name: leaf.to(device) for name, leaf in self._constants.items()}
        return moved

    def remodelled(self, change: Callable[[nn.Module], nn.Module]) -> ModuleObjective:
        """The same loss, patterns and precision for the model that ``change`` returns, with its initial values."""
        factory = self._factory
        return ModuleObjective(
            lambda: change(factory()), self._loss, trainable=self._patterns, dtype=self._dtype, hits=self._hits,
            unit=self._unit,
        )  # fmt: skip

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Fresh parameters and buffers: the model as ``factory`` initialises it under this key."""
        leaves = _leaves(self._build(key))
        params = {name: leaves[name] for name in self._selection.params}
        return params, {name: leaves[name] for name in self._selection.buffers}

    def loss(
        self, params: Tree, buffers: Tree, x: Inputs, y: Inputs, mask: Tensor | None = None, draw: Tensor | None = None
    ) -> tuple[Tensor, Tree]:
        """Mean training loss over the (masked) batch, and the buffers after it.

        ``draw`` is the state of a key as an int64 scalar tensor: dropout number ``i`` uses the key
        ``Key(draw).fold("dropout", i)``.
        """
        if mask is not None and self.needs_full_batches:
            raise SpecError(
                "a padded batch would enter the statistics of BatchNorm: give whole batches without a mask "
                "(engine 'loop'), or use GroupNorm"
            )
        new = _own(buffers, x, params) if buffers else {}
        others = self._others(x, draw) if self._constants or self._dropouts else {}
        losses = self._loss.losses(self._called(self._training, {**others, **params, **new}, x), y)
        return _mean(losses, mask, self._loss.counts(y)), new

    def outputs(self, params: Tree, buffers: Tree, x: Inputs) -> Tensor:
        """The model's outputs, in evaluation mode."""
        return self._called(self._evaluation, {**self._others(x, None), **params, **buffers}, x)

    @property
    def capabilities(self) -> frozenset[str]:
        """The names of the model's capabilities; an ordinary model only classifies."""
        known: frozenset[str] = getattr(self._training, "capabilities", frozenset({"classify"}))
        return known

    @property
    def classes(self) -> int:
        """The number of classes of a model with capabilities; 0 for an ordinary model, which does not declare it."""
        return int(getattr(self._training, "classes", 0))

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
        given = tuple(self._input(value) for value in inputs)
        new = _own(buffers, given[0], params) if training and buffers else buffers
        leaves = {**self._others(given[0], draw if training else None), **params, **new}
        module = self._training if training else self._evaluation
        named = {"capability": capability} if hasattr(module, "capabilities") else {}
        return functional_call(module, leaves, given, named), new

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of every example."""
        return self._loss.losses(outputs, y)

    def counts(self, y: Inputs) -> Tensor | None:
        """How many targets of every example count; None: every example counts once."""
        return self._loss.counts(y)

    @property
    def unit(self) -> Literal["examples", "targets"]:
        """What ``num_examples`` counts."""
        return self._unit

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Whether every example is classified correctly, as 0 or 1; NaN for a regression."""
        return self._hits(outputs, y)

    def _build(self, key: Key) -> nn.Module:
        """The factory's model, with initial values from a key; the global generator is not changed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key.seed())
            return self._factory().to(self._dtype)

    def _called(self, module: nn.Module, leaves: Tree, x: Inputs) -> Tensor:
        """The outputs of a module with these leaves, for one tensor or for several as keyword arguments."""
        if isinstance(x, Tensor):
            given = x.to(self._dtype) if x.is_floating_point() else x
            result: Tensor = functional_call(module, leaves, (given,))
        else:
            result = functional_call(module, leaves, (), {name: each(self._input, value) for name, value in x.items()})
        return result

    def _input(self, x: Tensor) -> Tensor:
        return x.to(self._dtype) if x.is_floating_point() else x

    def _others(self, x: Inputs, draw: Tensor | None) -> Tree:
        """The leaves of a call besides the exchanged ones: the frozen ones on the device of the data (no copy if ``to``
        has moved them there) and, with a draw, one key per dropout: the draw folded with the module's ordinal."""
        frozen = {name: leaf.to(device_of(x)) for name, leaf in self._constants.items()}
        if draw is None:
            return frozen
        return frozen | {
            f"{name}.draw".removeprefix("."): torch.as_tensor(Key(draw).fold("dropout", ordinal).state)
            for ordinal, name in enumerate(self._dropouts)
        }


def _leaves(module: nn.Module) -> Tree:
    """Detached copies of all parameters and buffers, by name."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: leaf.detach().clone() for name, leaf in named.items()}


def _skeleton(module: nn.Module) -> nn.Module:
    """A copy of the structure that shares its tensors, because every call replaces all of them."""
    return copy.deepcopy(module, {id(leaf): leaf for leaf in [*module.parameters(), *module.buffers()]})


def _own(buffers: Tree, x: Inputs, params: Tree) -> Tree:
    """Copies that a module may write to. Adding a zero made from the data and the parameters gives the copy
    every batch axis they have: under vmap a module cannot write a batched value into a shared buffer."""
    first, *others = leaves_of(x)
    zero = torch.zeros_like(first.reshape(-1)[:1]).sum()
    for leaf in (*others, *params.values()):
        zero = zero + torch.zeros_like(leaf.reshape(-1)[:1]).sum()
    return {name: leaf + zero.to(leaf.dtype) for name, leaf in buffers.items()}


def _mean(losses: Tensor, mask: Tensor | None, counts: Tensor | None) -> Tensor:
    """The mean over the examples of a batch, or over all their targets that count."""
    if counts is None and mask is None:
        return losses.mean()
    if counts is None:
        assert mask is not None
        return torch.where(mask, losses, torch.zeros_like(losses)).sum() / mask.sum().clamp(min=1)
    counts = counts if mask is None else counts * mask
    kept = torch.where(counts > 0, losses * counts, torch.zeros_like(losses))
    return kept.sum() / counts.sum().clamp(min=1)


def _drops(module: nn.Module) -> bool:
    return isinstance(module, Dropout) and module.training


def _refuse_foreign_dropout(module: nn.Module) -> None:
    """Refuse torch's dropout: it uses the global generator, so masks would depend on engine and order of clients."""
    for name, part in module.named_modules():
        inside = isinstance(part, nn.RNNBase | nn.MultiheadAttention) and part.dropout > 0
        if isinstance(part, nn.modules.dropout._DropoutNd) or inside:
            raise SpecError(
                f"'{name or 'the model'}' is a {type(part).__name__} that drops at random by itself: its masks would "
                "depend on the engine; use fedalloy.Dropout, whose mask comes from the client's key"
            )
