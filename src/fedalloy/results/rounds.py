"""Rounds to a target, where some runs never reach it: what is known then is that they need more than they had."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedalloy.results.evidence import PairedDifferences

Span = tuple[float, float]
"""The fewest and the most rounds that a run can need; equal where they are known."""


def reached_in(rounds: float) -> Span:
    """A run that reached the target."""
    return rounds, rounds


def not_within(rounds: float) -> Span:
    """A run that did not reach the target within this many rounds, and might have in the next one or never.

    >>> not_within(40)
    (41, inf)
    """
    return rounds + 1, math.inf


def rounds_apart(mine: Mapping[int, Span], theirs: Mapping[int, Span], reused: float = 0.0) -> PairedDifferences:
    """The differences in rounds, paired by seed.

    A run that reached the target beats one that did not within as many rounds, by more than any two that did differ;
    where it is unknown which of two would have reached it first, they are tied. The bounds are what the runs show.

    >>> late = not_within(20)
    >>> rounds_apart({0: reached_in(3), 1: reached_in(4), 2: late}, {0: reached_in(9), 1: late, 2: late})
    PairedDifferences(values=(-6, -inf, 0.0), higher_is_better=False, reused=0.0, ranked=True, \
bounds=((-6, -6), (-inf, -17), (-inf, inf)))
    """
    pairs = [(span, theirs[seed]) for seed, span in mine.items() if seed in theirs]
    bounds = tuple(_between(*pair) for pair in pairs)
    censored = any(low < high or math.isinf(low) for low, high in bounds)
    return PairedDifferences(tuple(map(_scored, bounds)), False, reused, censored, bounds if censored else ())


def _between(mine: Span, theirs: Span) -> Span:
    low, high = mine[0] - theirs[1], mine[1] - theirs[0]
    return (-math.inf if math.isnan(low) else low, math.inf if math.isnan(high) else high)


def _scored(bounds: Span) -> float:
    low, high = bounds
    if low == high:
        return low
    return math.inf if low > 0 else -math.inf if high < 0 else 0.0
