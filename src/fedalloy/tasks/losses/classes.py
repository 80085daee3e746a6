"""Losses of classes: cross-entropy, binary cross-entropy, focal loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedalloy.core.errors import SpecError
from fedalloy.core.registry import register
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.losses.layout import classes_last, like_targets, mean_of_counted, per_example
from fedalloy.tasks.losses.loss import Loss

IGNORED = -100
"""The target that does not count, as in torch and transformers."""


@register("loss", "cross_entropy")
@dataclass(frozen=True)
class CrossEntropy(Loss):
    """Negative log-likelihood of the class under the softmax of the logits, for one class per example, token or pixel.

    Targets equal to ``ignore_index`` do not count. ``label_smoothing`` moves this share of the weight evenly to all
    classes. With ``shift`` = 1 the output at one token is compared with the next token's target, for models whose
    targets are their inputs (``next_token``).
    """

    kinds: ClassVar[tuple[TaskKind, ...]] = ("classification", "tokens", "segmentation")

    label_smoothing: float = 0.0
    ignore_index: int = IGNORED
    shift: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1 or self.shift < 0:
            raise SpecError(
                f"loss 'cross_entropy': label_smoothing = {self.label_smoothing} must lie in [0, 1) and shift = "
                f"{self.shift} be 0 or more"
            )

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean over the targets of an example that count."""
        if y.dim() == 1:  # as ``each``, without the call: this is every step of most runs
            return functional.cross_entropy(
                outputs, y, reduction="none", label_smoothing=self.label_smoothing, ignore_index=self.ignore_index
            )
        logits, y = self._aligned(outputs, y)
        each = self.each(logits.flatten(0, -2), y.flatten()).reshape(y.shape)
        return mean_of_counted(each, y != self.ignore_index)

    def each(self, logits: Tensor, y: Tensor) -> Tensor:
        """The loss of every target, ``[M]`` from ``[M, classes]``; 0 for one that does not count."""
        return functional.cross_entropy(
            logits, y, reduction="none", label_smoothing=self.label_smoothing, ignore_index=self.ignore_index
        )

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Whether the largest logit is that of the class; with several targets the share of those that count."""
        if y.dim() == 1:
            return (outputs.argmax(-1) == y).to(outputs.dtype)
        logits, y = self._aligned(outputs, y)
        return mean_of_counted((logits.argmax(-1) == y).to(outputs.dtype), y != self.ignore_index)

    @property
    def ignored(self) -> int | None:
        return self.ignore_index

    def counts(self, y: Tensor) -> Tensor | None:
        """The number of targets that count; None with one target per example."""
        return None if y.dim() == 1 else (y[:, self.shift :] != self.ignore_index).flatten(1).sum(1)

    def classes(self, outputs: Tensor, y: Tensor) -> int | None:
        """The number of logits."""
        return int(outputs.shape[-1] if y.dim() == 1 else classes_last(outputs, y).shape[-1])

    def _aligned(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        logits = classes_last(outputs, y)
        return (logits[:, : -self.shift], y[:, self.shift :]) if self.shift else (logits, y)


@register("loss", "next_token")
def next_token(label_smoothing: float = 0.0, ignore_index: int = IGNORED) -> CrossEntropy:
    """Cross-entropy of every token's output against the next token, for data whose targets are their own inputs."""
    return CrossEntropy(label_smoothing, ignore_index, shift=1)


@register("loss", "binary")
@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy of a logit against 0 or 1: one per example, one per label, or one per pixel."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("classification", "multilabel", "segmentation")
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)
    one_logit: ClassVar[bool] = True

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean over an example's targets."""
        logits = logits_for(outputs, y, "binary")
        return per_example(functional.binary_cross_entropy_with_logits(logits, y.to(logits.dtype), reduction="none"))

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Whether the logit is positive exactly where the target is 1, as a share of an example's targets."""
        return sign_hits(logits_for(outputs, y, "binary"), y)

    def classes(self, outputs: Tensor, y: Tensor) -> int | None:
        """Two."""
        return 2


