"""Summaries of per-client values: mean, spread, tails, inequality.

Clients without a value (NaN) are skipped; ``summarise`` counts them. Infinity, a value that overflowed, is not skipped:
for a loss it marks the worst served. With ``sizes`` a mean or a tail is weighted by the clients' numbers of test
examples, otherwise every client counts equally.

``worst`` and ``best`` are the lowest and the highest values of any metric. Which clients are served worst depends on
the direction of the metric: ``worst_served`` and ``best_served`` use it, and a metric without a direction has neither.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError


def mean(values: Tensor, sizes: Tensor | None = None) -> float:
    """The mean over clients."""
    values, sizes = _present(values, sizes)
    return _average(values, sizes)


def variance(values: Tensor, scale: float = 100.0) -> float:
    """The variance over clients of ``scale * values`` (percent, for accuracies), divided by n.

    >>> variance(torch.tensor([0.25, 0.75]))
    625.0
    """
    values, _ = _present(values, None)
    return float((scale * values).var(correction=0)) if len(values) else math.nan


def worst(values: Tensor, fraction: float = 0.1, sizes: Tensor | None = None) -> float:
    """The mean of the ``max(1, floor(fraction n))`` lowest values; fraction 0 gives the lowest.

    >>> worst(torch.tensor([1.0, 0.25, 0.5, 0.75]), 0.5)
    0.375
    """
    values, sizes = _present(values, sizes)
    tail = values.argsort(stable=True)[: _members(len(values), fraction)]
    return _average(values[tail], None if sizes is None else sizes[tail])


def best(values: Tensor, fraction: float = 0.1, sizes: Tensor | None = None) -> float:
    """The mean of the ``max(1, floor(fraction n))`` highest values; fraction 0 gives the highest."""
    values, sizes = _present(values, sizes)
    members = _members(len(values), fraction)
    tail = values.argsort(stable=True)[len(values) - min(members, len(values)) :]
    return _average(values[tail], None if sizes is None else sizes[tail])


def worst_served(values: Tensor, higher: bool, fraction: float = 0.1, sizes: Tensor | None = None) -> float:
    """The tail of those with the worst values: the lowest where higher is better, the highest of a loss.

    >>> worst_served(torch.tensor([1.0, 0.25, 0.5, 0.75]), higher=False, fraction=0.5)
    0.875
    """
    return (worst if higher else best)(values, fraction, sizes)


def best_served(values: Tensor, higher: bool, fraction: float = 0.1, sizes: Tensor | None = None) -> float:
    """The tail of those with the best values."""
    return (best if higher else worst)(values, fraction, sizes)


def parity_gap(values: Tensor, fraction: float = 0.0, sizes: Tensor | None = None) -> float:
    """The highest tail minus the lowest: how far apart the best and the worst served are."""
    return best(values, fraction, sizes) - worst(values, fraction, sizes)


def gini(values: Tensor) -> float:
    """Inequality in [0, 1): ``sum_i (2 i - n - 1) x_(i) / (n sum x)`` over sorted values; 0 when all are zero.

    >>> gini(torch.tensor([0.0, 1.0]))
    0.5
    """
    values, _ = _present(values, None)
    count, total = len(values), float(values.sum())
    if count == 0:
        return math.nan
    if total == 0.0:
        return 0.0
    rank = torch.arange(1, count + 1, dtype=torch.float64)
    return float(((2 * rank - count - 1) * values.sort().values).sum()) / (count * total)


def summarise(
    values: Tensor, sizes: Tensor | None = None, fraction: float = 0.1, higher_is_better: bool | None = None
) -> dict[str, float]:
    """All of the above by name, and how many clients were skipped because they have no value.

    Without a direction there is no ``worst_served`` and no ``best_served``.
    """
    lowest, highest = worst(values, fraction, sizes), best(values, fraction, sizes)  # once: each sorts all clients
    ends = (lowest, highest) if higher_is_better else (highest, lowest)
    tails = {} if higher_is_better is None else dict(zip(("worst_served", "best_served"), ends, strict=True))
    return {
        "mean": mean(values, sizes),
        "variance": variance(values),
        "worst": lowest,
        "best": highest,
        **tails,
        "gini": gini(values),
        "parity_gap": highest - lowest,
        "skipped": float(values.isnan().sum()),
    }


def served(
    values: Tensor, higher_is_better: bool | None, fraction: float = 0.1, sizes: Tensor | None = None
) -> dict[str, float]:
    """The two tails by the names that records give them; nothing without a direction."""
    if higher_is_better is None:
        return {}
    return {
        "worst_served": worst_served(values, higher_is_better, fraction, sizes),
        "best_served": best_served(values, higher_is_better, fraction, sizes),
    }


def _present(values: Tensor, sizes: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The clients that have a value, in float64."""
    if sizes is not None and len(sizes) != len(values):
        raise SpecError(f"{len(values)} values but {len(sizes)} test-set sizes: give one size per client")
    known = ~values.isnan()
    kept = values[known].detach().double().cpu()
    return kept, None if sizes is None else sizes[known].double().cpu()


def _members(count: int, fraction: float) -> int:
    """The size of a tail; the small addend undoes the rounding of products such as 0.29 * 100."""
    if not 0.0 <= fraction <= 1.0:
        raise SpecError(f"a tail of fraction {fraction}: allowed are values in [0, 1] (0.1 is 10 %)")
    return max(1, math.floor(fraction * count + 1e-9))


def _average(values: Tensor, sizes: Tensor | None) -> float:
    if len(values) == 0:
        return math.nan
    if sizes is None:
        return float(values.mean())
    return float((values * sizes).sum() / sizes.sum())
