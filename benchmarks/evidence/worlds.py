"""Made-up comparisons whose truth is known, from normal draws and from runs that were recorded.

A recorded case (docs/results) gives the differences of its methods to its first method, seed by seed. They are centred,
so that the truth is zero, and divided by their deviation. ``recorded`` draws every seed from another case; ``case``
draws all seeds of a comparison from one, so that its own shape counts, and smooths: ten values drawn with replacement
repeat, and Student's t on such draws errs more than it should even if the ten are normal (``ten normal``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedalloy.results.outcome import RunOutcome
from fedalloy.results.redrawn import Drawn

Array = np.ndarray[Any, np.dtype[np.float64]]
Source = Callable[[np.random.Generator, int, int], Array]
"""Draws differences of deviation one and mean zero: (generator, methods, seeds) -> methods x seeds."""

RECORDS = Path(__file__).parents[2] / "docs" / "results"
FEWEST_RECORDED = 10
"""Cases with fewer seeds say little about the shape of their differences."""
TYPICAL, APART = 24.0, 8.0
"""Rounds to the target: the mean, and the deviation of a difference between two methods."""


@dataclass(frozen=True)
class World:
    """Methods that truly differ from the first by ``truths`` (in deviations of a difference), and the seeds of a look.

    With ``horizon`` there is a target, which runs need about 24 rounds to reach, and training ends at the horizon:
    runs that would have reached it later are recorded as never having done so. ``looks`` is how often the user looks,
    each time with more seeds unless there was a verdict. With ``shared`` every seed splits the same examples again,
    that many for testing per one for training, and differences are correlated as Nadeau and Bengio (2003) assume.
    """

    name: str
    source: str
    seeds: int
    truths: tuple[float, ...] = (0.0,)
    horizon: int | None = None
    looks: int = 1
    shared: float = 0.0

    @property
    def rounds_truths(self) -> tuple[float, ...]:
        """The true differences in rounds; a method that is better needs fewer."""
        return tuple(-round(truth * APART) for truth in self.truths) if self.horizon else ()

    def draw(self, rng: np.random.Generator, seeds: int) -> list[RunOutcome]:
        """The runs of all methods with these seeds."""
        base, apart = rng.normal(size=seeds), SOURCES[self.source](rng, len(self.truths), seeds)
        if self.shared:
            apart = apart + np.sqrt(self.shared) * rng.normal(size=(len(self.truths), 1))
        scores = np.vstack([base, base + apart + np.array(self.truths)[:, None]])
        rounds = self._rounds(rng, seeds) if self.horizon else None
        return [self._run(method, seed, scores, rounds) for method in range(len(scores)) for seed in range(seeds)]

    def _rounds(self, rng: np.random.Generator, seeds: int) -> Array:
        """Two methods that need equally many rounds can be exchanged: neither ends later, or varies more."""
        apart = APART * rng.choice((-1.0, 1.0), size=seeds) * SOURCES[self.source](rng, len(self.truths), seeds)
        base = TYPICAL + APART * rng.normal(size=seeds) - apart[0] / 2
        return np.vstack([np.rint(base), np.rint(base + apart) + np.array(self.rounds_truths)[:, None]])

    def _run(self, method: int, seed: int, scores: Array, rounds: Array | None) -> RunOutcome:
        name, mean = f"method {method}", {"mean": float(scores[method, seed])}
        drawn = Drawn(seed, "", "same examples", f"split {seed}", self.shared, ()) if self.shared else None
        if rounds is None or self.horizon is None:
            return RunOutcome(name, seed, "finished", rounds=1, scores=mean, drawn=drawn)
        needed = max(1, int(rounds[method, seed]))
        reached = needed if needed <= self.horizon else None
        return RunOutcome(name, seed, "finished", rounds=self.horizon, scores=mean, target=0.8, reached=reached)


def normal(rng: np.random.Generator, methods: int, seeds: int) -> Array:
    """Normal differences; those of several methods share the runs of the first, and are correlated by a half."""
    own, common = rng.normal(size=(methods, seeds)), rng.normal(size=seeds)
    return np.asarray((own + common) / np.sqrt(2))


def recorded(rng: np.random.Generator, methods: int, seeds: int) -> Array:
    """Every seed from another recorded case."""
    return np.stack([_resampled(_some_case(rng, methods), rng, 1)[:, 0] for _ in range(seeds)], axis=1)


def case(rng: np.random.Generator, methods: int, seeds: int) -> Array:
    """All seeds from one recorded case, smoothed by a normal kernel with the case's own covariance."""
    some = _some_case(rng, methods)
    kernel = some @ rng.normal(size=(some.shape[1], seeds)) / np.sqrt(some.shape[1])
    width = some.shape[1] ** -0.2  # Silverman's rule for differences of deviation one
    return np.asarray((_resampled(some, rng, seeds) + width * kernel) / np.sqrt(1 + width**2))


def ten_recorded(rng: np.random.Generator, methods: int, seeds: int) -> Array:
    """All seeds from one recorded case, as they are."""
    return _resampled(_some_case(rng, methods), rng, seeds)


def ten_normal(rng: np.random.Generator, methods: int, seeds: int) -> Array:
    """All seeds from ten normal ones, as they are: what drawing from ten values does by itself."""
    some = normal(rng, methods, FEWEST_RECORDED)
    return _resampled(some - some.mean(axis=1, keepdims=True), rng, seeds)


def _resampled(some: Array, rng: np.random.Generator, seeds: int) -> Array:
    return np.asarray(some[:, rng.integers(some.shape[1], size=seeds)])


def _some_case(rng: np.random.Generator, methods: int) -> Array:
    cases = [one for one in recorded_cases() if len(one) >= methods]
    some = cases[rng.integers(len(cases))]
    return np.asarray(some[rng.permutation(len(some))[:methods]])


SOURCES: dict[str, Source] = {
    "normal": normal, "recorded": recorded, "case": case, "ten recorded": ten_recorded, "ten normal": ten_normal,
}  # fmt: skip


@cache
def recorded_cases() -> list[Array]:
    """The centred differences of all cases with ten seeds: an array of methods x seeds for each case and score."""
    found = [_differences(runs, score) for runs in _cases() for score in sorted(_scores(runs))]
    return [some for some in found if len(some)]


def _cases() -> Iterable[list[dict[str, Any]]]:
    for file in sorted(RECORDS.glob("*.json")):
        cases: dict[str, list[dict[str, Any]]] = {}
        for run in json.loads(file.read_text(encoding="utf-8"))["runs"]:
            if run["state"] == "finished":
                cases.setdefault(run["case"], []).append(run)
        yield from cases.values()


def _scores(runs: Sequence[dict[str, Any]]) -> set[str]:
    return set.intersection(*(set(run["scores"]) for run in runs))


def _differences(runs: Sequence[dict[str, Any]], score: str) -> Array:
    """All methods against the first; those whose differences do not vary say nothing about their spread."""
    table: dict[str, dict[int, float]] = {}
    for run in runs:
        if run["scores"][score] is not None:
            table.setdefault(run["method"], {})[run["seed"]] = float(run["scores"][score])
    seeds = sorted(set.intersection(*map(set, table.values()))) if table else []
    if len(seeds) < FEWEST_RECORDED:
        return np.empty((0, 0))
    values = np.array([[some[seed] for seed in seeds] for some in table.values()])
    apart = values[1:] - values[0]
    apart = apart - apart.mean(axis=1, keepdims=True)
    spread = apart.std(axis=1, keepdims=True)
    return np.asarray((apart / np.where(spread > 0, spread, 1))[spread[:, 0] > 0])
