"""The verdict on a claim, by one rule from the measurements alone.

Runs are paired by seed, because equal seeds share data, partition, initial model and cohorts. The mean of the paired
differences has a 95 % interval by Student's t over seeds. A claim *holds* when the whole interval lies on its side of
zero, it *does not hold* when the whole interval lies on the other side, and otherwise it is *not decidable* with these
runs. Compared with several methods it holds when it holds against each, and does not when it does not against
one. A method whose runs all failed loses against one that finished. ``near``: the interval of the mean lies inside, or
wholly outside, value ± tolerance. ``fails``: all runs, or none, ended as failed or, where there is a value, with a
score that is worse: below it, or above it where less is better (a loss, a variance, rounds to a target). Fewer than
two pairs decide nothing, and neither does a quick run. Every claim is read by itself: nothing is corrected for their
number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fedalloy.results.statistics import (
    Interval,
    Verdict,
    above_zero,
    below_zero,
    combined,
    near,
    paired,
    without_missing,
)
from fedalloy.studies.reproduce.declaring import Claim, PaperExperiment, target_of
from fedalloy.studies.reproduce.results import Measured, Results
from fedalloy.tasks.metrics.direction import better, higher_is_better

_SMALL = re.compile(r"variance|gini|gap\d*|rounds|objective|logged_objective|cumulative_loss|regret(_half)?")


@dataclass(frozen=True)
class Judgement:
    """A claim in one case: the verdict and what it rests on."""

    claim: Claim
    case: str
    verdict: Verdict
    measured: str


def judge(experiment: PaperExperiment, results: Results) -> list[Judgement]:
    """Every claim in each of its cases."""
    return [
        judge_one(claim, case, results, _target(experiment, case, claim))
        for claim in experiment.claims
        for case in claim.cases
    ]


def judge_one(claim: Claim, case: str, results: Results, target: str = "accuracy") -> Judgement:
    """One claim in one case; ``target`` is the metric of its scores, unless they name another."""
    mine = results.of(case, claim.method)
    if not mine:
        return Judgement(claim, case, "not measured", "")
    if claim.relation == "fails":
        verdict, measured = _failing(claim, mine, target)
    elif claim.others:
        verdict, measured = _against_all(claim, case, mine, results)
    else:
        verdict, measured = _against_itself(claim, mine)
    if results.quick and verdict in ("holds", "does not hold"):
        verdict = "not decidable"
    return Judgement(claim, case, verdict, measured)


def _against_all(claim: Claim, case: str, mine: Sequence[Measured], results: Results) -> tuple[Verdict, str]:
    verdicts, said = [], []
    for other in claim.others:
        verdict, text = _against(claim, mine, results.of(case, other))
        verdicts.append(verdict)
        said.append(f"{other} {text}")
    return combined(verdicts), "; ".join(said)


def _against(claim: Claim, mine: Sequence[Measured], theirs: Sequence[Measured]) -> tuple[Verdict, str]:
    if not theirs:
        return "not measured", "not measured"
    failed = _failed(mine), _failed(theirs)
    if any(failed):
        known: dict[tuple[bool, bool], tuple[Verdict, str]] = {
            (True, True): ("not decidable", "both failed"),
            (True, False): ("does not hold", f"{claim.method} failed"),
            (False, True): ("holds", "failed"),
        }
        return known[failed]
    return _sided(claim, Interval.of(differences(mine, theirs, claim.score, claim.score)))


def _against_itself(claim: Claim, mine: Sequence[Measured]) -> tuple[Verdict, str]:
    """Against a number, or against another score of the same runs."""
    if _failed(mine):
        return "does not hold", f"{claim.method} failed"
    if claim.than is not None:
        return _sided(claim, Interval.of(differences(mine, mine, claim.score, claim.than)))
    assert claim.value is not None
    found = Interval.of(values_of(mine, claim.score))
    if found is None:
        return "not measured", ""
    if claim.relation == "near":
        return near(found, claim.value, claim.tolerance or 0.0), found.text(signed=False)
    return _sided(claim, found.less(claim.value))[0], found.text(signed=False)


def _sided(claim: Claim, found: Interval | None) -> tuple[Verdict, str]:
    if found is None:
        return "not measured", "not measured"
    return (above_zero if claim.relation == "above" else below_zero)(found), found.text()


def _failing(claim: Claim, mine: Sequence[Measured], target: str) -> tuple[Verdict, str]:
    def worse(run: Measured) -> bool:
        if claim.value is None or claim.score not in run.scores:
            return False
        return better(claim.value, run.scores[claim.score], more_is_better(claim.score, target))

    failed = sum(run.state == "failed" or worse(run) for run in mine)
    verdict: Verdict = "holds" if failed == len(mine) else "does not hold" if failed == 0 else "not decidable"
    return verdict, f"{failed} of {len(mine)} runs failed"


def more_is_better(score: str, target: str) -> bool:
    """Whether more of a score is better: as for its metric, except that spreads, regrets and rounds should be small.

    >>> more_is_better("worst20", "accuracy"), more_is_better("gini", "accuracy"), more_is_better("loss:mean", "auroc")
    (True, False, False)
    """
    metric, colon, statistic = score.rpartition(":")
    if _SMALL.fullmatch(statistic):
        return False
    return higher_is_better(metric if colon else target) is not False


def _target(experiment: PaperExperiment, case: str, claim: Claim) -> str:
    """The metric of a case's scores; only claims of failing need its direction."""
    return target_of(experiment, case) if claim.relation == "fails" and claim.value is not None else "accuracy"


def _failed(runs: Sequence[Measured]) -> bool:
    return bool(runs) and all(run.state == "failed" for run in runs)


def values_of(runs: Sequence[Measured], score: str) -> list[float]:
    """The values of the finished runs that have one."""
    return without_missing(value for _, value in _by_seed(runs, score))


def differences(mine: Sequence[Measured], theirs: Sequence[Measured], score: str, than: str) -> list[float]:
    """Mine minus theirs for every seed that both finished."""
    return paired(_by_seed(mine, score), dict(_by_seed(theirs, than)))


def _by_seed(runs: Sequence[Measured], score: str) -> list[tuple[int, float]]:
    return [(run.seed, run.scores.get(score, math.nan)) for run in runs if run.finished]
