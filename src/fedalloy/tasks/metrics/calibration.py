"""Calibration errors: how far confidence is from accuracy, over equal bins of confidence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import Objective
from fedalloy.core.registry import register
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.metrics.metric import Metric, means, sums


class CalibrationMetric(Metric):
    """A metric of confidence and hits, for one class per example."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("classification",)


@register("metric", "ece", higher_is_better=False)
@dataclass(frozen=True)
class ExpectedCalibrationError(CalibrationMetric):
    """Mean gap between confidence and accuracy over bins ``(lo, hi]``, weighted by their examples."""

    bins: int = 15

    def __post_init__(self) -> None:
        _check(self.bins)

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """Confidence and hit of every example."""
        return torch.stack([confidence(outputs).double(), objective.hits(outputs, y).double()], 1)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """``sum_b n_b / n |accuracy_b - confidence_b|``, over the client's whole set and not per batch."""
        gaps, _ = bin_gaps(evidence, owner, clients, self.bins)
        return gaps.sum(1) / sums(torch.ones_like(evidence[:, 0]), owner, clients)


@register("metric", "mce", higher_is_better=False)
@dataclass(frozen=True)
class MaximumCalibrationError(CalibrationMetric):
    """Largest gap between confidence and accuracy over the bins ``(lo, hi]`` that hold examples."""

    bins: int = 15

    def __post_init__(self) -> None:
        _check(self.bins)

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """Confidence and hit of every example."""
        return torch.stack([confidence(outputs).double(), objective.hits(outputs, y).double()], 1)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """``max_b |accuracy_b - confidence_b|``; NaN for a client without examples."""
        gaps, count = bin_gaps(evidence, owner, clients, self.bins)
        largest = (gaps / count.clamp(min=1)).max(1).values
        return torch.where(count.sum(1) > 0, largest, torch.nan)


@register("metric", "ece_batch", higher_is_better=False)
@dataclass(frozen=True)
class BatchedExpectedCalibrationError(CalibrationMetric):
    """``ece`` of batches of ten examples, averaged over the batches: much larger than that of the whole set.

    Only for comparison with published numbers computed in this way; ``ece`` is the error of a client.
    """

    bins: int = 15
    batch: int = 10

    def __post_init__(self) -> None:
        _check(self.bins, self.batch)

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """Confidence and hit of every example."""
        return ExpectedCalibrationError(self.bins).evidence(objective, outputs, y)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """The mean over the client's batches, the last one possibly shorter."""
        return over_batches(ExpectedCalibrationError(self.bins), self.batch, evidence, owner, clients)


@register("metric", "mce_batch", higher_is_better=False)
@dataclass(frozen=True)
class BatchedMaximumCalibrationError(CalibrationMetric):
    """``mce`` of batches of ten examples, averaged over the batches; only for comparison, like ``ece_batch``."""

    bins: int = 15
    batch: int = 10

    def __post_init__(self) -> None:
        _check(self.bins, self.batch)

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """Confidence and hit of every example."""
        return MaximumCalibrationError(self.bins).evidence(objective, outputs, y)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """The mean over the client's batches, the last one possibly shorter."""
        return over_batches(MaximumCalibrationError(self.bins), self.batch, evidence, owner, clients)


def over_batches(metric: Metric, batch: int, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
    """A metric of every ``batch`` examples of a client in turn, averaged over the client's batches."""
    if len(owner) == 0:
        return torch.full((clients,), torch.nan, dtype=torch.float64)
    count = sums(torch.ones_like(owner), owner, clients)
    batches = (count + batch - 1) // batch
    place = torch.arange(len(owner)) - (count.cumsum(0) - count)[owner]
    number = (batches.cumsum(0) - batches)[owner] + place // batch
    scores = metric.score(evidence, number, int(batches.sum()))
    return means(scores, torch.repeat_interleave(batches), clients)


def confidence(outputs: Tensor) -> Tensor:
    """The probability a model gives to the class it picks, from logits ``[N, classes]`` or one logit."""
    if outputs.dim() > 2:
        raise SpecError(f"calibration is for one class per example, the model gives {tuple(outputs.shape[1:])}")
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        return outputs.reshape(outputs.shape[0]).abs().sigmoid()
    return outputs.double().softmax(1).max(1).values


def bin_gaps(evidence: Tensor, owner: Tensor, clients: int, bins: int) -> tuple[Tensor, Tensor]:
    """``|sum of (hit - confidence)|`` and the number of examples, per client and bin, ``[clients, bins]``."""
    edges = torch.arange(1, bins, dtype=torch.float64) / bins
    place = owner * bins + torch.bucketize(evidence[:, 0].contiguous(), edges)
    gap = sums(evidence[:, 1] - evidence[:, 0], place, clients * bins)
    count = sums(torch.ones_like(evidence[:, 0]), place, clients * bins)
    return gap.abs().reshape(clients, bins), count.reshape(clients, bins)


def _check(bins: int, batch: int = 1) -> None:
    if bins < 1 or batch < 1:
        raise SpecError(f"a calibration error of {bins} bins, batches of {batch}: allowed are 1 or more (15 is usual)")
