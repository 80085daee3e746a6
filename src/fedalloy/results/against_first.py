"""The evidence of every algorithm's difference to the first, over all looks at a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fedalloy.results.evidence import Evidence, PairedDifferences, compare_together, rounds_apart
from fedalloy.results.looks import Look, alpha_of, looks_until
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.redrawn import redrawn
from fedalloy.results.runs import by_name
from fedalloy.results.statistics import paired


@dataclass(frozen=True)
class AgainstFirst:
    """The evidence about the mean of the target metric and about the rounds to the target; None without common seeds
    and, for the rounds, without a target."""

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
        earlier = _at(outcomes, look, alpha_of(number)) if look.is_part_of(now) else {}
        for name, one in earlier.items():
            found[name] = AgainstFirst(_kept(found[name].mean, one.mean), _kept(found[name].rounds, one.rounds))
    return found


def values_by_seed(runs: Sequence[RunOutcome]) -> dict[int, float]:
    """The mean over clients of every finished run that has one."""
    return {run.seed: run.scores["mean"] for run in runs if run.finished and "mean" in run.scores}


def rounds_by_seed(runs: Sequence[RunOutcome]) -> dict[int, float | None]:
    """The rounds to the target of every finished run, None where it was never reached; empty without a target."""
    return {run.seed: run.reached for run in runs if run.finished and run.target is not None}


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
    means = tuple(paired(values_by_seed(runs).items(), values_by_seed(first)))
    return {
        "mean": PairedDifferences(means, runs[0].higher_is_better, reused),
        "rounds": rounds_apart(rounds_by_seed(runs), rounds_by_seed(first), reused),
    }


def _open(one: Evidence | None) -> Evidence | None:
    return replace(one, outcome="not finished") if one else None


def _kept(now: Evidence | None, before: Evidence | None) -> Evidence | None:
    """The evidence of now, with the outcome of before where only that look decided."""
    if now is None or before is None or now.decided or not before.decided:
        return now
    return replace(now, outcome=before.outcome, decided_on=before.pairs)
