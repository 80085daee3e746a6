"""Is the difference real? One standard for every table, report and verdict.

Runs are paired by seed. Student's t over the paired differences decides at 95 %, from three pairs on. Where several
differences are shown together, verdicts follow Holm and the intervals are Bonferroni's, so that all of them cover at
once in 95 of 100 comparisons. From six pairs on an exact permutation test of the same differences stands beside t.
Where seeds redraw the split of one small data set, runs share examples and their spread is too small: the correction
of Nadeau and Bengio (2003) widens it. Rounds to a target that some runs never reach are compared by ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal

import numpy as np

ALPHA = 0.05
FEWEST_PAIRS = 3
"""Fewer paired differences decide nothing."""
FEWEST_EXACT = 6
"""With fewer pairs than this an exact test cannot reach 5 %, whatever the differences are."""
MOST_EXACT = 16
"""With more pairs the exact test has too many sign patterns to count; t is accurate there."""

Outcome = Literal["better", "worse", "undecided", "too few seeds"]


@dataclass(frozen=True)
class Evidence:
    """What paired differences say about their mean; positive is better.

    ``low`` and ``high`` are the simultaneous interval over the ``family`` of differences shown together. ``p`` is
    Student's, ``exact`` the permutation test's (None where it cannot reach 5 %, or would take too long).
    """

    mean: float
    low: float
    high: float
    pairs: int
    p: float
    exact: float | None
    outcome: Outcome
    family: int = 1

    @property
    def holm_alone(self) -> bool:
        """Whether Holm decides although the simultaneous interval covers zero, which a table has to explain."""
        return self.outcome in ("better", "worse") and self.low <= 0 <= self.high


def compare_together(families: Sequence[Sequence[float]], reused: float = 0.0) -> list[Evidence]:
    """The evidence of several lists of paired differences that are shown together.

    ``reused`` is the ratio of test to training examples where every seed splits the same data, else 0.

    >>> [one.outcome for one in compare_together([[1.0, 1.1, 0.9, 1.0], [0.5, -0.4, 0.1, -0.2], [1.0]])]
    ['better', 'undecided', 'too few seeds']
    """
    size = max(1, sum(len(one) >= FEWEST_PAIRS for one in families))
    found = [_evidence(one, size, reused) for one in families]
    decided = holm([one.p if one.pairs >= FEWEST_PAIRS else math.nan for one in found])
    return [replace(one, outcome=_outcome(one, real)) for one, real in zip(found, decided, strict=True)]


def holm(values: Sequence[float], alpha: float = ALPHA) -> list[bool]:
    """Which of several p-values are significant together, by Holm's step-down method; NaN are not part of it.

    >>> holm([0.01, 0.04, 0.03]), holm([0.01, 0.02, math.nan])
    ([True, False, False], [True, True, False])
    """
    order = sorted((place for place, p in enumerate(values) if not math.isnan(p)), key=lambda place: values[place])
    found = [False] * len(values)
    for rank, place in enumerate(order):
        if values[place] > alpha / (len(order) - rank):
            break
        found[place] = True
    return found


def permutation_test(differences: Sequence[float]) -> float | None:
    """The two-sided exact p of a mean under random signs; None where it could not be significant or takes too long.

    >>> permutation_test([1.0, 2.0, 1.5, 0.5, 1.0, 2.5]), permutation_test([1.0, 2.0, 3.0])
    (0.03125, None)
    """
    if not FEWEST_EXACT <= len(differences) <= MOST_EXACT:
        return None
    values = np.asarray(differences, dtype=np.float64)
    totals = abs(_signs(len(values)) @ values)
    slack = 1e-12 * abs(values).sum()  # sums of the same numbers with other signs round differently
    return float((totals >= totals[0] - slack).mean())


@cache
def _signs(count: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """All patterns of signs that begin with +1, the one without a minus first: a pattern and its mirror image give
    sums equally far from zero, so half of them are enough."""
    rest = list(product((1.0, -1.0), repeat=count - 1))
    return np.concatenate([np.ones((len(rest), 1)), np.array(rest)], axis=1)


def rank_test(mine: Sequence[float | None], theirs: Sequence[float | None]) -> float:
    """The two-sided exact sign-rank p of rounds to a target, paired; None is a run that never reached it.

    A run that reached the target beats one that did not, by more than any two that did differ; two that did not are
    tied.

    >>> rank_test([3, 4, 2, 5, 3, 4], [None, 9, 8, None, 7, 9])
    0.03125
    """
    from scipy import stats

    gaps = [_gap(one, other) for one, other in zip(mine, theirs, strict=True)]
    ranks = stats.rankdata([abs(gap) for gap in gaps if gap])
    signed = [rank * math.copysign(1.0, gap) for rank, gap in zip(ranks, filter(None, gaps), strict=True)]
    if not signed:
        return 1.0
    if len(signed) > MOST_EXACT:
        return float(stats.wilcoxon(signed).pvalue)
    seen = abs(math.fsum(signed)) * (1 - 1e-12)
    totals = [
        abs(sum(rank * sign for rank, sign in zip(ranks, signs, strict=True))) >= seen
        for signs in product((1, -1), repeat=len(ranks))
    ]
    return float(sum(totals) / len(totals))


def seeds_to_decide(differences: Sequence[float], most: int = 1000) -> int | None:
    """How many more seeds would make a mean and spread like these significant; 0 where they are, None beyond ``most``.

    >>> seeds_to_decide([1.0, 1.1, 0.9]), seeds_to_decide([1.0, -0.6, 0.8, -0.2])
    (0, 36)
    """
    count = len(differences)
    if count < 2:
        return None
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    for wanted in range(max(count, FEWEST_PAIRS), most + 1):
        if deviation == 0 or abs(mean) > _student(wanted - 1, ALPHA) * deviation / math.sqrt(wanted):
            return wanted - count
    return None


def _evidence(differences: Sequence[float], size: int, reused: float) -> Evidence:
    count = len(differences)
    mean = statistics.fmean(differences) if differences else math.nan
    if count < 2:
        return Evidence(mean, -math.inf, math.inf, count, math.nan, None, "too few seeds", size)
    error = statistics.stdev(differences) * math.sqrt(1 / count + reused)
    half = _student(count - 1, ALPHA / size) * error
    return Evidence(
        mean,
        mean - half,
        mean + half,
        count,
        _p(mean, error, count - 1),
        permutation_test(differences),
        "undecided",
        size,
    )


def _outcome(one: Evidence, real: bool) -> Outcome:
    if one.pairs < FEWEST_PAIRS:
        return "too few seeds"
    return "undecided" if not real else "better" if one.mean > 0 else "worse"


def _gap(mine: float | None, theirs: float | None) -> float:
    if mine is None or theirs is None:
        return math.inf * ((mine is None) - (theirs is None)) if (mine is None) != (theirs is None) else 0.0
    return mine - theirs


def _student(freedom: int, alpha: float) -> float:
    from scipy import stats

    return float(stats.t.ppf(1 - alpha / 2, freedom))


def _p(mean: float, error: float, freedom: int) -> float:
    from scipy import stats

    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return float(2 * stats.t.sf(abs(mean) / error, freedom))
