"""The Dice loss of segmentations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.registry import register
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.losses.classes import IGNORED, CrossEntropy
from fedalloy.tasks.losses.layout import classes_last, mean_of_counted
from fedalloy.tasks.losses.loss import Loss


@register("loss", "dice")
@dataclass(frozen=True)
class DiceLoss(Loss):
    """``1 - (2 sum p t + smooth) / (sum p + sum t + smooth)`` of every image, averaged over classes.

    p are the softmax over classes, or with one output per pixel its sigmoid; sums are over the pixels that count
    (Milletari et al. 2016, arXiv:1606.04797, without their squares). An image in which no pixel counts is left out.
    """

    kinds: ClassVar[tuple[TaskKind, ...]] = ("segmentation",)
    bounds: ClassVar[tuple[float, float] | None] = (0.0, 1.0)

    smooth: float = 1.0
    ignore_index: int = IGNORED

    def __post_init__(self) -> None:
        if self.smooth <= 0:
            raise SpecError(f"loss 'dice': smooth must be above 0, got {self.smooth}")

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One value per image."""
        counted = (y != self.ignore_index).unsqueeze(-1)
        if outputs.numel() == y.numel():
            chance, truth = outputs.reshape(y.shape).sigmoid().unsqueeze(-1), y.unsqueeze(-1).to(outputs.dtype)
        else:
            chance = classes_last(outputs, y).softmax(-1)
            known = y.where(counted.squeeze(-1), torch.zeros_like(y))
            truth = (known.unsqueeze(-1) == torch.arange(chance.shape[-1], device=y.device)).to(chance.dtype)
        chance, truth = ((part * counted).flatten(1, -2) for part in (chance, truth))
        both, all_of = (chance * truth).sum(1), chance.sum(1) + truth.sum(1)
        each = 1 - (2 * both + self.smooth) / (all_of + self.smooth)
        return each.mean(1) * counted.flatten(1).any(1)

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The share of the pixels that count whose class is right."""
        if outputs.numel() == y.numel():
            right = (outputs.reshape(y.shape) > 0) == (y > 0.5)
            return mean_of_counted(right.to(outputs.dtype), y != self.ignore_index)
        return CrossEntropy(ignore_index=self.ignore_index).hits(outputs, y)

    @property
    def ignored(self) -> int | None:
        return self.ignore_index

    def counts(self, y: Tensor) -> Tensor | None:
        """1 for images in which a pixel counts, else 0."""
        return None if y.is_floating_point() else (y != self.ignore_index).flatten(1).any(1).long()

    def classes(self, outputs: Tensor, y: Tensor) -> int | None:
        """Two, or the number of outputs per pixel."""
        return 2 if outputs.numel() == y.numel() else CrossEntropy().classes(outputs, y)
