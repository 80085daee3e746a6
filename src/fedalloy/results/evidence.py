"""Is the difference real? One standard for every table, report and verdict.

Runs are paired by seed. Student's t over the paired differences decides at 95 %, from three pairs on. Where several
differences are shown together, verdicts follow Holm and the intervals are Bonferroni's, so that all of them cover at
once in 95 of 100 comparisons. From six pairs on an exact test of the same differences stands beside t. Where seeds
redraw the split of one data set into training and test part, runs share examples and their spread is too small: the
correction of Nadeau and Bengio (2003) widens it. Rounds to a target that some runs never reach, values that overflowed
and differences without any spread are compared by ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from fedalloy.results.statistics import ALPHA, Spread, student

if TYPE_CHECKING:
    import numpy as np

FEWEST_PAIRS = 3
"""Fewer paired differences decide nothing."""
FEWEST_EXACT = 6
"""With fewer pairs than this an exact test cannot reach 5 %, whatever the differences are."""
MOST_EXACT = 16
"""With more pairs there are too many sign patterns to count them all."""
MOST_SEEDS = 1000
"""Numbers of seeds beyond this are not searched for."""
_SAME = 1e-9
"""Relative to their size, differences that vary less than this are equal: the rest is rounding."""

EvidenceOutcome = Literal["better", "worse", "higher", "lower", "undecided", "too few seeds", "not finished"]
DECIDED = ("better", "worse", "higher", "lower")


@dataclass(frozen=True)
class PairedDifferences:
    """Mine minus theirs, one value for every seed that both have; NaN is not allowed.

    ``reused`` is the ratio of test to training examples where every seed draws another split of the same examples,
    else 0. ``ranked`` says that the values are ordered but their size means little, because runs never reached the
    target; so are infinite ones. ``bounds`` is then what is known of each difference, empty where that is its value.
    """

    values: tuple[float, ...]
    higher_is_better: bool | None = True
    reused: float = 0.0
    ranked: bool = False
    bounds: tuple[tuple[float, float], ...] = ()

    @property
    def by_ranks(self) -> bool:
        """Whether ranks decide, because Student's t needs finite values that differ."""
        if self.ranked or not all(map(math.isfinite, self.values)):
            return True
        return len(self.values) > 1 and _without_spread(self.values)


@dataclass(frozen=True)
class Evidence:
    """What paired differences say. Their sign is that of mine minus theirs; ``outcome`` knows which sign is better.

    ``estimate`` is the mean, or the median where ranks decide (``ranked``). ``low`` and ``high`` are the simultaneous
    interval over the ``family`` of differences shown together, at 1 - ``alpha``; infinite where there is none. ``p``
    is NaN where nothing can be tested. ``exact`` is the p of the ``exact_test`` beside Student's t, None below six
    pairs and where ranks decide. ``decided_on`` is the number of pairs of an earlier look, if only that one decided.
    """

    estimate: float
    low: float
    high: float
    pairs: int
    p: float
    exact: float | None
    exact_test: Literal["permutation", "sign"] | None
    outcome: EvidenceOutcome
    ranked: bool = False
    deviation: float | None = None
    reused: float = 0.0
    family: int = 1
    alpha: float = ALPHA
    decided_on: int | None = None

    @property
    def decided(self) -> bool:
        """Whether there is a verdict."""
        return self.outcome in DECIDED

    @property
    def reason(self) -> str:
        """What decides although the interval covers zero, for a table to explain: an earlier look, Holm, or ranks."""
        if not self.decided or self.decided_on is not None:
            return self.earlier
        return ("ranks" if self.ranked else "Holm") if self.low <= 0 <= self.high else ""

    @property
    def word(self) -> str:
        """The verdict for a table, with the reason where the interval does not show it."""
        return f"{self.outcome} ({self.reason})" if self.reason else self.outcome

    @property
    def earlier(self) -> str:
        """Which look decided, if it was not this one."""
        if self.decided_on is None:
            return ""
        return f"over the first {self.decided_on} seeds" if self.decided_on < self.pairs else "at an earlier look"

    def text(self, digits: int = 3) -> str:
        """The estimate and its simultaneous interval for a table.

        >>> compare_together([PairedDifferences((0.02, 0.03, 0.04))])[0].text()
        '+0.030 [+0.005, +0.055]'
        """
        if math.isnan(self.estimate):
            return ""
        inside = f" [{self.low:+.{digits}f}, {self.high:+.{digits}f}]"
        return f"{self.estimate:+.{digits}f}" + (inside if self.low > -math.inf or self.high < math.inf else "")


