"""How much a setting matters: the share of the variation of scores that it explains by itself, and the best score in
every third of its range."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from fedalloy.core.search import Choice, Range
from fedalloy.studies.compare.tuned import Settings, Tried

FEWEST = 6
"""With fewer scores a parabola fits nearly everything."""
_THIRDS = ("low", "middle", "high")
Thirds = dict[str, tuple[float | None, int]]


def importance(tried: Sequence[Tried], space: Mapping[str, Range | Choice]) -> dict[str, float]:
    """By setting: the adjusted share of the variance of the scores that a parabola in the setting explains (of a
    choice, the means of its values); from 0, nothing, to 1, everything. Empty with fewer than six scores.

    Trials are compared after the rounds that all of them ran: where some were stopped early, at the first comparison.

    >>> rows = [Tried({"a": a, "b": b}, -(a - 2.0) ** 2) for a in range(5) for b in range(3)]
    >>> importance(rows, {"a": Range(0, 4), "b": Range(0, 2)})
    {'a': 1.0, 'b': 0.0}
    """
    known = _known(tried)
    if len(known) < FEWEST:
        return {}
    values = [score for _, score in known]
    return {path: _share([one[path] for one, _ in known], values, where) for path, where in space.items()}


def thirds(tried: Sequence[Tried], path: str, where: Range, higher: bool) -> Thirds:
    """The best score in every third of a range (on its scale), and the number of trials there; the scores are those
    of :func:`importance`.

    >>> thirds([Tried({"a": 1.0}, 0.5), Tried({"a": 9.0}, None)], "a", Range(0.0, 9.0), higher=True)
    {'low': (0.5, 1), 'middle': (None, 0), 'high': (None, 1)}
    """
    told: Thirds = {}
    for place, name in enumerate(_THIRDS):
        trials = sum(_third(one.settings[path], where) == place for one in tried)
        scores = [score for settings, score in _known(tried) if _third(settings[path], where) == place]
        told[name] = ((max if higher else min)(scores) if scores else None, trials)
    return told


def _known(tried: Sequence[Tried]) -> list[tuple[Settings, float]]:
    """The settings with their finite scores, all after the same number of rounds."""
    early = any(one.early is not None for one in tried)
    scores = [(one.settings, one.early if early else one.score) for one in tried]
    return [(settings, score) for settings, score in scores if score is not None and math.isfinite(score)]


def _third(value: float, where: Range) -> int:
    low, high, at = (math.log(one) if where.log else one for one in (where.low, where.high, value))
    return min(int(3 * (at - low) / (high - low)), 2)


def _share(settings: Sequence[Any], scores: Sequence[float], where: Range | Choice) -> float:
    import numpy as np

    y = np.asarray(scores, dtype=np.float64)
    columns = _groups(settings) if isinstance(where, Choice) else _powers(settings, where)
    x = np.column_stack([np.ones(len(y)), *columns])
    rank, total = int(np.linalg.matrix_rank(x)), float(((y - y.mean()) ** 2).sum())
    if rank < 2 or rank >= len(y) or not total:  # nothing varies, or as many parameters as scores
        return 0.0
    rest = y - x @ np.linalg.lstsq(x, y, rcond=None)[0]
    unexplained = float((rest**2).sum()) / total * (len(y) - 1) / (len(y) - rank)
    return round(min(max(0.0, 1 - unexplained), 1.0), 6)


def _powers(settings: Sequence[Any], where: Range) -> list[list[float]]:
    """A setting on its scale, from -1 to 1, and its square."""
    low, high = (math.log(end) if where.log else end for end in (where.low, where.high))
    placed = [2 * ((math.log(one) if where.log else one) - low) / (high - low) - 1 for one in settings]
    return [placed, [one**2 for one in placed]]


def _groups(settings: Sequence[Any]) -> list[list[float]]:
    """A column for every value but the first."""
    marks: list[Hashable] = [repr(one) for one in settings]
    return [[float(mark == value) for mark in marks] for value in list(dict.fromkeys(marks))[1:]]
