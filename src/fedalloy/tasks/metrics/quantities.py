"""Metrics of quantities: mean absolute and squared error, and the coefficient of determination."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core.protocols import Objective
from fedalloy.core.registry import register
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.losses.layout import like_targets
from fedalloy.tasks.metrics.metric import Metric, means, sums

_REGRESSION: tuple[TaskKind, ...] = ("regression",)


@register("metric", "mae", higher_is_better=False)
@dataclass(frozen=True)
class MeanAbsoluteError(Metric):
    """Mean absolute error over examples and outputs."""

    kinds: ClassVar[tuple[TaskKind, ...]] = _REGRESSION
    pooled = "mean"

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean absolute error of every example."""
        return _error(outputs, y, "mae").abs().flatten(1).mean(1)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """The mean."""
        return means(evidence, owner, clients)


@register("metric", "mse", higher_is_better=False)
@dataclass(frozen=True)
class MeanSquaredError(Metric):
    """Mean squared error over examples and outputs."""

    kinds: ClassVar[tuple[TaskKind, ...]] = _REGRESSION
    pooled = "mean"

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean squared error of every example."""
        return _error(outputs, y, "mse").square().flatten(1).mean(1)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """The mean."""
        return means(evidence, owner, clients)


@register("metric", "r2", higher_is_better=True)
@dataclass(frozen=True)
class R2Score(Metric):
    """``1 - sum (y - guess)^2 / sum (y - mean)^2`` of every output, averaged over outputs; the mean is that of the
    client's own examples. An output whose targets are all equal has no score."""

    kinds: ClassVar[tuple[TaskKind, ...]] = _REGRESSION

    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """Targets and errors."""
        error = _error(outputs, y, "r2").flatten(1)
        return torch.cat([y.double().reshape(error.shape), error], 1)

    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """The mean over outputs that have a score; NaN if none does."""
        y, error = evidence.chunk(2, 1)
        # From every client's first target on: the mean of equal numbers is rounded, and would make a spread of nothing.
        y = y - y[torch.searchsorted(owner, owner)]
        spread = sums((y - means(y, owner, clients)[owner]).square(), owner, clients)
        each = 1 - sums(error.square(), owner, clients) / spread
        return torch.where(spread > 0, each, torch.nan).nanmean(1)


def _error(outputs: Tensor, y: Tensor, metric: str) -> Tensor:
    """The errors in float64, with an axis for several outputs."""
    error = like_targets(outputs, y, metric).double() - y.double()
    return error.unsqueeze(1) if error.dim() == 1 else error