def compare_together(families: Sequence[PairedDifferences], alpha: float = ALPHA) -> list[Evidence]:
    """The evidence of several lists of paired differences that are shown together.

    >>> lists = [(1.0, 1.1, 0.9, 1.0), (0.5, -0.4, 0.1, -0.2), (1.0,)]
    >>> [one.outcome for one in compare_together([PairedDifferences(one) for one in lists])]
    ['better', 'undecided', 'too few seeds']
    """
    # Every interval that is shown is simultaneous with the others, and two values have one. Which of them can be tested
    # depends on the data, and must not make the others easier to decide.
    size = max(1, sum(len(one.values) > 1 for one in families))
    found = [_evidence(one, size, alpha) for one in families]
    decided = holm([one.p for one in found], alpha, size)
    return [
        replace(one, outcome=_outcome(one, asked, real))
        for one, asked, real in zip(found, families, decided, strict=True)
    ]


def holm(values: Sequence[float], alpha: float = ALPHA, family: int | None = None) -> list[bool]:
    """Which of several p-values are significant together, by Holm's step-down method.

    NaN are not part of it, unless the size of the ``family`` is given.

    >>> holm([0.01, 0.04, 0.03]), holm([0.01, 0.02, math.nan])
    ([True, False, False], [True, True, False])
    """
    order = sorted((place for place, p in enumerate(values) if not math.isnan(p)), key=lambda place: values[place])
    found = [False] * len(values)
    for rank, place in enumerate(order):
        if values[place] > alpha / ((family or len(order)) - rank):
            break
        found[place] = True
    return found


def fewest_by_ranks(family: int, alpha: float = ALPHA) -> int:
    """How many seeds a verdict by ranks needs at least, if every seed says the same: 2^(1-n) <= alpha / family.

    >>> fewest_by_ranks(1), fewest_by_ranks(4), fewest_by_ranks(8)
    (6, 8, 9)
    """
    return math.ceil(1 - math.log2(alpha / family))


def seeds_to_decide(found: Evidence, alpha: float | None = None) -> int | None:
    """About how many more seeds would decide, if their mean and spread were like these; 0 where they do.

    None where no number up to 1000 would. ``alpha`` is that of the look at these seeds, by default the same again.

    >>> one, = compare_together([PairedDifferences((1.0, -0.6, 0.8, -0.2))])
    >>> seeds_to_decide(one)
    36
    """
    if found.decided:
        return 0
    level = (found.alpha if alpha is None else alpha) / found.family
    if found.ranked:
        return _seeds_by_ranks(found, level)
    if found.deviation is None:
        return None
    import numpy as np

    seeds, quantiles = _quantiles(level)
    half = quantiles * found.deviation * np.sqrt(1 / seeds + found.reused)
    enough = seeds[(half <= abs(found.estimate)) & (seeds >= found.pairs)]
    return int(enough[0]) - found.pairs if len(enough) else None


@cache
def _quantiles(level: float) -> tuple[np.ndarray[Any, np.dtype[np.float64]], np.ndarray[Any, np.dtype[np.float64]]]:
    """Numbers of seeds, and Student's t for each."""
    import numpy as np
    from scipy import stats

    seeds = np.arange(FEWEST_PAIRS, MOST_SEEDS + 1, dtype=np.float64)
    return seeds, np.asarray(stats.t.isf(level / 2, seeds - 1))


def _seeds_by_ranks(found: Evidence, level: float) -> int | None:
    """The statistic of a rank test grows with the root of the number of seeds; no fewer than all in agreement need."""
    from scipy import stats

    if math.isnan(found.p) or found.p >= 1:
        return None
    growth = float(stats.norm.isf(level / 2) / stats.norm.isf(found.p / 2)) ** 2
    same = found.p <= 2.0 ** (1 - found.pairs)
    seeds = max(fewest_by_ranks(1, level), 0 if same else math.ceil(growth * found.pairs))
    return max(1, seeds - found.pairs) if seeds <= MOST_SEEDS else None


def exact_p(values: Sequence[float]) -> tuple[float, Literal["permutation", "sign"]] | None:
    """The two-sided exact p of a mean under random signs, and which test it is; None below six values.

    All sign patterns are counted up to 16 values. Beyond, the sign test counts only the signs.

    >>> exact_p([1.0, 2.0, 1.5, 0.5, 1.0, 2.5]), exact_p([1.0, 2.0, 3.0])
    ((0.03125, 'permutation'), None)
    """
    if len(values) < FEWEST_EXACT:
        return None
    counted = permutation_test(values)
    if counted is not None:
        return counted, "permutation"
    from scipy import stats

    signs = [value > 0 for value in values if value]
    return (float(stats.binomtest(sum(signs), len(signs)).pvalue) if signs else 1.0), "sign"


def permutation_test(values: Sequence[float]) -> float | None:
    """The two-sided exact p of a mean under random signs; None where it could not be significant or takes too long.

    >>> permutation_test([1.0, 2.0, 1.5, 0.5, 1.0, 2.5]), permutation_test([1.0, 2.0, 3.0])
    (0.03125, None)
    """
    return _permuted(values) if FEWEST_EXACT <= len(values) <= MOST_EXACT else None


