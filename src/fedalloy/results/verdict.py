"""Whether numbers decide something: by where an interval lies, and over several comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fedalloy.results.statistics import Interval

Verdict = Literal["holds", "does not hold", "not decidable", "not measured"]


def above_zero(found: Interval) -> Verdict:
    """Whether a mean is above zero.

    >>> above_zero(Interval(0.2, 0.1, 0.3, 5)), above_zero(Interval(0.2, -0.1, 0.5, 5))
    ('holds', 'not decidable')
    """
    return "holds" if found.low > 0 else "does not hold" if found.high < 0 else "not decidable"


def below_zero(found: Interval) -> Verdict:
    """Whether a mean is below zero."""
    return "holds" if found.high < 0 else "does not hold" if found.low > 0 else "not decidable"


def near(found: Interval, value: float, tolerance: float) -> Verdict:
    """Whether a mean is within a tolerance of a value."""
    if value - tolerance <= found.low and found.high <= value + tolerance:
        return "holds"
    apart = found.high < value - tolerance or found.low > value + tolerance
    return "does not hold" if apart else "not decidable"


def combined(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict over several comparisons.

    >>> combined(["holds", "holds"]), combined(["holds", "does not hold"]), combined(["holds", "not measured"])
    ('holds', 'does not hold', 'not decidable')
    """
    if "does not hold" in verdicts:
        return "does not hold"
    if all(verdict == "holds" for verdict in verdicts):
        return "holds"
    return "not measured" if all(verdict == "not measured" for verdict in verdicts) else "not decidable"
