"""What our own runs say about methods: differences to FedAvg in the published experiments that were run here.

``results.json`` beside this file is made from ``docs/results`` by ``python -m scripts.knowledge``, and a test compares
the two. Every fact belongs to a federation (a data set), so that advice can be tested on one of which it knows nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedalloy.core import registry
from fedalloy.core.errors import SpecError, nearest
from fedalloy.results.evidence import PairedDifferences, compare_together
from fedalloy.studies.reproduce.declaring import PaperExperiment, declared_recipe, load_experiment, target_of
from fedalloy.studies.reproduce.pairing import by_table, differences, observed
from fedalloy.studies.reproduce.results import Results, is_rounds, read_results
from fedalloy.tasks.metrics.direction import higher_is_better

FILE = Path(__file__).with_name("results.json")
REFERENCE = "fedavg"
_MAIN = ("rounds", "mean", "weighted_mean", "global")
_WORST = ("worst10", "worst20", "worst")
_DIGITS = 4
_SAME_DATA = {"duw_mnist": "mnist", "s0-mnist": "mnist", "femnist_aj": "femnist"}
"""Other names of a federation's data: of a data set, or of an experiment whose cases another program runs."""


@dataclass(frozen=True)
class Fact:
    """A method against FedAvg in one case of a published experiment: the difference (percentage points, or rounds), its
    interval and what is decided, simultaneous over the methods of the case. ``low`` and ``high`` are None where there
    is no finite interval. ``part`` is the share of the published rounds that were run."""

    federation: str
    experiment: str
    case: str
    method: str
    score: str
    difference: float | None
    low: float | None
    high: float | None
    outcome: str
    seeds: int
    rounds: int
    part: float = 1.0

    def text(self) -> str:
        """The fact in a few words.

        >>> Fact("heart", "s4-ch3-silo", "heart", "afl", "mean", 1.5, 0.5, 2.5, "better", 10, 200).text()
        'heart: better, mean +1.5 [+0.5, +2.5] (10 seeds, 200 rounds)'
        """
        known = None not in (self.difference, self.low, self.high)
        size = f", {self.score} {self.difference:+.3g} [{self.low:+.3g}, {self.high:+.3g}]" if known else ""
        short = f" of {round(self.rounds / self.part)}" if self.part < 1 else ""
        name = self.federation if self.case == self.federation else f"{self.federation} ({self.case})"
        return f"{name}: {self.outcome}{size} ({self.seeds} seeds, {self.rounds}{short} rounds)"


def known_facts(without: Sequence[str] = ()) -> list[Fact]:
    """The facts that come with fedalloy, but those of some federations."""
    found = [Fact(**one) for one in json.loads(FILE.read_text(encoding="utf-8"))]
    names = sorted({one.federation for one in found})
    for name in without:
        if name not in names:
            raise SpecError(f"without: nothing is known about '{name}': {nearest(name, names)}")
    return [one for one in found if one.federation not in without]


def gathered(folder: Path) -> list[Fact]:
    """The facts in the results of experiments, in the order of their files."""
    return [
        fact
        for file in sorted(folder.glob("*.json"))
        for results in [read_results(file)]
        for case in results.cases()
        for fact in _facts(results, load_experiment(results.experiment), case)
    ]


def text_of(facts: Sequence[Fact]) -> str:
    """The text of the file: one line per fact."""
    lines = ",\n ".join(json.dumps(asdict(one), allow_nan=False) for one in facts)
    return f"[\n {lines}\n]\n"


def _facts(results: Results, experiment: PaperExperiment, case: str) -> Iterator[Fact]:
    methods = [one for one in results.methods(case) if one in registry.names("algorithm") and one != REFERENCE]
    if REFERENCE not in results.methods(case):
        return
    for names in (_MAIN, _WORST):
        score = next((one for one in names if any(one in run.scores for run in results.of(case, REFERENCE))), None)
        if score is not None:
            yield from _compared(results, experiment, case, methods, score)


def _compared(
    results: Results, experiment: PaperExperiment, case: str, methods: Sequence[str], score: str
) -> Iterator[Fact]:
    """One family: the methods of a case against FedAvg in one score."""
    higher = not is_rounds(score) and bool(higher_is_better(target_of(experiment, case)))
    first = observed(results.of(case, REFERENCE), score, higher)
    reused = max((run.reused for run in results.of(case, REFERENCE)), default=0.0)
    asked = {}
    for name in methods:
        values = by_table(differences(observed(results.of(case, name), score, higher), first))
        asked[name] = PairedDifferences(tuple(values), higher, reused, ranked=not all(map(math.isfinite, values)))
    found = zip(asked, compare_together(list(asked.values())), strict=True)
    federation, run = _federation(experiment, case), results.of(case, REFERENCE)[0]
    stated = experiment.protocol.of(case).rounds
    part = min(1.0, (run.planned or 0) / stated) if isinstance(stated, int) else 1.0
    for name, one in found:
        estimate, low, high = (_number(value) for value in (one.estimate, one.low, one.high))
        outcome, share = one.outcome if one.pairs else "too few seeds", round(part, _DIGITS)
        yield Fact(federation, results.experiment, case, name, score, estimate, low, high, outcome, one.pairs,
                   run.planned or 0, share)  # fmt: skip


def _federation(experiment: PaperExperiment, case: str) -> str:
    """The data set of a case."""
    if not experiment.cases:
        return _SAME_DATA[experiment.name]
    found = declared_recipe(experiment, case).task.dataset
    kind = str(found["kind"] if isinstance(found, dict) else found)
    return _SAME_DATA.get(kind, kind)


def _number(value: float) -> float | None:
    return round(value, _DIGITS) if math.isfinite(value) else None
