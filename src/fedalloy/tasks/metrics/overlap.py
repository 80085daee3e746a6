"""Metrics from the classes that were predicted and the true ones: F1, precision, recall, Dice, IoU.

Counts are taken over all of a client's examples (or pixels) first. ``macro`` is the mean over classes, without those
that were neither predicted nor true; of several labels all count. A quotient 0 / 0 of a class that counts is 0, and a
client for which no class counts has no score. All clients are computed at once, without a call of a library for each;
the tests compare the values with those of torchmetrics and scikit-learn.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedalloy.core.protocols import Objective
from fedalloy.core.registry import register
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.metrics.metric import Metric, sums
from fedalloy.tasks.metrics.predictions import class_counts

Average = Literal["macro", "micro"]


@dataclass(frozen=True)
class ClassMetric(Metric):
    """A quotient of the numbers of found, predicted and true targets of every class."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("classification", "multilabel", "segmentation", "tokens")
    share: ClassVar[bool] = True

    average: Average = "macro"

    @abstractmethod
    def quotient(self, found: Tensor, said: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of a class."""

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """Predicted and true classes."""
        return class_counts(objective, outputs, y)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """One value per client."""
        found, said, true, possible = counted_by_class(evidence, owner, clients)
        if self.average == "micro":
            some = possible.sum(1) > 0
            above, below = self.quotient(found.sum(1), said.sum(1), true.sum(1))
            return torch.where(some, above / below.clamp(min=1), torch.nan)
        above, below = self.quotient(found, said, true)
        each, counts = above / below.clamp(min=1), (possible > 0).double()
        return (each * counts).sum(1) / counts.sum(1)


def counted_by_class(evidence: Tensor, owner: Tensor, clients: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How many targets of every class were found, predicted, true and possible, ``[clients, C]`` each."""
    if evidence.shape[1] > 2:
        found, said, true, possible = sums(evidence, owner, clients).chunk(4, 1)
        return found, said, true, possible
    guess, label = evidence.long().unbind(1)
    classes = int(evidence.max()) + 1
    said, true = (_table(owner, part, clients, classes) for part in (guess, label))
    right = guess == label
    found = _table(owner[right], guess[right], clients, classes)
    return found, said, true, said + true


def _table(owner: Tensor, label: Tensor, clients: int, classes: int) -> Tensor:
    return torch.bincount(owner * classes + label, minlength=clients * classes).reshape(clients, classes).double()


@register("metric", "f1_macro", higher_is_better=True)
@dataclass(frozen=True)
class F1Score(ClassMetric):
    """``2 found / (predicted + true)``, the mean over classes."""

    def quotient(self, found: Tensor, said: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        """The harmonic mean of precision and recall."""
        return 2 * found, said + true


@register("metric", "f1_micro", higher_is_better=True)
def f1_micro() -> F1Score:
    """``2 found / (predicted + true)`` of all classes together."""
    return F1Score("micro")


@register("metric", "precision", higher_is_better=True)
@dataclass(frozen=True)
class PrecisionScore(ClassMetric):
    """Share of the predictions of a class that are right, the mean over classes."""

    def quotient(self, found: Tensor, said: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        """``found / predicted``."""
        return found, said


@register("metric", "recall", higher_is_better=True)
@dataclass(frozen=True)
class RecallScore(ClassMetric):
    """Share of the targets of a class that are found, the mean over classes."""

    def quotient(self, found: Tensor, said: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        """``found / true``."""
        return found, true


@register("metric", "dice", higher_is_better=True)
@dataclass(frozen=True)
class DiceScore(F1Score):
    """``2 found / (predicted + true)`` over all pixels of a client, the mean over classes."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("segmentation",)


@register("metric", "iou", higher_is_better=True)
@dataclass(frozen=True)
class IntersectionOverUnion(ClassMetric):
    """``found / (predicted or true)`` over all pixels of a client, the mean over classes (Jaccard index)."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("segmentation",)

    def quotient(self, found: Tensor, said: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
        """Intersection and union."""
        return found, said + true - found
