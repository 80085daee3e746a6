"""Helpers of rules that keep one number per client of the population, for rounds that some clients miss."""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core.types import Info


def usable(losses: Tensor) -> Tensor:
    """Losses in float64; a loss that is not finite is replaced by the largest finite one (0 if there is none).

    A client whose loss overflowed is badly served, and one NaN must not make all weights NaN.

    >>> usable(torch.tensor([1.0, torch.nan, 3.0]))
    tensor([1., 3., 3.], dtype=torch.float64)
    """
    losses = losses.double()
    finite = losses.isfinite()
    if bool(finite.all()):
        return losses
    largest = losses[finite].max() if bool(finite.any()) else losses.new_zeros(())
    return torch.where(finite, losses, largest)


def everyone(values: Tensor, ids: Tensor, population: int) -> Tensor:
    """One value per client of the population: an absent client gets the mean of those present.

    >>> everyone(torch.tensor([1.0, 3.0]), torch.tensor([0, 2]), 3)
    tensor([1., 2., 3.])
    """
    return values.mean().expand(population).clone().index_copy(0, ids, values)


def among(p: Tensor, ids: Tensor) -> Tensor:
    """The population's weights renormalised over the participants; equal weights if theirs sum to zero.

    >>> among(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0, 2]))
    tensor([0.6667, 0.3333])
    """
    shares = p[ids]
    total = shares.sum()
    return shares / total if bool(total > 0) else torch.full_like(shares, 1 / len(shares))


def imputed(ids: Tensor, population: int) -> Info:
    """Info for the record: the ids of clients whose values were imputed; empty if there are none."""
    if len(ids) == population:
        return {}
    missing = torch.ones(population, dtype=torch.bool)
    missing[ids] = False
    return {"imputed": missing.nonzero().flatten()}
