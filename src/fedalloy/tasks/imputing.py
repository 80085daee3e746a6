"""Missing values of a client's features, filled from its own training part alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.inputs import Inputs

Impute = Literal["none", "mean", "median"]
"""How missing values are filled: not at all (they are refused), or by this statistic of the training part."""


@dataclass(frozen=True, eq=False)
class Imputer:
    """The value that fills every client's missing features, ``[K, ...]``: mean or median of its training rows, and 0
    for a feature that a client never has, because nobody else's data may be used."""

    fill: Tensor

    @staticmethod
    def learn(x: Tensor, sizes: Tensor, rule: Impute) -> Imputer:
        """Learn from all clients' training rows, sorted by client.

        >>> gaps = torch.tensor([[1.0], [torch.nan], [3.0], [torch.nan]])
        >>> Imputer.learn(gaps, torch.tensor([3, 1]), "mean").fill.flatten()
        tensor([2., 0.], dtype=torch.float64)
        """
        statistic = _median if rule == "median" else _mean
        none = torch.full(x.shape[1:], math.nan, dtype=torch.float64, device=x.device)
        parts = [statistic(part) if len(part) else none for part in x.double().split(sizes.tolist())]
        return Imputer(torch.stack(parts).nan_to_num(nan=0.0))

    @staticmethod
    def by(rule: Impute) -> Callable[[Tensor, Tensor], Imputer]:
        """How to learn with this rule."""
        return lambda x, sizes: Imputer.learn(x, sizes, rule)

    def apply(self, x: Tensor, sizes: Tensor) -> Tensor:
        """Fill any part of the clients' rows, sorted by client."""
        if not x.is_floating_point():
            return x
        owner = torch.repeat_interleave(sizes)
        return torch.where(x.isnan(), self.fill[owner].to(x.dtype), x)


def without_gaps(x: Inputs) -> Inputs:
    """The features with 0 for every missing value, for checks that refuse NaN; infinity stays."""

    def filled(leaf: Tensor) -> Tensor:
        return leaf.nan_to_num(0.0, math.inf, -math.inf) if leaf.is_floating_point() else leaf

    return inputs.each(filled, x)


def count_gaps(x: Inputs) -> int:
    """How many values are missing."""
    return sum(int(leaf.isnan().sum()) for leaf in inputs.leaves(x) if leaf.is_floating_point())


def _mean(rows: Tensor) -> Tensor:
    return rows.nanmean(0)


def _median(rows: Tensor) -> Tensor:
    """The middle of each column; of an even number of values, the mean of the two in the middle."""
    return (rows.nanmedian(0).values - (-rows).nanmedian(0).values) / 2
