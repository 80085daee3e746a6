"""Metrics that are the mean over a client's examples: accuracy, top-k, loss."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import Objective
from fedalloy.core.registry import register
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.losses.classes import CrossEntropy, Focal
from fedalloy.tasks.losses.layout import mean_of_counted
from fedalloy.tasks.metrics.metric import Metric, counted_means, sums, with_counts
from fedalloy.tasks.metrics.predictions import aligned


@register("metric", "accuracy", higher_is_better=True)
@dataclass(frozen=True)
class Accuracy(Metric):
    """Share of examples classified correctly; with several targets per example (labels, tokens, pixels) share of the
    targets that count."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("classification", "multilabel", "segmentation", "tokens")
    share: ClassVar[bool] = True
    pooled = "mean"

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """The share of every example's targets that is right, and how many count."""
        return with_counts(objective, objective.hits(outputs, y), y)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """The mean over all targets that count."""
        return counted_means(evidence, owner, clients)


@register("metric", "loss", higher_is_better=False)
@dataclass(frozen=True)
class MeanLoss(Metric):
    """Mean loss over the examples, or over all their targets that count; infinite if it overflowed, so that
    such a client counts as the worst served."""

    pooled = "mean"

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of every example, and how many of its targets count."""
        return with_counts(objective, objective.losses(outputs, y), y)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """The mean; NaN for clients without examples, infinity for any other mean that is not finite."""
        found, each = counted_means(evidence, owner, clients), evidence.reshape(len(evidence), -1)
        count = sums(torch.ones_like(evidence) if each.shape[1] == 1 else each[:, 1], owner, clients)
        return found.masked_fill(~found.isfinite() & (count > 0), torch.inf)


@register("metric", "perplexity", higher_is_better=False)
@dataclass(frozen=True)
class Perplexity(Metric):
    """The exponential of the mean negative log-likelihood over the targets that count: that of the loss, without label
    smoothing and without the factor of the focal loss."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("tokens", "classification")
    pooled = "log_mean"

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """The loss of every example, and how many of its targets count."""
        rule = objective.loss_rule
        plain: Objective | CrossEntropy | Focal = objective
        if isinstance(rule, CrossEntropy):
            plain = replace(rule, label_smoothing=0.0)
        elif isinstance(rule, Focal):
            plain = replace(rule, gamma=0.0, alpha=None)
        return with_counts(objective, plain.losses(outputs, y), y)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """``exp`` of the mean loss."""
        return MeanLoss().score(evidence, owner, clients).exp()


@register("metric", "top_k", higher_is_better=True)
@dataclass(frozen=True)
class TopKAccuracy(Metric):
    """Share of examples (or of tokens that count) whose class is among the ``k`` largest logits; of equal logits the
    lower class counts first."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("classification", "tokens")
    share: ClassVar[bool] = True
    pooled = "mean"

    k: int = 5

    def __post_init__(self) -> None:
        if self.k < 1:
            raise SpecError(f"metric 'top_k': k is {self.k}; allowed: 1 or more")

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """One hit per example; of several targets the share, and how many count."""
        if y.dim() == 1:
            return topk_hits(outputs, y, self.k)
        logits, y_now, counted = aligned(objective, outputs, y)
        known = y_now.where(counted, torch.zeros_like(y_now)).flatten()
        hits = topk_hits(logits.flatten(0, -2), known, self.k).reshape(y_now.shape)
        return with_counts(objective, mean_of_counted(hits, counted), y)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """The mean over all targets that count."""
        return counted_means(evidence, owner, clients)


@register("metric", "top3", higher_is_better=True)
def top3() -> TopKAccuracy:
    """Top-3 accuracy."""
    return TopKAccuracy(3)


@register("metric", "top5", higher_is_better=True)
def top5() -> TopKAccuracy:
    """Top-5 accuracy."""
    return TopKAccuracy(5)


def topk_hits(outputs: Tensor, y: Tensor, k: int) -> Tensor:
    """Whether the class is among the k largest logits of ``[N, classes]``, as 0 or 1.

    >>> topk_hits(torch.tensor([[3.0, 1.0, 2.0]] * 2), torch.tensor([2, 1]), 2)
    tensor([1., 0.])
    """
    if outputs.dim() != 2 or outputs.shape[1] < 2:
        raise SpecError(f"metric 'top_k' needs logits [N, classes], the model gives {tuple(outputs.shape)}")
    mine = outputs.gather(1, y.unsqueeze(1))
    earlier = torch.arange(outputs.shape[1], device=y.device) < y.unsqueeze(1)
    rank = (outputs > mine).sum(1) + ((outputs == mine) & earlier).sum(1)
    return ((rank < k) & mine.squeeze(1).isfinite()).to(outputs.dtype)