@register("loss", "focal")
@dataclass(frozen=True)
class Focal(Loss):
    """``(1 - p)^gamma`` times cross-entropy, where p is the probability of the true class (Lin et al. 2017,
    arXiv:1708.02002): examples that are already predicted well count less.

    With as many outputs as targets it is binary, and ``alpha`` is the weight of positive targets, ``1 - alpha`` that
    of negative ones; otherwise it is over classes, without ``alpha``. Targets equal to ``ignore_index`` do not count.
    """

    kinds: ClassVar[tuple[TaskKind, ...]] = ("classification", "multilabel", "segmentation", "tokens")
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    gamma: float = 2.0
    alpha: float | None = None
    ignore_index: int = IGNORED

    def __post_init__(self) -> None:
        if self.gamma < 0 or not 0 <= (self.alpha or 0) <= 1:
            raise SpecError(
                f"loss 'focal': gamma = {self.gamma} must be 0 or more and alpha = {self.alpha} lie in [0, 1] (or none)"
            )

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean over the targets of an example that count."""
        if outputs.numel() == y.numel():
            return self._binary(outputs.reshape(y.shape), y)
        if self.alpha is not None:
            raise SpecError("loss 'focal': alpha weighs positive against negative targets; leave it out for classes")
        plain = CrossEntropy(ignore_index=self.ignore_index)
        logits, counted = classes_last(outputs, y) if y.dim() > 1 else outputs, y != self.ignore_index
        each = plain.each(logits.reshape(-1, logits.shape[-1]), y.flatten()).reshape(y.shape)
        each = self._focused(1 - (-each).exp(), each)
        return each if y.dim() == 1 else mean_of_counted(each, counted)

    def _binary(self, logits: Tensor, given: Tensor) -> Tensor:
        counted = given != self.ignore_index
        y = given.where(counted, torch.zeros_like(given)).to(logits.dtype)
        each = functional.binary_cross_entropy_with_logits(logits, y, reduction="none")
        chance = logits.sigmoid()
        each = self._focused(chance * (1 - y) + (1 - chance) * y, each)
        if self.alpha is not None:
            each = (self.alpha * y + (1 - self.alpha) * (1 - y)) * each
        return each if y.dim() == 1 else mean_of_counted(each, counted)

    def _focused(self, missed: Tensor, each: Tensor) -> Tensor:
        """Every loss times ``missed ** gamma``; below 1, a power of 0 has no gradient."""
        return missed.clamp(min=torch.finfo(missed.dtype).tiny) ** self.gamma * each

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """As for the cross-entropy that it modifies."""
        if outputs.numel() == y.numel():
            right = (outputs.reshape(y.shape) > 0) == (y > 0.5)
            right = right.to(torch.promote_types(outputs.dtype, torch.float32))
            return right if y.dim() == 1 else mean_of_counted(right, y != self.ignore_index)
        return CrossEntropy(ignore_index=self.ignore_index).hits(outputs, y)

    @property
    def ignored(self) -> int | None:
        return self.ignore_index

    def counts(self, y: Tensor) -> Tensor | None:
        """The number of targets that count; None with one target per example, or with real-valued targets."""
        return None if y.is_floating_point() else CrossEntropy(ignore_index=self.ignore_index).counts(y)

    def classes(self, outputs: Tensor, y: Tensor) -> int | None:
        """Two, or the number of logits."""
        return 2 if outputs.numel() == y.numel() else CrossEntropy().classes(outputs, y)


def logits_for(outputs: Tensor, y: Tensor, loss: str) -> Tensor:
    """One logit per target, in the shape of the targets."""
    if y.dim() == 1 and outputs.dim() > 1 and outputs.shape[1:].numel() != 1:
        raise SpecError(
            f"loss '{loss}' needs one logit per example, the model gives {tuple(outputs.shape[1:])}: "
            "build it with classes=1, or use 'cross_entropy'"
        )
    return like_targets(outputs, y, loss)


def sign_hits(logits: Tensor, y: Tensor) -> Tensor:
    """The share of an example's targets whose logit is positive exactly where the target is above one half."""
    return per_example(((logits > 0) == (y > 0.5)).to(torch.promote_types(logits.dtype, torch.float32)))
