"""Coordinate-wise median and trimmed mean (Yin et al. 2018, arXiv:1803.01498), as weights of single elements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedalloy.core.native.elements import between
from fedalloy.core.protocols import ElementRound, ElementWeighting
from fedalloy.core.registry import register
from fedalloy.core.search import Range
from fedalloy.core.tree import Chunk
from fedalloy.core.types import Context, Contributions, Info, State


@register("weighting", "median")
@dataclass(frozen=True)
class Median(ElementWeighting):
    """``update = median_k delta_k``, element by element: weight 1 on the middle value, or 1/2 on each of two.

    Clients that sent the same value share its weight, so the order of clients does not matter. Data sizes do not count.
    Fewer than half of the clients may send anything: each element stays between values that the others sent. Buffers,
    and everything else that is averaged, get their own medians. A client that took no step is left out: its zeros are
    not an update.
    When to use it: some clients may send wrong or hostile updates, and you do not know how many.

    >>> from fedalloy.core.types import Cohort
    >>> from fedalloy.core.keys import Key
    >>> cohort = Cohort(torch.arange(3), {"delta": {"w": torch.tensor([[1.0, 5.0], [2.0, 5.0], [900.0, 0.0]])}}, {})
    >>> Median().weigh(cohort, {}, Context(1, 3, Key.of(0)))[0]["w"]
    tensor([[0.0000, 0.5000],
            [1.0000, 0.5000],
            [0.0000, 0.0000]])
    """

    requires: ClassVar[frozenset[str]] = frozenset()
    weight_bound: ClassVar[float | None] = 1.0
    counts_idle: ClassVar[bool] = False
    guards_all_parts: ClassVar[bool] = True

    def open(self, cohort: Contributions, state: State, ctx: Context) -> ElementRound:
        return _Cutting((len(cohort) - 1) // 2)


@register("weighting", "trimmed_mean", search={"trim": Range(0.05, 0.45)})
@dataclass(frozen=True)
class TrimmedMean(ElementWeighting):
    """Every element's mean without its ``b`` smallest and ``b`` largest values, ``b = ceil(trim m)`` of m clients.

    ``weight = 1 / (m - 2 b)`` for the kept values; clients that sent the same value share its weight. At least one
    value is kept, and ``trim = 0`` is the plain mean. ``trim`` should be at least the share of clients that may be
    wrong. Data sizes do not count; buffers, and everything else that is averaged, are trimmed separately. A client
    that took no step is left out.
    When to use it: a known share of clients may send wrong or hostile updates, and the rest should all count.

    >>> from fedalloy.core.types import Cohort
    >>> from fedalloy.core.keys import Key
    >>> cohort = Cohort(torch.arange(3), {"delta": {"w": torch.tensor([[1.0], [-70.0], [900.0]])}}, {})
    >>> TrimmedMean(0.3).weigh(cohort, {}, Context(1, 3, Key.of(0)))[0]["w"].flatten()
    tensor([1., 0., 0.])
    """

    requires: ClassVar[frozenset[str]] = frozenset()
    weight_bound: ClassVar[float | None] = 1.0
    counts_idle: ClassVar[bool] = False
    guards_all_parts: ClassVar[bool] = True

    trim: float = 0.1

    def __post_init__(self) -> None:
        if not 0 <= self.trim < 0.5:
            raise ValueError(f"trim, the share left out at each end, must lie in [0, 0.5), got {self.trim}")

    def open(self, cohort: Contributions, state: State, ctx: Context) -> ElementRound:
        # The tolerance is for products that floating point puts just above a whole number (0.1 * 30).
        return _Cutting(min(math.ceil(self.trim * len(cohort) - 1e-9), (len(cohort) - 1) // 2))


class _Cutting(ElementRound):
    """Leaves ``cut`` values out at each end; the two rules differ only in that number."""

    def __init__(self, cut: int) -> None:
        self._cut = cut

    def weigh_chunk(self, updates: Tensor, chunk: Chunk) -> Tensor:
        return middle(updates.detach(), self._cut)

    def close(self) -> tuple[State, Info]:
        return {}, {"cut": torch.tensor(self._cut)}


def middle(values: Tensor, cut: int) -> Tensor:
    """Weights ``[C, n]`` that average each column without its ``cut`` smallest and largest values.

    >>> middle(torch.tensor([[4.0], [2.0], [2.0], [9.0]]), 1).flatten()
    tensor([0.5000, 0.2500, 0.2500, 0.0000])
    """
    values = values if values.is_floating_point() else values.double()
    kept = len(values) - 2 * cut
    ordered = _sorted(values)
    low, high = ordered[cut], ordered[len(values) - 1 - cut]
    weights, inside = between(values, low, high, kept) or _between(values, low, high, kept)
    tied = (inside > kept).nonzero().flatten()
    if len(tied):
        weights[:, tied] = _shared(values[:, tied], low[tied], high[tied], cut)
    return weights


def _between(values: Tensor, low: Tensor, high: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    inside = (values >= low) & (values <= high)
    return inside.to(values.dtype) / kept, inside.sum(0)


def _shared(values: Tensor, low: Tensor, high: Tensor, cut: int) -> Tensor:
    """The same for columns with ties at ``low`` or ``high``, where more values than the kept number lie between them.

    Tied values share the weight of those of them that are kept.
    """
    at_low, at_high = values == low, (values == high) & (low != high)
    between = ((values > low) & (values < high)).to(values.dtype)
    low_share = _kept_share((values < low).sum(0), at_low.sum(0), cut, len(values))
    high_share = _kept_share((values > high).sum(0), at_high.sum(0), cut, len(values))
    return ((between + at_low * low_share + at_high * high_share) / (len(values) - 2 * cut)).to(values.dtype)


def _kept_share(outside: Tensor, ties: Tensor, cut: int, clients: int) -> Tensor:
    """The share that is kept of the values tied at an end, if ``outside`` values lie beyond them."""
    return ((outside + ties).clamp(max=clients - cut) - cut).double() / ties.clamp(min=1)


def _sorted(values: Tensor) -> Tensor:
    """Sort each column in ascending order; on a CPU numpy is ten times as fast."""
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.sort(values.numpy(), axis=0))
    return values.sort(dim=0).values
