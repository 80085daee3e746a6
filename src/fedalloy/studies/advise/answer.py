"""The answer: which method to use, with the evidence from seeds and parts that nothing was chosen on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedalloy.experiment.records.reading import read_run
from fedalloy.experiment.records.scalars import seconds_of
from fedalloy.results.against_first import means_apart
from fedalloy.results.evidence import FEWEST_PAIRS, Evidence, compare_together, seeds_to_decide
from fedalloy.results.looks import Look, alpha_of, looks_until
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.redrawn import redrawn
from fedalloy.results.runs import by_name
from fedalloy.results.statistics import Spread, mean
from fedalloy.studies.advise.facts import REFERENCE
from fedalloy.studies.advise.shortlist import Aim

_SCORES: dict[Aim, str] = {"mean": "mean", "worst": "worst_served"}


@dataclass(frozen=True)
class RoundCost:
    """What a round of a method costs: bytes that a client sends and receives, and seconds of the simulation."""

    up: float
    down: float
    seconds: float

    def text(self, first: RoundCost | None = None) -> str:
        """In words, with the factor to that of FedAvg.

        >>> RoundCost(2000.0, 1000.0, 0.5).text(RoundCost(1000.0, 1000.0, 0.25))
        '2 kB up and 1 kB down per client, 0.5 s a round here (FedAvg: 1 kB, 1 kB, 0.25 s)'
        """
        said = f"{_bytes(self.up)} up and {_bytes(self.down)} down per client, {self.seconds:.2g} s a round here"
        if first is None:
            return said
        return f"{said} (FedAvg: {_bytes(first.up)}, {_bytes(first.down)}, {first.seconds:.2g} s)"


@dataclass(frozen=True)
class Effect:
    """A finalist against FedAvg: the evidence by score (``mean``, ``worst``), and its scores over the seeds."""

    name: str
    evidence: Mapping[Aim, Evidence]
    scores: Mapping[Aim, Spread | None]
    cost: RoundCost

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "name": self.name, "cost": asdict(self.cost),
            "evidence": {aim: vars(one) for aim, one in self.evidence.items()},
            "scores": {aim: asdict(one) if one else None for aim, one in self.scores.items()},
        }  # fmt: skip


def effects(outcomes: Sequence[RunOutcome], looks: Sequence[Look]) -> list[Effect]:
    """FedAvg and the finalists. The differences of all finalists in one score are one family."""
    groups = by_name(outcomes)
    first, alpha = groups[REFERENCE], alpha_of(len(looks_until(outcomes, looks)))
    others = {name: runs for name, runs in groups.items() if name != REFERENCE}
    found = {aim: _apart(others, first, aim, alpha) for aim in _SCORES}
    return [
        Effect(name, {aim: one[name] for aim, one in found.items() if name in one}, _spreads(runs), cost_of(runs))
        for name, runs in groups.items()
    ]


def _apart(
    others: Mapping[str, Sequence[RunOutcome]], first: Sequence[RunOutcome], aim: Aim, alpha: float
) -> dict[str, Evidence]:
    shared = redrawn(run.drawn for run in first)
    reused = shared.reused if shared else 0.0
    theirs = [_scored(run, aim) for run in first]
    asked = {name: means_apart([_scored(run, aim) for run in runs], theirs, reused) for name, runs in others.items()}
    return dict(zip(asked, compare_together(list(asked.values()), alpha), strict=True))


def _scored(run: RunOutcome, aim: Aim) -> RunOutcome:
    """The run with the score of this aim in place of the mean."""
    rest = {name: value for name, value in run.scores.items() if name != "mean"}
    known = {"mean": run.scores[_SCORES[aim]]} if _SCORES[aim] in run.scores else {}
    return replace(run, scores={**rest, **known})


def _spreads(runs: Sequence[RunOutcome]) -> dict[Aim, Spread | None]:
    done = [run for run in runs if run.finished]
    return {aim: Spread.of(run.scores.get(score, math.nan) for run in done) for aim, score in _SCORES.items()}


def cost_of(runs: Sequence[RunOutcome]) -> RoundCost:
    """Bytes are the mean over the rounds of all runs, seconds the median, because the first round of a run has its
    preparations too; evaluations are not counted."""
    records = [read_run(run.folder) for run in runs if run.folder is not None and run.finished]
    rows = [row for record in records for row in record.rounds() if row["ids"]]
    seconds = [seconds_of(row) - row.get("evaluate", 0.0) for record in records for row in record.timings()]
    return RoundCost(
        mean(row["bytes_up"] / len(row["ids"]) for row in rows),
        mean(row["bytes_down"] / len(row["ids"]) for row in rows),
        statistics.median(seconds) if seconds else math.nan,
    )


def chosen(found: Sequence[Effect], aim: Aim, higher: bool) -> Effect | None:
    """The method that beats FedAvg, the one with the largest difference if there are several; None if none does."""
    better = [one for one in found if one.name != REFERENCE and one.evidence[aim].outcome == "better"]
    sign = 1 if higher else -1
    return max(better, key=lambda one: sign * one.evidence[aim].estimate, default=None)


def first_line(found: Sequence[Effect], aim: Aim, metric: str, higher: bool) -> str:
    """Which method to use, or that nothing beats FedAvg, with the interval."""
    others = [one for one in found if one.name != REFERENCE]
    if not others:
        return "No other method could be tried: FedAvg it is."
    what = metric if aim == "mean" else f"{metric} of the worst-served 10 %"
    winner = chosen(found, aim, higher)
    if winner is not None:
        return f"Use {winner.name}: it beats FedAvg in {what} by {_measured(winner.evidence[aim], higher)}."
    sign = 1 if higher else -1
    nearest = max(others, key=lambda one: _key(one.evidence[aim], sign))
    if nearest.evidence[aim].pairs < FEWEST_PAIRS:
        return f"No verdict, stay with FedAvg: another method needs {FEWEST_PAIRS} seeds that it and FedAvg finished."
    measured = _measured(nearest.evidence[aim], higher)
    return f"Nothing beats FedAvg in {what} here: {nearest.name} comes closest, {measured}."


def _key(one: Evidence, sign: int) -> float:
    return -math.inf if math.isnan(one.estimate) else sign * one.estimate


def _measured(one: Evidence, higher: bool) -> str:
    level = f"{100 * (1 - one.alpha):.4g} % interval, {one.pairs} seeds{'' if higher else '; lower is better'}"
    note = f"; {one.reason} decides" if one.decided and one.reason else ""
    return f"{one.text()} ({level}{note})"


def further_lines(found: Sequence[Effect], aim: Aim, metric: str, higher: bool) -> list[str]:
    """The effect on the other score, what more seeds would decide, who else beats FedAvg, and the cost."""
    winner = chosen(found, aim, higher)
    first = next(one for one in found if one.name == REFERENCE)
    others = sorted((one for one in found if one.name != REFERENCE), key=lambda one: one is not winner)
    said = [_other(one, aim, metric) for one in others]
    for one in others:
        more = seeds_to_decide(one.evidence[aim]) if not one.evidence[aim].decided else None
        if more:
            said.append(f"About {counted(more, 'more seed')} would decide {one.name}, if they are like these.")
    told = winner or first
    return [*said, f"{told.name} costs {told.cost.text(first.cost if winner else None)}."]


def _other(one: Effect, aim: Aim, metric: str) -> str:
    """A finalist in the score that does not decide: the direction is that of the numbers."""
    other: Aim = "worst" if aim == "mean" else "mean"
    what = f"{metric} of the worst-served 10 %" if other == "worst" else f"mean {metric}"
    mine = f"{one.name} against FedAvg: {one.evidence[aim].text() or 'no values'} ({one.evidence[aim].word}); "
    return f"{mine}{what} {one.evidence[other].text() or 'no values'}."


def counted(number: int, what: str) -> str:
    """A number and its noun.

    >>> counted(1, "trial"), counted(2, "trial")
    ('1 trial', '2 trials')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def _bytes(count: float) -> str:
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return "unknown" if math.isnan(count) else f"{count:.3g} B"
