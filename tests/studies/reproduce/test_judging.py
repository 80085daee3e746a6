"""The rule of the verdict: on which side an interval lies, what failures mean, what decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.results.statistics import Interval, combined
from fedalloy.studies.reproduce.declaring import Claim
from fedalloy.studies.reproduce.judging import judge_one
from fedalloy.studies.reproduce.results import Measured, Results

FIRST, SECOND, FAR = [1.0, 2.0, 3.0], [0.9, 2.1, 2.9], [-9.0, -8.1, -7.0]


def results(quick: bool = False, **methods: Sequence[float | None]) -> Results:
    """One run per value, seeds 0, 1, ...; None is a run that failed."""
    runs = [
        Measured(
            "a", name, seed, "failed" if value is None else "finished", 5, {} if value is None else {"mean": value}
        )
        for name, values in methods.items()
        for seed, value in enumerate(values)
    ]
    return Results("test", "command", tuple(runs), quick=quick)


def claim(relation: str = "above", **more: Any) -> Claim:
    given_side = {} if {"others", "than", "value"} & set(more) or relation == "fails" else {"others": ["b"]}
    made = {"text": "t", "cases": ["a"], "method": "m", "score": "mean", "relation": relation, **given_side, **more}
    return Claim.model_validate(made)


@pytest.mark.parametrize(
    ("relation", "mine", "theirs", "verdict"),
    [
        ("above", FIRST, FAR, "holds"),
        ("below", FIRST, FAR, "does not hold"),
        ("above", FAR, FIRST, "does not hold"),
        ("below", FAR, FIRST, "holds"),
        ("above", FIRST, SECOND, "not decidable"),
        ("above", FIRST, FIRST, "not decidable"),
        ("above", FIRST[:1], FAR[:1], "not decidable"),
        ("above", FIRST, [], "not measured"),
        ("above", [], FIRST, "not measured"),
        ("above", FIRST, [None, None], "holds"),
        ("above", [None, None], FIRST, "does not hold"),
        ("above", [None, None], [None], "not decidable"),
    ],
)
def test_the_side_of_the_interval_decides(relation, mine, theirs, verdict):
    assert judge_one(claim(relation), "a", results(m=mine, b=theirs)).verdict == verdict


def test_runs_are_paired_by_seed_and_not_by_place():
    """The same values under other seeds: paired differences are then as wide as the seeds' own spread."""
    apart = [10.0, 20.0, 30.0, 40.0]
    same = results(m=[value + 1 for value in apart], b=apart)
    paired = judge_one(claim(), "a", same)
    assert paired.verdict == "holds"
    assert paired.measured == "b +1.00 [+1.00, +1.00]"
    shuffled = Results("t", "c", tuple(same.of("a", "m")) + tuple(results(b=apart[::-1]).runs))
    assert judge_one(claim(), "a", shuffled).verdict == "not decidable"


def test_a_quick_look_decides_nothing():
    assert judge_one(claim(), "a", results(quick=True, m=FIRST, b=FAR)).verdict == "not decidable"


def test_one_clear_loss_is_enough_and_a_missing_rival_is_no_win():
    several = claim(others=["b", "c"])
    assert judge_one(several, "a", results(m=FIRST, b=FAR, c=FAR)).verdict == "holds"
    assert judge_one(several, "a", results(m=FIRST, b=FAR, c=[9.0, 9.0, 9.1])).verdict == "does not hold"
    assert judge_one(several, "a", results(m=FIRST, b=FAR)).verdict == "not decidable"
    assert combined(["not measured", "not measured"]) == "not measured"


@pytest.mark.parametrize(
    ("value", "tolerance", "verdict"),
    [(2.0, 4.0, "holds"), (30.0, 1.0, "does not hold"), (2.0, 0.5, "not decidable")],
)
def test_near_needs_the_whole_interval(value, tolerance, verdict):
    near = claim("near", value=value, tolerance=tolerance)
    assert judge_one(near, "a", results(m=FIRST)).verdict == verdict


@pytest.mark.parametrize(
    ("values", "least", "verdict"),
    [
        ([None, None], None, "holds"),
        ([None, 1.0], None, "not decidable"),
        ([1.0, 2.0], None, "does not hold"),
        ([1.0, 2.0], 20.0, "holds"),
        ([1.0, None], 20.0, "holds"),
        ([1.0, 90.0], 20.0, "not decidable"),
    ],
)
def test_failing_is_a_claim_too(values, least, verdict):
    more = {} if least is None else {"value": least}
    assert judge_one(claim("fails", **more), "a", results(m=values)).verdict == verdict


@pytest.mark.parametrize(
    ("score", "target", "values", "verdict"),
    [
        ("mean", "loss", [5.0, 6.0], "holds"),
        ("mean", "loss", [1.0, 2.0], "does not hold"),
        ("mean", "accuracy", [5.0, 6.0], "does not hold"),
        ("loss:mean", "accuracy", [5.0, 6.0], "holds"),
        ("rounds", "accuracy", [5.0, 6.0], "holds"),
        ("gini", "accuracy", [5.0, 1.0], "not decidable"),
    ],
)
def test_who_fails_is_worse_than_the_value_whichever_way_that_is(score, target, values, verdict):
    runs = tuple(Measured("a", "m", seed, "finished", 5, {score: value}) for seed, value in enumerate(values))
    made = claim("fails", value=4.0, score=score)
    assert judge_one(made, "a", Results("t", "c", runs), target).verdict == verdict


def test_a_score_against_another_of_the_same_runs():
    runs = tuple(Measured("a", "m", s, "finished", 5, {"mean": 1.0 + s, "half": 2.0 + s + 0.1 * s}) for s in range(3))
    assert judge_one(claim("below", than="half"), "a", Results("t", "c", runs)).verdict == "holds"


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9), st.floats(-50, 50))
def test_an_interval_moves_with_its_values(values, shift):
    one, other = Interval.of(values), Interval.of([value + shift for value in values])
    assert one is not None
    assert other is not None
    assert other.mean == pytest.approx(one.mean + shift, abs=1e-6)
    assert other.high - other.low == pytest.approx(one.high - one.low, abs=1e-6)
    assert one.low <= one.mean <= one.high
