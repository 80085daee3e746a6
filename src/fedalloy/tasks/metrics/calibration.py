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
from fedalloy.tasks.metrics.predictions import aligned


class CalibrationMetric(Metric):
    """A metric of confidence and hits, for one class per example."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("classification",)
    share: ClassVar[bool] = True


@register("metric", "ece", higher_is_better=False)
@dataclass(frozen=True)
class ExpectedCalibrationError(CalibrationMetric):
    """Mean gap between confidence and accuracy over bins ``(lo, hi]``, weighted by their examples, or tokens."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("classification", "tokens")

    bins: int = 15

    def __post_init__(self) -> None:
        _check(self.bins)

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """Confidence and hit of every example, or of all its tokens by bin."""
        return sureness(objective, outputs, y, self.bins)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """``sum_b n_b / n |accuracy_b - confidence_b|``, over the client's whole set and not per batch."""
        gaps, count = bin_gaps(evidence, owner, clients, self.bins)
        return gaps.sum(1) / count.sum(1)


@register("metric", "mce", higher_is_better=False)
@dataclass(frozen=True)
class MaximumCalibrationError(CalibrationMetric):
    """Largest gap between confidence and accuracy over the bins ``(lo, hi]`` that hold examples, or tokens."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("classification", "tokens")

    bins: int = 15

    def __post_init__(self) -> None:
        _check(self.bins)

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """Confidence and hit of every example, or of all its tokens by bin."""
        return sureness(objective, outputs, y, self.bins)

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


def sureness(objective: Objective, outputs: Tensor, y: Tensor, bins: int) -> Tensor:
    """Confidence and hit of every example, ``[N, 2]``. With several targets ``[N, 2 bins + 1]``: for every bin the sum
    of ``hit - confidence`` over the targets that count, and their number; the last column only tells the two forms
    apart."""
    if y.dim() == 1:
        return torch.stack([confidence(outputs).double(), objective.hits(outputs, y).double()], 1)
    logits, y, counted = aligned(objective, outputs, y)
    sure, guess = logits.double().softmax(-1).max(-1)
    place = torch.bucketize(sure, _edges(bins).to(sure.device)) + bins * torch.arange(
        len(y), device=y.device
    ).unsqueeze(1)
    kept, gap = place[counted], ((guess == y).double() - sure)[counted]
    columns = [sums(values, kept, len(y) * bins).reshape(len(y), bins) for values in (gap, torch.ones_like(gap))]
    return torch.cat([*columns, gap.new_zeros(len(y), 1)], 1)


def _edges(bins: int) -> Tensor:
    return torch.arange(1, bins, dtype=torch.float64) / bins


def bin_gaps(evidence: Tensor, owner: Tensor, clients: int, bins: int) -> tuple[Tensor, Tensor]:
    """``|sum of (hit - confidence)|`` and the number of examples, per client and bin, ``[clients, bins]``."""
    if evidence.shape[1] == 2 * bins + 1:
        each = sums(evidence, owner, clients)
        return each[:, :bins].abs(), each[:, bins : 2 * bins]
    place = owner * bins + torch.bucketize(evidence[:, 0].contiguous(), _edges(bins))
    gap = sums(evidence[:, 1] - evidence[:, 0], place, clients * bins)
    count = sums(torch.ones_like(evidence[:, 0]), place, clients * bins)
    return gap.abs().reshape(clients, bins), count.reshape(clients, bins)


def _check(bins: int, batch: int = 1) -> None:
    if bins < 1 or batch < 1:
        raise SpecError(f"a calibration error of {bins} bins, batches of {batch}: allowed are 1 or more (15 is usual)")
