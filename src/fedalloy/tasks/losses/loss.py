"""The interface of losses, and a user's own function as a loss."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fedalloy.core import registry
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.spec import from_spec
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.losses.layout import mean_of_counted

PerExample = Callable[[Tensor, Tensor], Tensor]
"""``(outputs [N, ...], y [N, ...]) -> [N]``."""


class Loss(ABC):
    """The loss of every example: a frozen dataclass of its arguments, registered with ``@register("loss", name)``.

    An example may have many targets (the tokens of a sequence, the pixels of an image) of which some do not count. Its
    loss is then the mean over those that count, and examples enter the loss of a batch by their number of them.
    """

    kinds: ClassVar[tuple[TaskKind, ...]] = ()
    """The kinds of task that it is for; empty: any."""
    bounds: ClassVar[tuple[float, float] | None] = None
    """The lowest and highest target, if the loss has such limits."""
    one_logit: ClassVar[bool] = False
    """Whether a model for it has a single logit for two classes."""

    @abstractmethod
    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One value per example, ``[N]``; 0 for one in which nothing counts."""

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The share of an example's targets that is predicted correctly, ``[N]``: 0 or 1 with one target; NaN where
        this is not defined, as for a regression."""
        return torch.full((outputs.shape[0],), torch.nan, dtype=outputs.dtype, device=outputs.device)

    @property
    def ignored(self) -> int | None:
        """The target that does not count; None if all count."""
        return None

    def counts(self, y: Tensor) -> Tensor | None:
        """How many targets of every example count, ``[N]``; None: every example counts once."""
        return None

    def classes(self, outputs: Tensor, y: Tensor) -> int | None:
        """The number of classes that targets may have, from a few examples; None if targets are no classes."""
        return None


def choose(loss: str | Mapping[str, Any] | PerExample | Loss) -> Loss:
    """A loss by name or as a table of ``kind`` and arguments, any function of ``(outputs, y)`` that returns one value
    per example, or a loss of ``torch.nn``, which is used without its ``reduction``: class weights then scale examples
    without being normalised.

    >>> choose({"kind": "cross_entropy", "label_smoothing": 0.1})
    CrossEntropy(label_smoothing=0.1, ignore_index=-100, shift=0)
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type):
        raise SpecError(f"loss is the class {loss.__name__}: give an instance, {loss.__name__}(reduction='none')")
    if isinstance(loss, Mapping):
        made: Loss = from_spec("loss", loss)
        return made
    if callable(loss):
        return OwnLoss(_unreduced(loss))
    if not isinstance(loss, str) or not registry.knows("loss", loss):
        known = nearest(str(loss), registry.names("loss"))
        raise SpecError(
            f"unknown loss '{loss}': {known}, or a function of (outputs, y); in a recipe a loss of your own has the "
            "name under which a module that imports lists registers it"
        )
    named: Loss = registry.find("loss", loss)()
    return named


def name_of(loss: Loss) -> str | None:
    """The name of a loss with its default arguments; None for any other."""
    known = registry.everything("loss")
    return next((name for name, rule in known.items() if type(loss) is rule and loss == rule()), None)


@dataclass(frozen=True)
class OwnLoss(Loss):
    """A user's function, which must return a loss per example; several values per example are averaged. A loss of
    ``torch.nn`` with ``ignore_index`` averages those that count, as it does itself."""

    function: PerExample

    @property
    def ignored(self) -> int | None:
        return getattr(self.function, "ignore_index", None) if isinstance(self.function, nn.Module) else None

    def counts(self, y: Tensor) -> Tensor | None:
        """How many targets of every example count; None: every example counts once."""
        several = isinstance(y, Tensor) and y.dim() > 1 and not y.is_floating_point()
        return None if self.ignored is None or not several else (y != self.ignored).flatten(1).sum(1)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One value per example."""
        if isinstance(self.function, nn.Module) and y.is_floating_point() and outputs.numel() == y.numel():
            outputs = outputs.reshape(y.shape)  # [N, 1] against [N] would broadcast to [N, N]
        losses = self.function(outputs, y)
        most = max(outputs.numel(), *(leaf.numel() for leaf in _tensors(y)))  # more values mean broadcasting
        if not isinstance(losses, Tensor) or losses.dim() == 0 or len(losses) != len(outputs) or losses.numel() > most:
            got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise SpecError(
                f"loss {_name(self.function)} returned {got} for {len(outputs)} examples: it must return one value per "
                "example and leave the mean to fedalloy; functions and losses of torch do with reduction='none'"
            )
        if losses.dim() == 1:
            return losses
        if self.ignored is not None and self.counts(y) is not None and losses.shape == y.shape:
            return mean_of_counted(losses, y.ne(self.ignored))
        return losses.flatten(1).mean(1)

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """By argmax if outputs and labels look like classification, else NaN."""
        classes = isinstance(y, Tensor) and outputs.dim() == 2 and outputs.shape[1] > 1 and y.dim() == 1
        if not classes or y.is_floating_point():
            return super().hits(outputs, y)
        return (outputs.argmax(-1) == y).to(outputs.dtype)


def _tensors(y: Any) -> list[Tensor]:
    return [y] if isinstance(y, Tensor) else [leaf for value in y.values() for leaf in _tensors(value)]


def _unreduced(loss: PerExample) -> PerExample:
    """A loss of ``torch.nn`` without its reduction; other functions unchanged."""
    reduction = getattr(loss, "reduction", None)
    if not isinstance(loss, nn.Module) or reduction in (None, "none"):
        return loss
    if reduction != "mean":
        raise SpecError(
            f"loss {_name(loss)} has reduction='{reduction}', so that its size depends on the batch: give it with "
            "reduction='none' (the mean over the batch is taken here)"
        )
    alone: Any = copy.copy(loss)
    alone.reduction = "none"
    return cast(PerExample, alone)


def _name(loss: PerExample) -> str:
    return type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", repr(loss))
