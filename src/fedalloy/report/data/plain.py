"""Numbers as JSON: few digits, finite values only, no more points than a screen can show."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from fedalloy.results.grid import Grid

Chart = dict[str, Any]
MOST_POINTS = 400
MOST_CELLS = 40_000


def digits(value: float | None, count: int = 5) -> float | None:
    """A number with few significant digits; None where it is not finite.

    >>> digits(0.123456789), digits(float("nan")), digits(3.0)
    (0.12346, None, 3)
    """
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{count}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def many(values: Iterable[float | None], count: int = 5) -> list[float | None]:
    """``digits`` of every value."""
    return [digits(value, count) for value in values]


def pick(count: int, most: int = MOST_POINTS) -> list[int]:
    """Positions of at most ``most`` of ``count`` points: evenly spaced, with the first and the last.

    >>> pick(3), pick(101, 3)
    ([0, 1, 2], [0, 50, 100])
    """
    if count <= most:
        return list(range(count))
    return sorted({round(step * (count - 1) / (most - 1)) for step in range(most)})


def heat_panel(title: str, grid: Grid, rounds: int, clients: int) -> tuple[dict[str, Any], Grid]:
    """A grid as a panel of a heat map, one row per client and one column per round, and the grid after shrinking."""
    small = grid.shrink(rounds, clients)
    return {"title": title, "values": [many(row, 4) for row in small.means().T.tolist()]}, small


def spans(count: int, width: int, first: int = 0) -> list[str]:
    """Labels of bins: one number, or from-to.

    >>> spans(3, 1), spans(5, 2, first=1)
    (['0', '1', '2'], ['1-2', '3-4', '5'])
    """
    ends = [(begin, min(begin + width, count) - 1) for begin in range(0, count, width)]
    return [str(a + first) if a == b else f"{a + first}-{b + first}" for a, b in ends]
