"""The evidence of every algorithm's difference to the first, over all looks at a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedalloy.results.evidence import Evidence, PairedDifferences, compare_together
from fedalloy.results.looks import Look, alpha_of, looks_until
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.redrawn import redrawn
from fedalloy.results.rounds import Span, not_within, reached_in, rounds_apart
from fedalloy.results.runs import by_name


@dataclass(frozen=True)
class AgainstFirst:
    """The evidence about the mean of the target metric and about the rounds to the target; None without common seeds,
    for the rounds without a target, and for the mean where runs end as soon as they reach the target."""

    mean: Evidence | None = None
    rounds: Evidence | None = None


def evidence_of(outcomes: Sequence[RunOutcome], recorded: Sequence[Look] = ()) -> dict[str, AgainstFirst]:
    """The evidence by name, for all but the first. What an earlier look decided stays decided; while runs are not
    finished nothing is, because that would be one more look."""
    if not outcomes:
        return {}
    *before, now = looks_until(outcomes, recorded)
    found = _at(outcomes, now, alpha_of(len(before) + 1))
    if not all(run.ended for run in outcomes):
        return {name: AgainstFirst(_open(one.mean), _open(one.rounds)) for name, one in found.items()}
    for number, look in enumerate(before, 1):
        earlier = _at(outcomes, look, alpha_of(number)) if look.is_part_of(now, outcomes) else {}
        for name, one in earlier.items():
            found[name] = AgainstFirst(_kept(found[name].mean, one.mean), _kept(found[name].rounds, one.rounds))
    return found


def values_by_seed(runs: Sequence[RunOutcome]) -> dict[int, float]:
    """The mean over clients of every finished run that has one."""
    return {run.seed: run.scores["mean"] for run in runs if run.finished and "mean" in run.scores}


def means_apart(runs: Sequence[RunOutcome], first: Sequence[RunOutcome], reused: float) -> PairedDifferences:
    """The differences of the means, paired by seed.

    A run that failed is worse than any that finished, for leaving it out would compare the lucky seeds; two that
    failed say nothing, and neither does a metric without a direction. No finished run at all gives no differences.
    """
    higher = runs[0].higher_is_better
    mine, theirs = _with_failed(runs, higher), _with_failed(first, higher)
    apart = (mine[seed] - theirs[seed] for seed in mine if seed in theirs)
    return PairedDifferences(tuple(value for value in apart if not math.isnan(value)), higher, reused)


def rounds_by_seed(runs: Sequence[RunOutcome]) -> dict[int, Span]:
    """What is known about the rounds to the target of every run; empty without a target or a finished run.

    A run that failed never reaches it.
    """
    if not any(run.finished for run in runs):
        return {}
    return {run.seed: _span(run) for run in runs if run.ended and run.target is not None}


def _span(run: RunOutcome) -> Span:
    if not run.finished:
        return math.inf, math.inf
    return not_within(run.round or run.rounds) if run.reached is None else reached_in(run.reached)


def _with_failed(runs: Sequence[RunOutcome], higher: bool | None) -> dict[int, float]:
    values = values_by_seed(runs)
    if higher is None or not values:
        return values
    worst = -math.inf if higher else math.inf
    return values | {run.seed: worst for run in runs if run.state == "failed"}


def _at(outcomes: Sequence[RunOutcome], look: Look, alpha: float) -> dict[str, AgainstFirst]:
    """The evidence of one look: all algorithms and both questions are one family."""
    groups = by_name(run for run in outcomes if look.holds(run))
    first = groups.pop(next(iter(groups)))
    shared = redrawn(run.drawn for run in first)
    asked = {
        (name, question): one
        for name, runs in groups.items()
        for question, one in _asked(runs, first, shared.reused if shared else 0.0).items()
        if one.values
    }
    found = dict(zip(asked, compare_together(list(asked.values()), alpha), strict=True))
    return {name: AgainstFirst(found.get((name, "mean")), found.get((name, "rounds"))) for name in groups}


def _asked(runs: Sequence[RunOutcome], first: Sequence[RunOutcome], reused: float) -> dict[str, PairedDifferences]:
    rounds = rounds_apart(rounds_by_seed(runs), rounds_by_seed(first), reused)
    if any(run.ends_at_target for run in (*runs, *first)):
        return {"rounds": rounds}  # scores of the round in which each run reached the target are all alike
    return {"mean": means_apart(runs, first, reused), "rounds": rounds}


def _open(one: Evidence | None) -> Evidence | None:
    return replace(one, outcome="not finished") if one else None


def _kept(now: Evidence | None, before: Evidence | None) -> Evidence | None:
    """The evidence of now, with the outcome of before where only that look decided."""
    if now is None or before is None or now.decided or not before.decided:
        return now
    return replace(now, outcome=before.outcome, decided_on=before.pairs)
