"""Any ``nn.Module`` as a pure function of its leaves, its inputs and a random draw."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedalloy.core import renamed
from fedalloy.core.errors import FedalloyError, SpecError
from fedalloy.core.inputs import Inputs, device_of, to
from fedalloy.core.inputs import leaves as leaves_of
from fedalloy.core.keys import Key
from fedalloy.core.types import Tree
from fedalloy.tasks import huggingface
from fedalloy.tasks.calling import arguments, scores_in
from fedalloy.tasks.checkpointing import PlainCheckpoints, tell
from fedalloy.tasks.dropout import Dropout
from fedalloy.tasks.keyed import KeyedDraws, is_silent, may_draw, seeded_by
from fedalloy.tasks.models.build import NamedModel
from fedalloy.tasks.probing import ProbeResult, close, probe, some_rows
from fedalloy.tasks.skeletons import copied, hollow, is_lazy, leaves_in, materialised, own_buffers, skeleton
from fedalloy.tasks.trainable import Patterns, Selection, select
from fedalloy.tasks.unfit import checked, tell_rounding
from fedalloy.tasks.writing import Writes, refuse_renorm, tracks_rows

Factory = Callable[[], nn.Module]
NEEDS_FACTORY = "needs several starts, and a model that is already built has one: give the function that builds it"
_SKELETON, _EVALUATION, _PROBE = (Key.of(0).fold(use) for use in ("skeleton", "evaluation", "probe"))
_UNPROBED = (
    "the model draws random numbers, and without an example it is not known whether padding would change them: give "
    "ModuleObjective an example, or use the engine 'loop'"
)


class BuiltModule:
    """A module as a factory of copies: its values are the start for every key. Pretrained weights enter this way."""

    def __init__(self, module: nn.Module) -> None:
        self._module = copied(checked(module))

    def __call__(self) -> nn.Module:
        """A copy."""
        return copy.deepcopy(self._module)

    def complete(self, sized: Callable[[nn.Module], nn.Module], dtype: torch.dtype) -> None:
        """Give lazy layers their sizes by ``sized`` and, once for all, their values."""
        if is_lazy(self._module):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(_SKELETON.seed())
                self._module = sized(self._module.to(dtype))

    def tell_rounding(self, dtype: torch.dtype) -> None:
        """Warn if its values are rounded to ``dtype``."""
        tell_rounding(self._module, dtype)


class PureModule:
    """A model built by ``factory``, in training and in evaluation mode. It never changes: every call brings its leaves.

    ``patterns`` select the trained parameters (:func:`fedalloy.tasks.trainable.select`); ``frozen`` are the leaves that
    it keeps. ``example`` are a few rows of the data: lazy layers get their sizes from them, and the model is called
    with them once, to see what it draws and whether batches may be padded.
    """

    def __init__(
        self, factory: Factory | nn.Module, patterns: Patterns, dtype: torch.dtype, example: Inputs | None = None
    ) -> None:
        self.factory: Factory = BuiltModule(factory) if isinstance(factory, nn.Module) else factory
        self.patterns, self.dtype, self.casts, self._last = patterns, dtype, False, _nothing
        if isinstance(self.factory, BuiltModule):
            self.factory.tell_rounding(dtype)
        self.example = None if example is None else to(some_rows(example), "cpu")  # where models are built
        if isinstance(self.factory, BuiltModule):
            self.factory.complete(self._sized, dtype)
        module = self.build(_SKELETON)
        self.selection: Selection = select(module, patterns)
        renamed.refuse_old_attributes(module, renamed.MODEL)
        refuse_renorm(module)
        self.frozen = leaves_in(module, self.selection.constants)
        self.ties = _ties(module)
        self.training, self.evaluation = self._skeletons(module)
        self.dropouts = [name for name, part in self.training.named_modules() if _drops(part)]
        self.silent = is_silent(self.training)
        buffers = [] if self.silent else [name for name, _ in module.named_buffers()]
        self.watched = [name for name in buffers if name in self.frozen]
        self._elsewhere: dict[torch.device, Tree] = {}
        self.casts = self.example is not None and self._needs_floats(self.example)
        self.found = self._probed(module)

    def __getstate__(self) -> dict[str, Any]:
        """Copies on other devices are made again where they are needed."""
        return {**self.__dict__, "_elsewhere": {}, "_last": _nothing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In another process, transformers does not know our attention yet."""
        self.__dict__.update(state)
        if huggingface.pretrained_models(self.training):
            huggingface.register()

    def build(self, key: Key) -> nn.Module:
        """The factory's model, with initial values from a key; the global generator is not changed."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key.seed())
            return self._sized(self._new().to(self.dtype))

    def _sized(self, module: nn.Module) -> nn.Module:
        return materialised(module, self.example, self.input, self.dtype)

    @property
    def told(self) -> dict[str, Any] | None:
        """How to build the model again, as plain values; None for a model that only its own program has, or whose
        frozen values nobody else has."""
        if not isinstance(self.factory, NamedModel) or self.patterns is not None:
            return None
        told = self.factory.told()
        return None if told is None else {**told, "dtype": str(self.dtype)}

    def _new(self) -> nn.Module:
        made = checked(self.factory())
        if made is self._last():
            raise SpecError(
                "the function that builds the model returns the same module every time, so that all starts share their "
                "values: let it build a new one, or give the module itself"
            )
        self._last = weakref.ref(made)
        return made

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """Fresh parameters and buffers: the model as ``factory`` initialises it under this key."""
        module = self.build(key)
        return leaves_in(module, self.selection.params), leaves_in(module, self.selection.buffers)

    def filled(self, leaves: Tree) -> nn.Module:
        """The model as its factory makes it, in evaluation mode, with these values of its exchanged leaves."""
        module = self.build(_SKELETON).eval()
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        with torch.no_grad():
            for name, leaf in {**self.frozen, **leaves}.items():
                named[name].copy_(leaf)
        return module

    def to(self, device: torch.device | str) -> Self:
        """The same model with its frozen leaves on a device."""
        moved = copy.copy(self)
        moved.frozen, moved._elsewhere = self.frozen_on(torch.device(device)), {}
        return moved

    def hollowed(self) -> Self:
        """The same model without the values with which it was built: it has those of its frozen leaves, and every call
        brings the others. It cannot be probed again."""
        chosen = self.selection
        for module in (self.training, self.evaluation):
            hollow(module, (*chosen.params, *chosen.buffers, *chosen.constants))
        return self

    def frozen_on(self, device: torch.device) -> Tree:
        """The frozen leaves on a device. Copies are kept: a base can be far larger than what is trained, and a CUDA
        graph cannot copy it in every step."""
        if not self.frozen or next(iter(self.frozen.values())).device == device:
            return self.frozen
        if device not in self._elsewhere:
            self._elsewhere[device] = {name: leaf.to(device) for name, leaf in self.frozen.items()}
        return self._elsewhere[device]

    @cached_property
    def couples(self) -> bool:
        """Whether rows of a training batch affect each other, or the draws of the rows before them: BatchNorm, or draws
        whose first axis is not the batch."""
        return self.found.couples or self.has_batchnorm or any(map(tracks_rows, self.training.modules()))

    @cached_property
    def has_batchnorm(self) -> bool:
        """Whether a BatchNorm uses the statistics of a batch in training."""
        norms = (part for part in self.training.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm))
        return any(norm.training for norm in norms)

    @property
    def single_start(self) -> bool:
        """Whether every key gives the same initial values."""
        return isinstance(self.factory, BuiltModule)

    @property
    def draws(self) -> bool:
        """Whether the model draws random numbers in training."""
        return bool(self.dropouts) or self.found.draws

    def input(self, x: Tensor) -> Tensor:
        """An input in the model's precision; whole numbers stay what they are, if the model accepts them."""
        return x.to(self.dtype) if x.is_floating_point() or self.casts else x

    def __call__(
        self,
        training: bool,
        leaves: Tree,
        buffers: Tree,
        x: Inputs,
        draw: Tensor | None = None,
        padded: bool = False,
        **more: Any,
    ) -> tuple[Any, Tree]:
        """What the model returns for inputs ``x``, and the buffers after the call. ``draw`` is the key of its random
        numbers; ``more`` are further keyword arguments."""
        # A plain model on one tensor is called so often that the general way is noticeable.
        args: tuple[Any, ...] = (x,)
        named: dict[str, Any] = {}
        if not isinstance(x, Tensor):
            args, named = arguments(x, self.input)
        elif self.casts or x.is_floating_point():
            args = (x.to(self.dtype),)
        given = {**leaves, **buffers}
        if self.frozen or self.dropouts:
            given = {**self._others(x, draw if training else None), **given}
        for alias, name in self.ties:
            given[alias] = given[name]
        placed = [(given[name], given[name]._version) for name in self.watched]
        module = self.training if training else self.evaluation
        with _QUIET if self.silent else self._drawing(training, draw, padded):
            made = functional_call(module, given, args, {**named, **more}, tie_weights=False)
        if training and self.watched:
            self._check_unwritten(placed, given)
        return made, {name: given[name] for name in buffers}

    @contextmanager
    def _drawing(self, training: bool, draw: Tensor | None, padded: bool) -> Iterator[None]:
        """Answers to random calls: from the draw in training, always the same in evaluation."""
        key = _EVALUATION if not training else None if draw is None else Key.at(draw)
        refusal = _UNPROBED if padded and self.example is None else ""
        with PlainCheckpoints(), KeyedDraws(key, refusal):
            if self.found.unkeyed and key is not None:
                with seeded_by(key.fold("generator")):
                    yield
            else:
                yield

    def _others(self, x: Inputs, draw: Tensor | None) -> Tree:
        """The leaves of a call besides the exchanged ones: the frozen ones on the device of the data and, with a draw,
        one key per dropout: the draw folded with the module's ordinal."""
        frozen = self.frozen_on(device_of(x))
        if draw is None or not self.dropouts:
            return frozen
        return frozen | {
            f"{name}.draw".removeprefix("."): torch.as_tensor(Key(draw).fold("dropout", ordinal).state)
            for ordinal, name in enumerate(self.dropouts)
        }

    def _check_unwritten(self, placed: list[tuple[Tensor, int]], given: Tree) -> None:
        """Refuse a model that changes a buffer in training which is not exchanged: the change would be lost, or reach
        other clients. ``placed`` are the buffers before the call, with how often they had been written."""
        for name, (before, version) in zip(self.watched, placed, strict=True):
            if given[name] is not before or before._version != version:
                owner = name.rpartition(".")[0] or "the model"
                raise SpecError(
                    f"training changes the buffer '{name}', which is not exchanged, because '{owner}' is no norm "
                    "layer: list it in an attribute 'exchanged_buffers' of its class if clients should send it"
                )

    def _skeletons(self, module: nn.Module) -> tuple[nn.Module, nn.Module]:
        """The module in training and in evaluation mode. Models of transformers get an attention that all engines can
        run, if it gives the model's own outputs."""
        kept = skeleton(module).train(), skeleton(module).eval()
        for name in self.selection.frozen_modules:
            kept[0].get_submodule(name).training = False
        changed = skeleton(kept[0]), skeleton(kept[1])
        if not (huggingface.with_own_attention(changed[0]) and huggingface.with_own_attention(changed[1])):
            return kept
        if self.example is None or self._agree(kept[1], changed[1]):
            return changed
        warnings.warn(
            "the model's own attention and the formula that all engines share give different outputs, so the model "
            "keeps its own; its clients may have to run one by one",
            RuntimeWarning,
            stacklevel=4,
        )
        return kept

    @torch.no_grad()
    def _agree(self, one: nn.Module, other: nn.Module) -> bool:
        """Whether two modules give the same outputs for the example."""
        args, named = arguments(self.example, self.input)
        try:
            return close(scores_in(other(*args, **named)), scores_in(one(*args, **named)))
        except FedalloyError:
            raise
        except Exception:  # a model that fails is left to fail where its error can name the data
            return True

    def _needs_floats(self, example: Inputs) -> bool:
        """Whether the model fails on the whole numbers of the example, and accepts them as floating-point numbers."""
        if all(leaf.is_floating_point() for leaf in leaves_of(example)):
            return False
        return not self._accepts(example, self.input) and self._accepts(example, lambda leaf: leaf.to(self.dtype))

    @torch.no_grad()
    def _accepts(self, example: Inputs, prepare: Callable[[Tensor], Tensor]) -> bool:
        args, named = arguments(example, prepare)
        try:
            with KeyedDraws(_EVALUATION):
                self.evaluation(*args, **named)
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        return True

    def _probed(self, module: nn.Module) -> ProbeResult:
        """What the model does in training, from a call with the example."""
        if self.silent or self.example is None:
            active = [part for part in self.training.modules() if may_draw(part) and part.training]
            return ProbeResult(draws=bool(active), couples=bool(active))
        params, buffers = leaves_in(module, self.selection.params), leaves_in(module, self.selection.buffers)
        draw = torch.as_tensor(_PROBE.generator().initial_seed())

        writes = Writes(self.training)

        def call(x: Inputs, mode: KeyedDraws) -> Tensor:
            args, named = arguments(x, self.input)
            given = {**self._others(x, draw), **params, **own_buffers(buffers, x, params)}
            placed = [(given[name], given[name]._version) for name in self.watched]
            with mode, writes.seen(given, params, buffers):
                made = functional_call(self.training, given, args, named, tie_weights=False)
            self._check_unwritten(placed, given)
            return scores_in(made)

        with PlainCheckpoints() as checkpoints:
            found = probe(call, self.example)
        if checkpoints.used:
            tell()
        writes.tell(found.remembers)
        return replace(found, couples=True) if writes.buffers else found


_QUIET = nullcontext()


def _nothing() -> nn.Module | None:
    """No module was built yet, or it is gone."""
    return None


def _ties(module: nn.Module) -> list[tuple[str, str]]:
    """Further names of leaves that several layers share, each with the leaf's name."""
    first: dict[int, str] = {}
    aliases: list[tuple[str, str]] = []
    for prefix, part in module.named_modules():
        for name, leaf in [*part._parameters.items(), *part._buffers.items()]:
            full = f"{prefix}.{name}" if prefix else name
            if leaf is not None and first.setdefault(id(leaf), full) != full:
                aliases.append((full, first[id(leaf)]))
    return aliases


def _drops(module: nn.Module) -> bool:
    return isinstance(module, Dropout) and module.training
