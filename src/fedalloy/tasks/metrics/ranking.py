"""Metrics of ranked scores: AUROC and average precision.

They need all scores of a set at one place: the global values are computed where the global test set is. Over Flower
there is none, and every client has its own.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core.protocols import Objective
from fedalloy.core.registry import register
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.metrics.metric import Metric, sums
from fedalloy.tasks.metrics.predictions import one_against_rest


@dataclass(frozen=True)
class RankingMetric(Metric):
    """A metric of scores and labels, averaged over classes (one against the rest) or labels that have a value."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ("classification", "multilabel")
    share: ClassVar[bool] = True

    @abstractmethod
    def of(self, scores: Tensor, labels: Tensor, owner: Tensor, clients: int) -> Tensor:
        """The value of one class for every client."""

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """Scores and labels."""
        return one_against_rest(outputs, y)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """All clients at once, class by class."""
        scores, labels = evidence.chunk(2, 1)
        pairs = zip(scores.unbind(1), labels.unbind(1), strict=True)
        return torch.stack([self.of(*pair, owner, clients) for pair in pairs], 1).nanmean(1)


@register("metric", "auroc", higher_is_better=True)
@dataclass(frozen=True)
class Auroc(RankingMetric):
    """Area under the ROC curve; with more than two classes the mean over classes, each against the rest. NaN for a
    client whose examples are all of one class."""

    def of(self, scores: Tensor, labels: Tensor, owner: Tensor, clients: int) -> Tensor:
        """By ranks."""
        return auroc(scores, labels, owner, clients)


@register("metric", "average_precision", higher_is_better=True)
@dataclass(frozen=True)
class AveragePrecision(RankingMetric):
    """``sum (recall_n - recall_(n-1)) precision_n`` over the distinct scores; with more than two classes the mean over
    classes, each against the rest. NaN for a client without a positive example."""

    def of(self, scores: Tensor, labels: Tensor, owner: Tensor, clients: int) -> Tensor:
        """By the sorted scores."""
        return average_precision(scores, labels, owner, clients)


def auroc(scores: Tensor, labels: Tensor, owner: Tensor, clients: int) -> Tensor:
    """P(positive scores above negative) + P(equal) / 2 for every client, ``[clients]``.

    With R the sum of the positives' ranks among the client's own scores (ties share their mean rank) this is
    ``(R - P (P + 1) / 2) / (P N)``.

    >>> auroc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.zeros(4).long(), 1)
    tensor([0.8750], dtype=torch.float64)
    """
    positive = labels.double()
    count = sums(torch.ones_like(positive), owner, clients)
    positives = sums(positive, owner, clients)
    ranks = _mean_ranks(scores, owner) - (count.cumsum(0) - count)[owner]
    above = sums(ranks * positive, owner, clients) - positives * (positives + 1) / 2
    return above / (positives * (count - positives))


def average_precision(scores: Tensor, labels: Tensor, owner: Tensor, clients: int) -> Tensor:
    """The area under the precision-recall curve without interpolation, for every client, ``[clients]``.

    >>> average_precision(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0.0, 0.0, 1.0, 1.0]),
    ...                   torch.zeros(4).long(), 1)
    tensor([0.8333], dtype=torch.float64)
    """
    order, last = _ranked(-scores, owner)
    positive, whose = labels.double()[order], owner[order]
    count, positives = (sums(part, owner, clients) for part in (torch.ones_like(labels.double()), labels.double()))
    found = positive.cumsum(0) - (positives.cumsum(0) - positives)[whose]
    place = torch.arange(1, len(order) + 1) - (count.cumsum(0) - count)[whose]
    # Equal scores enter together: every positive among them counts with the precision after the last of them.
    precision = (found / place)[last]
    total = sums(positive * precision, whose, clients) / positives
    bad = sums(scores.isnan().double(), owner, clients) > 0
    return total.masked_fill(bad, torch.nan)


def _ranked(scores: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """The order by client, then score; and for every place in it the last place with the same client and score."""
    by_score = scores.argsort(stable=True)
    order = by_score[owner[by_score].argsort(stable=True)]
    sorted_scores, sorted_owner = scores[order], owner[order]
    fresh = torch.ones(len(order), dtype=torch.bool)
    fresh[1:] = (sorted_scores[1:] != sorted_scores[:-1]) | (sorted_owner[1:] != sorted_owner[:-1])
    group = fresh.cumsum(0) - 1
    return order, (torch.bincount(group).cumsum(0) - 1)[group]


def _mean_ranks(scores: Tensor, owner: Tensor) -> Tensor:
    """The rank of every score when sorted by client, then score; equal scores of a client share a rank, and
    a score that is no number has none."""
    order, last = _ranked(scores, owner)
    size = torch.bincount(last)[last].double()
    rank = (last + 1) - (size - 1) / 2
    ranks = torch.empty(len(order), dtype=torch.float64).scatter(0, order, rank)
    return ranks.masked_fill(scores.isnan(), torch.nan)
