"""The verdict on a claim, by one rule from the measurements alone.

Runs are paired by seed, because equal seeds share data, partition, initial model and cohorts, and
:mod:`fedalloy.results.evidence` tests the differences. A claim *holds* when it holds against every method that the
paper compares with, each at 95 % and uncorrected: it needs all of them. It *does not hold* when one comparison is
decided the other way round after Holm's correction over the comparisons. Otherwise it is *undecided*. Runs that are
shorter than published, or changed in another way, are *preliminary* whatever they show
(:mod:`fedalloy.studies.reproduce.departures`), and without runs on both sides a claim is *not run*.

Any verdict needs three seeds, or three learned tables where a table is learned. Where runs failed or never reached the
target ranks decide, which needs six (:mod:`fedalloy.studies.reproduce.pairing`). Where every seed splits the same
examples again, intervals are widened as everywhere (:mod:`fedalloy.results.redrawn`).

``near``: two one-sided tests at 5 % show that the mean is within the margin; it does not hold when the 95 % interval
lies outside of it. ``bounded``: the score is at most the bound in every run. ``fails``: all runs, or none, ended as
failed or, where there is a value, with a score that is worse: below it, or above it where less is better (a loss, a
variance, rounds to a target).

Methods that only we compare with (``controls``) are judged in the same way, each by itself, and are no part of the
paper's verdict. The same holds for claims that stand ``beside`` one of the paper because they are measured in another
way. Every claim is read by itself: nothing is corrected for their number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fedalloy.results.evidence import (
    FEWEST_PAIRS,
    Evidence,
    PairedDifferences,
    compare_together,
    fewest_by_ranks,
)
from fedalloy.results.statistics import ALPHA, Interval
from fedalloy.studies.reproduce.declaring import Claim, PaperExperiment, target_of
from fedalloy.studies.reproduce.departures import departures, labels
from fedalloy.studies.reproduce.pairing import Observed, by_table, differences, observed, score_for
from fedalloy.studies.reproduce.results import Measured, Results, is_rounds
from fedalloy.tasks.metrics.direction import better, higher_is_better

Verdict = Literal["holds", "does not hold", "undecided", "preliminary", "not run"]
VERDICTS: tuple[Verdict, ...] = ("holds", "does not hold", "undecided", "preliminary", "not run")
_SMALL = re.compile(r"variance|gini|gap\d*|rounds|objective|logged_objective|cumulative_loss|regret(_half|_bound)?")
_OF_CONTROLS = {"holds": "ahead of our control", "does not hold": "behind our control"}
_BESIDE = {"holds": "ahead (not counted)", "does not hold": "behind (not counted)"}


@dataclass(frozen=True)
class Judgement:
    """A claim in one case: the verdict, what it rests on, and what readers of it have to know.

    ``control`` names the method where it is a comparison of ours; then it is no verdict on the paper.
    """

    claim: Claim
    case: str
    verdict: Verdict
    measured: str
    remarks: tuple[str, ...] = ()
    seeds: int = 0
    control: str = ""

    @property
    def words(self) -> str:
        """The verdict as a table shows it."""
        if self.control:
            return _OF_CONTROLS.get(self.verdict, f"{self.verdict} (our control)")
        return _BESIDE.get(self.verdict, f"{self.verdict} (not counted)") if self.claim.beside else self.verdict

    @property
    def ours(self) -> bool:
        """Whether it is a comparison of ours, which is not counted among the verdicts on the paper."""
        return bool(self.control) or self.claim.beside


@dataclass(frozen=True)
class ClaimSide:
    """One comparison of a claim: its paired differences, None where a side was not run, and what is said about it.

    ``shared`` are the differences by seed where several seeds share a learned table, so that they are not all of them
    observations; ``unpaired`` seeds were run on one side alone.
    """

    name: str
    differences: PairedDifferences | None
    seeds: int
    unpaired: int
    lost: str = ""
    shared: tuple[float, ...] = ()


def judge(experiment: PaperExperiment, results: Results) -> list[Judgement]:
    """Every claim in each of its cases, and after it our controls."""
    found = []
    for claim in experiment.claims:
        for case in claim.cases:
            if claim.others or not claim.controls:
                found.append(judge_one(experiment, claim, case, results))
            found += [judge_one(experiment, claim, case, results, name) for name in claim.controls]
    return found


def judge_one(experiment: PaperExperiment, claim: Claim, case: str, results: Results, control: str = "") -> Judgement:
    """One claim in one case, or against one of its controls."""
    others = [control] if control else claim.others
    mine = results.of(case, claim.method)
    if not mine:
        return Judgement(claim, case, "not run", "", control=control)
    if claim.relation == "fails":
        verdict, measured, seeds, remarks = _failing(claim, mine, target_of(experiment, case))
    elif claim.relation == "bounded":
        verdict, measured, seeds, remarks = _bounded(claim, mine)
    else:
        verdict, measured, seeds, remarks = _compared(claim, _sides(experiment, claim, case, results, others))
    remarks = [*remarks, *labels(experiment, case)]
    away = departures(experiment, claim, case, results, others)
    if away and verdict != "not run":
        verdict, remarks = "preliminary", [*away, *remarks]
    return Judgement(claim, case, verdict, measured, tuple(remarks), seeds, control)


def more_is_better(score: str, target: str) -> bool:
    """Whether more of a score is better: as for its metric, except that spreads, regrets and rounds should be small.

    >>> more_is_better("worst20", "accuracy"), more_is_better("gini", "accuracy"), more_is_better("loss:mean", "auroc")
    (True, False, False)
    """
    metric, colon, statistic = score.rpartition(":")
    if _SMALL.fullmatch(statistic):
        return False
    return higher_is_better(metric if colon else target) is not False


def _sides(
    experiment: PaperExperiment, claim: Claim, case: str, results: Results, others: Sequence[str]
) -> list[ClaimSide]:
    target = target_of(experiment, case)

    def of(name: str, score: str) -> Observed:
        runs = results.of(case, name)
        return observed(runs, score_for(runs, score), more_is_better(score, target))

    mine, reused = of(claim.method, claim.score), reused_by(claim.score, results.of(case, claim.method))
    if claim.than is not None:
        return [_side(claim, "", mine, of(claim.method, claim.than), reused)]
    if claim.value is not None:
        return [_side(claim, "", mine, dict.fromkeys(mine, ("", claim.value)), reused)]
    return [_side(claim, name, mine, of(name, claim.score), reused) for name in others]


def reused_by(score: str, runs: Sequence[Measured]) -> float:
    """The ratio that widens intervals of a score. A test set that comes with the data is no part of the split."""
    return 0.0 if score.endswith("global") else max((run.reused for run in runs), default=0.0)


def _side(claim: Claim, name: str, mine: Observed, theirs: Observed, reused: float) -> ClaimSide:
    by_seed = differences(mine, theirs)
    apart = by_table(by_seed)
    lost = [sum(math.isinf(value) for _, value in one.values()) for one in (mine, theirs)]
    what = "target never reached" if is_rounds(claim.score) else "failed"
    told = f"{what} in {lost[0]} of {len(mine)} and {lost[1]} of {len(theirs)} runs" if any(lost) else ""
    found = PairedDifferences(tuple(apart), claim.relation != "below", reused, any(lost)) if apart else None
    shared = tuple(value for _, value in by_seed) if len(apart) < len(by_seed) else ()
    return ClaimSide(name, found, len(by_seed), len(set(mine) ^ set(theirs)), told, shared)


def _compared(claim: Claim, sides: Sequence[ClaimSide]) -> tuple[Verdict, str, int, list[str]]:
    known = [side.differences for side in sides if side.differences is not None]
    if not known:
        return "not run", "", 0, []
    alone = [compare_together([one])[0] for one in known]
    told = iter(alone)
    texts = [_text(claim, side, next(told) if side.differences else None) for side in sides]
    all_run = len(known) == len(sides)
    if claim.relation == "near":
        margin = claim.margin or 0.0
        verdict = _verdict(all_run and all(_inside(one, margin) for one in known), _outside(known, margin))
    else:
        one_reversed = any(one.outcome == "worse" for one in compare_together(known))
        verdict = _verdict(all_run and all(one.outcome == "better" for one in alone), one_reversed)
    unpaired = [f"{side.unpaired} seeds without a partner left out ({side.name})" for side in sides if side.unpaired]
    few = _too_few(alone, "learned tables" if any(side.shared for side in sides) else "seeds")
    widened = ["intervals widened for splits of the same examples"] if any(one.reused for one in known) else []
    return verdict, "; ".join(texts), min(side.seeds for side in sides if side.differences), [*unpaired, *few, *widened]


def _verdict(for_it: bool, against_it: bool) -> Verdict:
    return "does not hold" if against_it else "holds" if for_it else "undecided"


def _inside(one: PairedDifferences, margin: float) -> bool:
    """Two one-sided tests at 5 % are a 90 % interval."""
    if len(one.values) < FEWEST_PAIRS:
        return False
    found = compare_together([one], 2 * ALPHA)[0]
    return -margin < found.low and found.high < margin


def _outside(known: Sequence[PairedDifferences], margin: float) -> bool:
    """Whether one simultaneous interval lies wholly outside the margin."""
    return any(
        one.pairs >= FEWEST_PAIRS and (one.low > margin or one.high < -margin) for one in compare_together(known)
    )


def _text(claim: Claim, side: ClaimSide, found: Evidence | None) -> str:
    if found is None or side.differences is None:
        return f"{side.name} not run"
    if found.ranked:
        favour = [value > 0 if claim.relation == "above" else value < 0 for value in side.differences.values if value]
        chance = "" if math.isnan(found.p) else f", p = {found.p:.2g}"
        lost = f"; {side.lost}" if side.lost else ""
        against = len(favour) - sum(favour)
        said = f"as claimed in {sum(favour)}, reversed in {against} of {found.pairs} seeds{chance}{lost}"
    else:
        said = _interval(claim, Interval(found.estimate, found.low, found.high, found.pairs))
    if side.shared and found.pairs < FEWEST_PAIRS and (given := Interval.of(side.shared, found.reused)):
        said = f"{_interval(claim, given)} given the table{'s' if found.pairs > 1 else ''}"
    return f"{side.name} {said}".strip()


def _interval(claim: Claim, found: Interval) -> str:
    return found.less(-(claim.value or 0.0)).text(signed=claim.value is None)


def _too_few(found: Sequence[Evidence], what: str) -> list[str]:
    fewest = min(one.pairs for one in found)
    if fewest < FEWEST_PAIRS:
        return [f"{fewest} of the {FEWEST_PAIRS} {what} that a verdict needs"]
    ranked, needed = [one.pairs for one in found if one.ranked], fewest_by_ranks(1)
    return [f"{min(ranked)} of the {needed} {what} that ranks need"] if ranked and min(ranked) < needed else []


def _failing(claim: Claim, mine: Sequence[Measured], target: str) -> tuple[Verdict, str, int, list[str]]:
    def worse(run: Measured) -> bool:
        if claim.value is None or claim.score not in run.scores:
            return False
        return better(claim.value, run.scores[claim.score], more_is_better(claim.score, target))

    failed = sum(run.state == "failed" or worse(run) for run in mine)
    return _by_count(failed == len(mine), failed == 0, f"{failed} of {len(mine)} runs failed", len(mine))


def _bounded(claim: Claim, mine: Sequence[Measured]) -> tuple[Verdict, str, int, list[str]]:
    than = claim.than or ""
    known = [run.scores for run in mine if run.finished and {claim.score, than} <= set(run.scores)]
    if not known:
        return "not run", "", 0, []
    shares = [scores[claim.score] / scores[than] for scores in known]
    within = sum(share <= 1 for share in shares)
    text = f"{within} of {len(mine)} runs within the bound, the largest at {max(shares):.0%} of it"
    return _by_count(within == len(mine), within < len(known), text, len(mine))


def _by_count(for_it: bool, against_it: bool, text: str, runs: int) -> tuple[Verdict, str, int, list[str]]:
    if runs < FEWEST_PAIRS:
        return "undecided", text, runs, [f"{runs} of the {FEWEST_PAIRS} seeds that a verdict needs"]
    return _verdict(for_it, against_it), text, runs, []


def values_of(runs: Sequence[Measured], score: str) -> list[float]:
    """The values of the finished runs that have one, one per learned table where there are any."""
    return by_table((run.table, run.scores[score]) for run in runs if run.finished and _finite(run, score))


def _finite(run: Measured, score: str) -> bool:
    return math.isfinite(run.scores.get(score, math.nan))
