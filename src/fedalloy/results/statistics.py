"""Numbers over seeds and over clients: mean and spread, interval.

A missing value is NaN and left out. One that overflowed is infinite and is kept, because a mean without it would look
too good.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

ALPHA = 0.05
"""The share of intervals that may miss: they are at 95 %."""


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds; the latter is None for a single value."""

    mean: float
    deviation: float | None
    count: int

    @staticmethod
    def of(values: Iterable[float]) -> Spread | None:
        """None when there is nothing to average.

        >>> Spread.of([1.0, 3.0])
        Spread(mean=2.0, deviation=1.4142135623730951, count=2)
        """
        known = without_missing(values)
        if not known:
            return None
        spreads = len(known) > 1 and all(map(math.isfinite, known))
        return Spread(statistics.fmean(known), statistics.stdev(known) if spreads else None, len(known))

    def text(self, digits: int = 3, signed: bool = False) -> str:
        """The two numbers for a table.

        >>> Spread(0.5, 0.01, 3).text(), Spread(0.5, None, 1).text(1, signed=True)
        ('0.500 ± 0.010', '+0.5')
        """
        mean = f"{self.mean:{'+' if signed else ''}.{digits}f}"
        return mean if self.deviation is None else f"{mean} ± {self.deviation:.{digits}f}"


@dataclass(frozen=True)
class Interval:
    """The mean of some numbers and its 95 % confidence interval; one number has no interval."""

    mean: float
    low: float
    high: float
    count: int

    @staticmethod
    def of(values: Iterable[float], reused: float = 0.0) -> Interval | None:
        """None where there is nothing to average; ``reused`` widens it as in :mod:`fedalloy.results.evidence`.

        >>> Interval.of([1.0, 2.0, 3.0])
        Interval(mean=2.0, low=-0.484, high=4.484, count=3)
        """
        found = Spread.of(values)
        if found is None:
            return None
        if found.deviation is None:
            return Interval(found.mean, -math.inf, math.inf, found.count)
        half = student(found.count - 1) * found.deviation * math.sqrt(1 / found.count + reused)
        return Interval(found.mean, found.mean - half, found.mean + half, found.count)

    def less(self, value: float) -> Interval:
        """The interval after subtracting a value."""
        return Interval(self.mean - value, self.low - value, self.high - value, self.count)

    def text(self, signed: bool = True) -> str:
        """Mean and interval for a table; small numbers with more digits.

        >>> Interval(-0.004, -0.005, -0.003, 3).text()
        '-0.0040 [-0.0050, -0.0030]'
        """
        form = f"{'+' if signed else ''}.{2 if abs(self.mean) >= 0.1 or self.mean == 0 else 4}f"
        inside = f" [{self.low:{form}}, {self.high:{form}}]" if math.isfinite(self.low) else ""
        return f"{self.mean:{form}}{inside}"


@dataclass(frozen=True)
class Band:
    """The mean over seeds at one point of a line and the range they span; NaN where there is nothing to draw."""

    mean: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Band:
        """Where a value overflowed, the line has a gap.

        >>> Band.of([1.0, 3.0, math.nan]), Band.of([1.0, math.inf])
        (Band(mean=2.0, low=1.0, high=3.0), Band(mean=nan, low=nan, high=nan))
        """
        known = without_missing(values)
        if not known or not all(map(math.isfinite, known)):
            return Band(math.nan, math.nan, math.nan)
        return Band(statistics.fmean(known), min(known), max(known))


def without_missing(values: Iterable[float]) -> list[float]:
    """The values without NaN; infinite ones are kept."""
    return [value for value in values if not math.isnan(value)]


def number(value: float | None) -> float:
    """A number of a record; null becomes NaN."""
    return math.nan if value is None else float(value)


def mean(values: Iterable[float | None]) -> float:
    """The mean of the finite ones, for bytes, seconds and training losses, which are not compared between algorithms.

    >>> mean([1.0, None, 3.0]), mean([])
    (2.0, nan)
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.fmean(known) if known else math.nan


def moments(values: Iterable[float]) -> tuple[float, float]:
    """Mean and standard deviation over clients; NaN where no client has a value, and where a loss overflowed.

    >>> moments([1.0, 3.0, math.nan])
    (2.0, 1.0)
    """
    known = without_missing(values)
    if not known or not all(map(math.isfinite, known)):
        return math.nan, math.nan
    middle = statistics.fmean(known)
    return middle, math.sqrt(math.fsum((value - middle) ** 2 for value in known) / len(known))


def student(freedom: int, alpha: float = ALPHA) -> float:
    """Student's t, two-sided.

    >>> student(4)
    2.776
    """
    from scipy import stats

    return float(stats.t.isf(alpha / 2, freedom))
