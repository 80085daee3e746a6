"""The cost of an experiment: measured seconds per round and run, scaled to the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedalloy.experiment.recipe import Recipe
from fedalloy.studies.reproduce.declaring import Case
from fedalloy.studies.reproduce.measuring import count_runs

START = 1.0
"""Seconds to load the data and start a run."""


@dataclass(frozen=True)
class Cost:
    """Runs, rounds, and seconds on one core; ``unknown`` cases were never measured and are not in the seconds."""

    runs: int
    rounds: int
    seconds: float
    unknown: int

    @property
    def text(self) -> str:
        """The time as text.

        >>> Cost(10, 1000, 5400.0, 0).text, Cost(1, 10, 0.0, 1).text
        ('1.5 h', 'not measured')
        """
        if self.seconds == 0:
            return "not measured" if self.unknown else "0 s"
        more = f" and {self.unknown} unmeasured" if self.unknown else ""
        return _duration(self.seconds) + more


def estimate(cases: Sequence[tuple[Case, Recipe]]) -> Cost:
    """The cost of some cases on one core."""
    runs = rounds = unknown = 0
    seconds = 0.0
    for case, recipe in cases:
        count = count_runs(recipe)
        runs, rounds = runs + count, rounds + count * recipe.run.rounds
        if case.seconds_per_round is None:
            unknown += 1
        else:
            seconds += count * (START + recipe.run.rounds * case.seconds_per_round)
    return Cost(runs, rounds, seconds, unknown)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
