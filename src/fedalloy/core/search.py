"""The values of a rule's arguments among which a search for good settings looks: a range and its scale.

A rule declares them where it is registered, and a recipe can replace them (``[tune.space]``):

    @register("solver", "prox", search={"mu": Range(1e-4, 1.0, log=True)})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedalloy.core.errors import SpecError

_DIGITS = 3


@dataclass(frozen=True)
class Range:
    """All numbers from ``low`` to ``high``, whole ones where both ends are; ``log``: every factor counts the same."""

    low: float
    high: float
    log: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise SpecError(f"a range goes from a low to a higher number, got {self.low} to {self.high}")
        if self.log and self.low <= 0:
            raise SpecError(f"a range with a logarithmic scale begins above 0, got {self.low}")

    @property
    def whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def value(self, number: float) -> float:
        """A number of the range as it is written into recipes: whole, or with three digits, inside the range.

        >>> Range(1e-3, 1.0, log=True).value(0.0316227766), Range(1, 9).value(4.0)
        (0.0316, 4)
        """
        if self.whole:
            return int(number)
        return min(max(float(f"{number:.{_DIGITS}g}"), self.low), self.high)

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high


@dataclass(frozen=True)
class Choice:
    """One of some values."""

    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if len(self.values) < 2:
            raise SpecError(f"a choice needs at least two values, got {list(self.values)}")


Space = Mapping[str, Range | Choice]


def read_space(path: str, given: Any) -> Range | Choice:
    """``{"low": 0.01, "high": 1.0, "log": True}`` as a range, a list as a choice.

    >>> read_space("algorithm.lr", {"low": 0.01, "high": 1.0, "log": True})
    Range(low=0.01, high=1.0, log=True)
    """
    try:
        if isinstance(given, list | tuple):
            return Choice(tuple(given))
        if isinstance(given, Mapping) and {"low", "high"} <= set(given) <= {"low", "high", "log"}:
            return Range(**given)
    except (SpecError, TypeError) as error:
        raise SpecError(f"tune.space.{path}: {error}") from None
    raise SpecError(
        f"tune.space.{path}: write {{ low = 0.01, high = 1.0, log = true }} or a list of values, got {given!r}"
    )
