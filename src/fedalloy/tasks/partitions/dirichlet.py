"""Label skew by Dirichlet proportions.

For every class, p ~ Dir(alpha 1) gives the clients' shares of its examples; small alpha: few clients per class, large
alpha: nearly iid. Every example is assigned to exactly one client.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.partitions.base import Partition, check_supply, class_totals, deal_by_class
from fedalloy.tasks.partitions.margins import level_up

_ATTEMPTS = 10
_REJECTIONS = 64


@register("partition", "dirichlet")
@dataclass(frozen=True)
class Dirichlet(Partition):
    """Dir(alpha) shares of each class, every client with at least ``min_samples``.

    A draw that leaves a client below the minimum is repeated, up to 10 draws in all; then examples are moved from the
    largest clients. ``balance``: a client that already has N / K examples gets none of the remaining classes.
    """

    alpha: float = 0.5
    min_samples: int = 2
    balance: bool = False

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise SpecError(f"dirichlet: alpha = {self.alpha} must be above 0 (0.1: strong skew, 100: nearly iid)")
        if self.min_samples < 1:
            raise SpecError(f"dirichlet: min_samples = {self.min_samples} must be at least 1")

    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        totals = class_totals(labels, "dirichlet")
        check_supply("dirichlet", len(labels), clients, self.min_samples)
        return deal_by_class(self._table(totals, clients, key), labels, key.fold("deal"))

    def _table(self, totals: Tensor, clients: int, key: Key) -> Tensor:
        for attempt in range(_ATTEMPTS):
            shares = log_gamma_draws(self.alpha, (len(totals), clients), key.fold("attempt", attempt))
            table = _shared(shares, totals, self.balance)
            if int(table.sum(1).min()) >= self.min_samples:
                return table
        return level_up(table, self.min_samples)


def log_gamma_draws(alpha: float, shape: tuple[int, int], key: Key) -> Tensor:
    """Logarithms of Gamma(alpha) draws, exact for any alpha: their softmax is a Dirichlet draw.

    log G(a) = log G(a + 1) + log(U) / a, so that with a tiny alpha the shares do not all underflow to zero.
    G(a + 1) is drawn by Marsaglia and Tsang's rejection (2000), which accepts more than 95 of 100 candidates.
    """
    d = alpha + 1 - 1 / 3
    result = torch.full(shape, float("nan"), dtype=torch.float64)
    for attempt in range(_REJECTIONS):
        draw = key.fold("candidate", attempt)
        x = draw.fold("x").normal(*shape, dtype=torch.float64)
        v = (1 + x / (9 * d) ** 0.5).clamp(min=1e-12) ** 3
        accepted = _log_uniform(draw.fold("u"), shape) < 0.5 * x**2 + d - d * v + d * v.log()
        result = torch.where(result.isnan() & accepted, (d * v).log(), result)
        if not bool(result.isnan().any()):
            break
    return result + _log_uniform(key.fold("boost"), shape) / alpha


def _log_uniform(key: Key, shape: tuple[int, int]) -> Tensor:
    return (key.uniform(*shape, dtype=torch.float64) + 2.0**-54).log()


def _shared(log_shares: Tensor, totals: Tensor, balance: bool) -> Tensor:
    """Whole numbers of each class for each client, ``[K, classes]``."""
    clients = log_shares.shape[1]
    table = torch.zeros(clients, len(totals), dtype=torch.int64)
    for label, shares in enumerate(log_shares):
        if balance:
            full = table.sum(1) * clients >= int(totals.sum())
            shares = shares.masked_fill(full, float("-inf")) if not bool(full.all()) else shares
        ends = (shares.softmax(0).cumsum(0) * totals[label]).round().to(torch.int64)
        ends[-1] = totals[label]  # the shares sum to one only up to rounding
        table[:, label] = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
    return table
