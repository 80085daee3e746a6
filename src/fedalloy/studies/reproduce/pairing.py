"""The two sides of a claim, paired by seed.

A run that failed, or that has no finite value where other runs of its method have one, counts as worse than every run
with a value, and a run that never reached its target as one with infinitely many rounds. Runs of several seeds that
used one learned table of weights are one observation: their mean.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from fedalloy.studies.reproduce.results import Measured, is_rounds

Observed = dict[int, tuple[str, float]]
"""Per seed the table that was used and the value; infinite for a run without one."""


def observed(runs: Sequence[Measured], score: str, higher_is_better: bool) -> Observed:
    """The value of every run, or the worst there is; empty where the score was never measured.

    >>> runs = [Measured("a", "m", 0, "finished", 5, {"mean": 3.0}), Measured("a", "m", 1, "failed", 2)]
    >>> observed(runs, "mean", True)
    {0: ('', 3.0), 1: ('', -inf)}
    """
    if any(run.finished for run in runs) and not any(_known(run, score) for run in runs):
        return {}
    worst = -math.inf if higher_is_better else math.inf
    ended = [run for run in runs if run.state in ("finished", "failed")]
    return {run.seed: (run.table, run.scores[score] if _known(run, score) else worst) for run in ended}


def score_for(runs: Sequence[Measured], score: str) -> str:
    """The score itself, or the mean where it is one of mixtures of two models and the method has only one model.

    >>> score_for([Measured("a", "fedper", 0, "finished", 5, {"mean": 3.0})], "mix_oracle")
    'mean'
    """
    metric, colon, statistic = score.rpartition(":")
    has_some = any(name.rpartition(":")[2].startswith("mix_") for run in runs for name in run.scores)
    return f"{metric}{colon}mean" if statistic.startswith("mix_") and not has_some else score


def differences(mine: Observed, theirs: Observed) -> list[tuple[str, float]]:
    """Mine minus theirs for every seed that both have, with the table that was used; two without a value are tied.

    >>> differences({0: ("", 3.0), 1: ("", 5.0), 2: ("", -math.inf)}, {1: ("", 4.0), 2: ("", -math.inf)})
    [('', 1.0), ('', 0.0)]
    """
    seeds = sorted(set(mine) & set(theirs))
    return [(mine[seed][0] or theirs[seed][0], _apart(mine[seed][1], theirs[seed][1])) for seed in seeds]


def by_table(found: Iterable[tuple[str, float]]) -> list[float]:
    """The values of different tables; those of one table are averaged, those without a table stay as they are.

    >>> by_table([("x", 1.0), ("x", 3.0), ("", 5.0), ("", 5.0)])
    [2.0, 5.0, 5.0]
    """
    groups: dict[tuple[str, int], list[float]] = {}
    for place, (table, value) in enumerate(found):
        groups.setdefault((table, 0 if table else place), []).append(value)
    return [_middle(values) for values in groups.values()]


def _known(run: Measured, score: str) -> bool:
    value = run.scores.get(score, math.nan)
    return run.finished and (math.isfinite(value) or (is_rounds(score) and value > 0))


def _apart(mine: float, theirs: float) -> float:
    return 0.0 if mine == theirs else mine - theirs


def _middle(values: Sequence[float]) -> float:
    if all(map(math.isfinite, values)):
        return statistics.fmean(values)
    middle = statistics.median(values)
    return 0.0 if math.isnan(middle) else middle
