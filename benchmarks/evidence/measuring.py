"""What the package says about made-up comparisons, against what is true of them.

Every repetition goes the way of ``fedalloy compare``: outcomes of runs, the looks at them (kept in memory, not in a
folder), evidence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from benchmarks.evidence.worlds import World
from fedalloy.results.against_first import AgainstFirst, evidence_of
from fedalloy.results.evidence import Evidence, seeds_to_decide
from fedalloy.results.looks import Look, alpha_of, looks_until

MOST_FALSE = 0.065
SINGLE = (0.93, 0.97)
FEWEST_TOGETHER = 0.94
MOST_MORE = 20
"""More seeds than this are not added by a user who looks again."""


@dataclass(frozen=True)
class Figures:
    """Shares of repetitions: with a false verdict, whose intervals of the first look all cover the truth, and with a
    right verdict about some method that differs."""

    false: float
    covered: float
    right: float


def measure(world: World, repetitions: int, seed: int = 0) -> Figures:
    """The shares over that many comparisons."""
    found = np.array([_one(world, np.random.default_rng([seed, number])) for number in range(repetitions)])
    return Figures(*found.mean(axis=0).tolist())


def wrong(world: World, found: Figures, repetitions: int | None = None) -> list[str]:
    """Which bounds are missed; with few ``repetitions``, by more than two standard errors."""

    def slack(bound: float) -> float:
        return 2 * math.sqrt(bound * (1 - bound) / repetitions) if repetitions else 0.0

    too_many = found.false > MOST_FALSE + slack(MOST_FALSE)
    said = [f"{found.false:.1%} false verdicts, at most {MOST_FALSE:.1%}"] if too_many else []
    low, high = SINGLE if is_single(world) else (FEWEST_TOGETHER, 1.0)
    if not low - slack(low) <= found.covered <= high + slack(high):
        said.append(f"{found.covered:.1%} covered, {low:.0%} to {high:.0%}")
    return said


def is_single(world: World) -> bool:
    """Whether there is one interval to show."""
    return len(world.truths) == 1 and world.horizon is None


def _one(world: World, rng: np.random.Generator) -> tuple[bool, bool, bool]:
    looks = [_judged(world, found) for found in _looked_at(world, rng)]
    ways = [way for look in looks for *_, way in look]
    covered = all(one.low <= truth <= one.high for one, truth, _ in looks[0])
    return "false" in ways, covered, "right" in ways


def _looked_at(world: World, rng: np.random.Generator) -> Iterator[dict[str, AgainstFirst]]:
    """The evidence at every look; the user adds as many seeds as the last one asks for, unless all is decided."""
    seeds, runs = world.seeds, world.draw(rng, world.seeds + MOST_MORE * (world.looks - 1))
    recorded: list[Look] = []
    for number in range(1, world.looks + 1):
        seen = [run for run in runs if run.seed < seeds]
        recorded = looks_until(seen, recorded)
        found = evidence_of(seen, recorded)
        yield found
        more = [seeds_to_decide(one, alpha_of(number + 1)) for one in _all(found) if not one.decided]
        if not more:
            return
        seeds += max(1, min(MOST_MORE if count is None else count for count in [*more, MOST_MORE]))


def _judged(world: World, found: dict[str, AgainstFirst]) -> list[tuple[Evidence, float, str]]:
    """Every evidence with its truth, and whether it is a false or a right verdict, or none."""
    means = [(one.mean, truth, truth) for one, truth in zip(found.values(), world.truths, strict=True)]
    fewer = [(one.rounds, truth, -truth) for one, truth in zip(found.values(), world.rounds_truths, strict=False)]
    return [(one, truth, _way(one, gain)) for one, truth, gain in (*means, *fewer) if one is not None]


def _way(one: Evidence, gain: float) -> str:
    if not one.decided:
        return ""
    return "right" if gain and one.outcome == ("better" if gain > 0 else "worse") else "false"


def _all(found: dict[str, AgainstFirst]) -> list[Evidence]:
    return [one for both in found.values() for one in (both.mean, both.rounds) if one is not None]
