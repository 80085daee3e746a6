"""AUROC: how often a positive example is ranked above a negative one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import Objective
from fedalloy.core.registry import register
from fedalloy.tasks.metrics.metric import Metric, sums


@register("metric", "auroc", higher_is_better=True)
@dataclass(frozen=True)
class Auroc(Metric):
    """Area under the ROC curve of a two-class model; NaN for a client whose examples are all of one class."""

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """Score and label of every example."""
        return torch.stack([positive_score(outputs).double(), (y > 0).double()], 1)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """All clients at once, by ranks."""
        return auroc(evidence[:, 0], evidence[:, 1], owner, clients)


def positive_score(outputs: Tensor) -> Tensor:
    """The evidence for class 1: the single logit, or the difference of two."""
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        return outputs.reshape(outputs.shape[0])
    if outputs.shape[1] == 2:
        return outputs[:, 1] - outputs[:, 0]
    raise SpecError(f"metric 'auroc' is for two classes, the model gives {outputs.shape[1]}: use 'accuracy' or 'top_k'")


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


def _mean_ranks(scores: Tensor, owner: Tensor) -> Tensor:
    """The rank of every score when sorted by client, then score; equal scores of a client share a rank, and
    a score that is no number has none."""
    by_score = scores.argsort(stable=True)
    order = by_score[owner[by_score].argsort(stable=True)]
    sorted_scores, sorted_owner = scores[order], owner[order]
    fresh = torch.ones(len(order), dtype=torch.bool)
    fresh[1:] = (sorted_scores[1:] != sorted_scores[:-1]) | (sorted_owner[1:] != sorted_owner[:-1])
    group = fresh.cumsum(0) - 1
    size = torch.bincount(group).double()
    rank = size.cumsum(0) - (size - 1) / 2
    ranks = torch.empty(len(order), dtype=torch.float64).scatter(0, order, rank[group])
    return ranks.masked_fill(scores.isnan(), torch.nan)