def rank_p(values: Sequence[float]) -> float:
    """The two-sided sign-rank p of paired differences, exact up to 16 that are not zero; infinite ones rank highest.

    >>> rank_p([-1.0, -math.inf, -2.0, -math.inf, -3.0, -1.0])
    0.03125
    """
    signed = _signed_ranks(values)
    if not signed:
        return 1.0
    if len(signed) <= MOST_EXACT:
        return _permuted(signed)
    from scipy import stats

    return float(stats.wilcoxon(signed).pvalue)


def _signed_ranks(values: Sequence[float]) -> list[float]:
    """The ranks of the sizes of all values but zeros, with the values' signs."""
    from scipy import stats

    apart = [value for value in values if value]
    return [
        math.copysign(float(rank), value)
        for rank, value in zip(stats.rankdata(list(map(abs, apart))), apart, strict=True)
    ]


def _testable(one: PairedDifferences) -> bool:
    return len(one.values) >= FEWEST_PAIRS and not (one.by_ranks and one.reused)


def _evidence(one: PairedDifferences, size: int, alpha: float) -> Evidence:
    if one.by_ranks:
        return _by_ranks(one, size, alpha)
    found = Spread.of(one.values)
    if found is None or found.deviation is None:
        alone = found.mean if found else math.nan
        return Evidence(
            alone, -math.inf, math.inf, len(one.values), math.nan, None, None, "too few seeds", family=size, alpha=alpha
        )
    error = found.deviation * math.sqrt(1 / found.count + one.reused)
    half = student(found.count - 1, alpha / size) * error
    p = _student_p(found.mean / error, found.count - 1) if _testable(one) else math.nan
    exact, test = (None if one.reused else exact_p(one.values)) or (None, None)
    return Evidence(
        found.mean, found.mean - half, found.mean + half, found.count, p, exact, test, "undecided",
        deviation=found.deviation, reused=one.reused, family=size, alpha=alpha,
    )  # fmt: skip


def _by_ranks(one: PairedDifferences, size: int, alpha: float) -> Evidence:
    """The median, with the interval of the sign test. Ranks cannot be corrected for examples that splits share."""
    low, high = _median_interval(one, alpha / size) if _testable(one) else (-math.inf, math.inf)
    p = rank_p(one.values) if _testable(one) else math.nan
    equal = len(set(one.values)) == 1 and not one.ranked
    return Evidence(
        statistics.median(one.values), low, high, len(one.values), p, None, None, "undecided", ranked=True,
        deviation=0.0 if equal else None, reused=one.reused, family=size, alpha=alpha,
    )  # fmt: skip


def _median_interval(one: PairedDifferences, alpha: float) -> tuple[float, float]:
    """From one order statistic to its mirror image, as far inside as covers the median with 1 - alpha.

    Where only bounds are known, the lower end is that of the lower bounds and the upper end that of the upper ones.
    """
    from scipy import stats

    inside = int(stats.binom.ppf(alpha / 2, len(one.values), 0.5))
    lows, highs = zip(*(one.bounds or zip(one.values, one.values, strict=True)), strict=True)
    return (sorted(lows)[inside - 1], sorted(highs)[-inside]) if inside else (-math.inf, math.inf)


def _outcome(one: Evidence, asked: PairedDifferences, real: bool) -> EvidenceOutcome:
    if one.pairs < FEWEST_PAIRS:
        return "too few seeds"
    if not real:
        return "undecided"
    # Ranks leave ties out, so they may decide although the median is zero: their own sum has the direction.
    above = (sum(_signed_ranks(asked.values)) if one.ranked else one.estimate) > 0
    if asked.higher_is_better is None:
        return "higher" if above else "lower"
    return "better" if above == asked.higher_is_better else "worse"


def _without_spread(values: Sequence[float]) -> bool:
    return statistics.stdev(values) <= _SAME * max(map(abs, values))


def _permuted(values: Sequence[float]) -> float:
    """The share of all sign patterns whose sum is as far from zero as this one.

    ``scipy.stats.permutation_test`` counts the same and takes half a second for 16 values.
    """
    import numpy as np

    found = np.asarray(values, dtype=np.float64)
    totals = abs(_signs(len(found)) @ found)
    slack = 1e-12 * abs(found).sum()  # sums of the same numbers with other signs round differently
    return float((totals >= totals[0] - slack).mean())


@cache
def _signs(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All patterns of signs that begin with +1, the one without a minus first: a pattern and its mirror image give
    sums equally far from zero, so half of them are enough."""
    import numpy as np

    rest = list(product((1.0, -1.0), repeat=count - 1))
    return np.concatenate([np.ones((len(rest), 1)), np.array(rest).reshape(len(rest), count - 1)], axis=1)


def _student_p(t: float, freedom: int) -> float:
    from scipy import stats

    return float(2 * stats.t.sf(abs(t), freedom))
