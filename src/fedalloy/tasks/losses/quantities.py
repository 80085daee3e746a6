"""Losses of quantities: squared, absolute and Huber error, averaged over the outputs of an example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from fedalloy.core.errors import SpecError
from fedalloy.core.registry import register
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.losses.layout import like_targets, per_example
from fedalloy.tasks.losses.loss import Loss


@register("loss", "mse")
@dataclass(frozen=True)
class SquaredError(Loss):
    """Squared error."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("regression",)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean over the outputs of an example."""
        error = like_targets(outputs, y, "mse") - y.to(outputs.dtype)
        return per_example(error * error)


@register("loss", "l1")
@dataclass(frozen=True)
class AbsoluteError(Loss):
    """Absolute error."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("regression",)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean over the outputs of an example."""
        return per_example((like_targets(outputs, y, "l1") - y.to(outputs.dtype)).abs())


@register("loss", "huber")
@dataclass(frozen=True)
class Huber(Loss):
    """Half the squared error up to ``delta``, then linear: ``delta (|error| - delta / 2)``."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("regression",)

    delta: float = 1.0

    def __post_init__(self) -> None:
        if self.delta <= 0:
            raise SpecError(f"loss 'huber': delta must be above 0, got {self.delta}")

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean over the outputs of an example."""
        guess = like_targets(outputs, y, "huber")
        return per_example(functional.huber_loss(guess, y.to(guess.dtype), reduction="none", delta=self.delta))
