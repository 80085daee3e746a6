"""The rules of the verdict, each with a case that flips it: length, seeds, sides, controls, margins, failures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.results.statistics import Interval
from fedalloy.studies.reproduce.declaring import Claim, PaperExperiment
from fedalloy.studies.reproduce.judging import Judgement, judge, judge_one
from fedalloy.studies.reproduce.results import Measured, Results

FIRST, SECOND, FAR = [1.0, 2.0, 3.0], [0.9, 2.1, 2.9], [-9.0, -8.1, -7.0]
SIX = [1.0, 2.0, 3.0, 4.1, 5.2, 6.1]
PUBLISHED = {"rounds": 100, "clients": 20, "cohort": 5}


def results(quick: bool = False, score: str = "mean", **methods: Sequence[float | None]) -> Results:
    """One run per value, seeds 0, 1, ..., as long as published; None is a run that failed."""
    runs = [
        Measured(
            "a",
            name,
            seed,
            "failed" if value is None else "finished",
            5,
            {} if value is None else {score: value},
            planned=100,
            clients=20,
            cohort=5,
        )
        for name, values in methods.items()
        for seed, value in enumerate(values)
    ]
    return Results("test", "command", tuple(runs), quick=quick)


def claim(relation: str = "above", **more: Any) -> Claim:
    given_side = {"others", "controls", "than", "value"} & set(more) or relation == "fails"
    side = {} if given_side else {"others": ["b"]}
    made = {"text": "t", "cases": ["a"], "method": "m", "score": "mean", "relation": relation, **side, **more}
    return Claim.model_validate(made)


def experiment(*claims: Claim, **protocol: Any) -> PaperExperiment:
    tables = {"title": "t", "source": "s", "paper": "p", "protocol": PUBLISHED | protocol}
    return PaperExperiment.model_validate({**tables, "claims": [one.model_dump() for one in claims]})


def judged(one: Claim, found: Results, control: str = "", **protocol: Any) -> Judgement:
    return judge_one(experiment(one, **protocol), one, "a", found, control)


def with_all(found: Results, **values: Any) -> Results:
    return replace(found, runs=tuple(replace(run, **values) for run in found.runs))


@pytest.mark.parametrize(
    ("relation", "mine", "theirs", "verdict"),
    [
        ("above", FIRST, FAR, "holds"),
        ("below", FIRST, FAR, "does not hold"),
        ("above", FAR, FIRST, "does not hold"),
        ("below", FAR, FIRST, "holds"),
        ("above", FIRST, SECOND, "undecided"),
        ("above", FIRST, FIRST, "undecided"),
        ("above", FIRST[:1], FAR[:1], "undecided"),
        ("above", FIRST[:2], FAR[:2], "undecided"),
        ("above", FIRST, [], "not run"),
        ("above", [], FIRST, "not run"),
    ],
)
def test_the_side_of_the_interval_decides_from_three_seeds_on(relation, mine, theirs, verdict):
    assert judged(claim(relation), results(m=mine, b=theirs)).verdict == verdict


def test_runs_are_paired_by_seed_and_not_by_place():
    """The same values under other seeds: paired differences are then as wide as the seeds' own spread."""
    apart = [10.0, 20.0, 30.0, 40.0]
    same = results(m=[value + gain for value, gain in zip(apart, (1.0, 1.1, 0.9, 1.0), strict=True)], b=apart)
    assert judged(claim(), same).verdict == "holds"
    shuffled = Results("t", "c", tuple(same.of("a", "m")) + tuple(results(b=apart[::-1]).runs))
    assert judged(claim(), shuffled).verdict == "undecided"


def test_seeds_of_one_side_alone_are_left_out_and_told():
    found = judged(claim(), results(m=[*FIRST, 100.0], b=FAR))
    assert (found.seeds, found.verdict) == (3, "holds")
    assert "1 seeds without a partner left out (b)" in found.remarks


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"planned": 30}, "30 of 100 rounds (30 %)"),
        ({"planned": 200}, "200 of 100 rounds (200 %)"),
        ({"clients": 10}, "10 of 20 clients (50 %)"),
        ({"cohort": 20}, "20 of 5 clients a round (400 %)"),
        ({"clients": None}, "clients not recorded"),
    ],
)
def test_runs_of_another_length_are_preliminary_whichever_side_they_take(change, said):
    for theirs in (FAR, [9.0, 9.1, 9.3]):
        full = results(m=FIRST, b=theirs)
        assert judged(claim(), full).verdict in ("holds", "does not hold")
        found = judged(claim(), with_all(full, **change))
        assert (found.verdict, found.remarks[0], found.seeds) == ("preliminary", said, 3)


def test_one_short_side_is_enough_to_be_preliminary():
    mixed = Results("t", "c", results(m=FIRST).runs + with_all(results(b=FAR), planned=99).runs)
    assert judged(claim(), mixed).verdict == "preliminary"
    assert judged(claim(length_tolerance=0.01), mixed).verdict == "holds"
    assert judged(claim(length_tolerance=0.009), mixed).verdict == "preliminary"


def test_a_failed_run_is_as_long_as_it_was_meant_to_be():
    found = results(m=[None] * 6, b=SIX)
    assert judged(claim("below"), found).verdict == "holds"
    assert judged(claim("below"), with_all(found, planned=None)).verdict == "preliminary"


def test_what_the_paper_does_not_state_is_judged_and_told():
    short = with_all(results(m=FIRST, b=FAR), planned=30)
    found = judged(claim(), short, rounds="not stated")
    assert (found.verdict, found.remarks) == ("holds", ("rounds not stated in the paper",))
    assert judged(claim(), with_all(short, clients=7), rounds="not stated", clients="with the data").verdict == "holds"


def test_a_changed_setting_is_as_preliminary_as_a_quick_run():
    full = results(m=FIRST, b=FAR)
    assert judged(claim(), replace(full, quick=True)).verdict == "preliminary"
    assert judged(claim(), replace(full, settings={"partition.alpha": 0.1})).verdict == "preliminary"
    assert judged(claim(), replace(full, settings={"task.dataset": "digits"})).verdict == "preliminary"
    assert judged(claim(), replace(full, settings={"engine.device": "cuda", "run.seeds": [0, 1, 2]})).verdict == "holds"


@pytest.mark.parametrize("data", ["part of it", "stand-in"])
def test_adapted_data_are_judged_and_labelled(data):
    found = judged(claim(), results(m=FIRST, b=FAR), data=data, adapted="another model")
    assert found.verdict == "holds"
    assert found.remarks == (f"adapted data: {data}", "adapted: another model")


def test_all_comparators_are_needed_and_none_is_corrected_for():
    """Every one at 95 %: a p of 0.04 beside four others is enough to win, and not to lose."""
    near = [[value - gap for value, gap in zip(FIRST, (1.0, 1.4, 0.7), strict=True)] for _ in range(5)]
    names = ["b", "c", "d", "e", "f"]
    found = results(m=FIRST, b=near[0], c=near[1], d=near[2], e=near[3], f=near[4])
    assert judged(claim(others=names), found).verdict == "holds"
    assert judged(claim(others=["b"]), found).verdict == "holds"
    assert judged(claim("below", others=["b"]), found).verdict == "does not hold"
    one_reversed = results(m=FIRST, b=[value + 5 for value in near[0]], c=SECOND, d=SECOND, e=SECOND, f=SECOND)
    alone = judged(claim(others=["b"]), one_reversed)
    assert alone.verdict == "does not hold"
    weak = results(m=FIRST, b=[2.0, 3.4, 3.7], c=SECOND, d=SECOND, e=SECOND, f=SECOND)
    assert judged(claim(others=["b"]), weak).verdict == "does not hold"
    assert judged(claim(others=names), weak).verdict == "undecided", "Holm over five comparisons"


def test_a_comparator_that_was_not_run_leaves_the_claim_open():
    several = claim(others=["b", "c"])
    assert judged(several, results(m=FIRST, b=FAR, c=FAR)).verdict == "holds"
    assert judged(several, results(m=FIRST, b=FAR, c=[9.0, 9.0, 9.1])).verdict == "does not hold"
    found = judged(several, results(m=FIRST, b=FAR))
    assert (found.verdict, "c not run" in found.measured) == ("undecided", True)


def test_controls_of_ours_have_their_own_lines_and_no_part_in_the_verdict():
    one = claim(others=["b"], controls=["c", "d"])
    behind = results(m=FIRST, b=FAR, c=[9.0, 9.1, 9.3], d=FAR)
    told = judge(experiment(one), behind)
    assert [(found.control, found.words) for found in told] == [
        ("", "holds"),
        ("c", "behind our control"),
        ("d", "ahead of our control"),
    ]
    short = replace(behind, runs=tuple(replace(run, planned=3) if run.method == "c" else run for run in behind.runs))
    assert [found.words for found in judge(experiment(one), short)][:2] == ["holds", "preliminary (our control)"]
    assert [found.control for found in judge(experiment(claim(controls=["c"])), behind)] == ["c"]


def test_what_stands_beside_a_claim_is_judged_and_not_counted():
    told = judge(experiment(claim(), claim(beside=True), claim("below", beside=True)), results(m=FIRST, b=FAR))
    assert [(found.words, found.ours) for found in told] == [
        ("holds", False),
        ("ahead (not counted)", True),
        ("behind (not counted)", True),
    ]


def test_mixtures_are_compared_with_the_only_model_of_a_method_without_them():
    runs = [replace(run, scores={"mean": 0.0, "mix_oracle": 2.0 + run.seed / 10}) for run in results(m=FIRST).runs]
    both = Results("t", "c", (*runs, *results(b=[1.0, 1.1, 1.3]).runs))
    assert judged(claim(score="mix_oracle"), both).verdict == "holds"
    assert judged(claim(score="mean"), both).verdict == "does not hold"
    assert judged(claim(score="mix_validated"), both).verdict == "not run"


@pytest.mark.parametrize(
    ("value", "margin", "verdict"),
    [(2.0, 4.0, "holds"), (30.0, 1.0, "does not hold"), (2.0, 0.5, "undecided"), (5.0, 1.0, "undecided")],
)
def test_near_a_number_needs_two_one_sided_tests(value, margin, verdict):
    assert judged(claim("near", value=value, margin=margin), results(m=FIRST)).verdict == verdict


def test_near_uses_ninety_percent_inside_and_ninety_five_outside():
    """Mean 2, standard error 1 / sqrt(3): Student's 5 % points are 2.92 (90 %) and 4.30 (95 %)."""
    error = 1 / math.sqrt(3)
    inside, outside = 2.92 * error, 4.303 * error
    near_zero = [value - 2 for value in FIRST]
    assert judged(claim("near", value=0.0, margin=inside + 0.01), results(m=near_zero)).verdict == "holds"
    assert judged(claim("near", value=0.0, margin=inside - 0.01), results(m=near_zero)).verdict == "undecided"
    away = claim("near", value=2 - outside - 0.51, margin=0.5)
    assert judged(away, results(m=FIRST)).verdict == "does not hold"
    assert judged(claim("near", value=2 - outside - 0.49, margin=0.5), results(m=FIRST)).verdict == "undecided"


def test_near_other_methods_means_near_each():
    close = claim("near", others=["b", "c"], margin=1.0)
    assert judged(close, results(m=FIRST, b=SECOND, c=SECOND)).verdict == "holds"
    assert judged(close, results(m=FIRST, b=SECOND, c=FAR)).verdict == "does not hold"
    assert judged(close, results(m=FIRST[:2], b=SECOND[:2], c=SECOND[:2])).verdict == "undecided"


@pytest.mark.parametrize(
    ("values", "least", "verdict"),
    [
        ([None, None, None], None, "holds"),
        ([None, None], None, "undecided"),
        ([None, 1.0, None], None, "undecided"),
        ([1.0, 2.0, 3.0], None, "does not hold"),
        ([1.0, 2.0], None, "undecided"),
        ([1.0, 2.0, 3.0], 20.0, "holds"),
        ([1.0, None, None], 20.0, "holds"),
        ([1.0, 90.0, 1.0], 20.0, "undecided"),
    ],
)
def test_failing_is_a_claim_too_and_needs_three_seeds(values, least, verdict):
    more = {} if least is None else {"value": least}
    assert judged(claim("fails", **more), results(m=values)).verdict == verdict


@pytest.mark.parametrize(
    ("score", "values", "verdict"),
    [
        ("loss:mean", [5.0, 6.0, 7.0], "holds"),
        ("loss:mean", [1.0, 2.0, 3.0], "does not hold"),
        ("mean", [5.0, 6.0, 7.0], "does not hold"),
        ("rounds", [5.0, 6.0, 7.0], "holds"),
        ("gini", [5.0, 1.0, 1.0], "undecided"),
    ],
)
def test_who_fails_is_worse_than_the_value_whichever_way_that_is(score, values, verdict):
    assert judged(claim("fails", value=4.0, score=score), results(score=score, m=values)).verdict == verdict


def test_runs_that_never_reach_the_target_are_ranked_and_need_six_seeds():
    never = [math.inf] * 6
    fewer = claim("below", score="rounds")
    found = judged(fewer, results(score="rounds", m=SIX, b=never))
    assert found.verdict == "holds"
    assert found.measured == "b as claimed in 6, reversed in 0 of 6 seeds, p = 0.031; " + (
        "target never reached in 0 of 6 and 6 of 6 runs"
    )
    assert judged(fewer, results(score="rounds", m=never, b=SIX)).verdict == "does not hold"
    assert judged(fewer, results(score="rounds", m=never, b=never)).verdict == "undecided"
    five = judged(fewer, results(score="rounds", m=SIX[:5], b=never[:5]))
    assert (five.verdict, five.remarks) == ("undecided", ("5 of the 6 seeds that ranks need",))


def test_a_failed_run_is_the_worst_run_and_not_left_out():
    """With the failed run left out, all others say that m is better."""
    assert judged(claim(), results(m=[None, *SIX], b=[0.0, *(value - 3 for value in SIX)])).verdict == "undecided"
    assert judged(claim(), results(m=SIX, b=[None] * 6)).verdict == "holds"
    assert judged(claim(), results(m=[None] * 6, b=SIX)).verdict == "does not hold"
    assert judged(claim(), results(m=FIRST, b=[None] * 3)).verdict == "undecided", "ranks of three decide nothing"
    losses = results(score="loss:mean", m=[None] * 6, b=SIX)
    assert judged(claim("below", score="loss:mean"), losses).verdict == "does not hold"


def test_a_run_that_goes_on_is_no_observation():
    found = results(m=[*FIRST, 0.0], b=[*FAR, 9.0])
    open_one = replace(found, runs=tuple(replace(run, state="stopped") if run.seed == 3 else run for run in found.runs))
    assert judged(claim(), open_one).verdict == "holds"


def test_a_finished_run_without_the_score_counts_as_failed():
    odd = results(m=[*SIX, 7.0], b=[value - 3 for value in [*SIX, 7.0]])
    assert "reversed in 0 of 7 seeds" in judged(claim(), odd).measured, "without any spread ranks decide"
    overflowed = replace(odd, runs=(replace(odd.runs[0], scores={"mean": math.nan}), *odd.runs[1:]))
    assert "reversed in 1 of 7 seeds" in judged(claim(), overflowed).measured
    assert judged(claim(score="gini"), odd).verdict == "not run", "no run has it"


def test_seeds_that_share_a_learned_table_are_one_observation():
    def learned(tables: Sequence[str]) -> Results:
        found = results(m=SIX, b=[value - gain for value, gain in zip(SIX, (1, 1.1, 0.9, 1, 1.2, 0.8), strict=True)])
        mine = [replace(run, table=table) for run, table in zip(found.runs[:6], tables, strict=True)]
        return replace(found, runs=(*mine, *found.runs[6:]))

    assert judged(claim(), learned("abcdef")).verdict == "holds"
    assert judged(claim(), learned("aabbcc")).verdict == "holds"
    found = judged(claim(), learned("aaaabb"))
    assert (found.verdict, found.remarks) == ("undecided", ("2 of the 3 learned tables that a verdict needs",))
    assert found.measured.endswith("given the tables")
    assert judged(claim("above", value=-5.0), learned("aaaaaa")).verdict == "undecided"
    assert judged(claim("below", method="b", others=["m"]), learned("aaaaaa")).verdict == "undecided", "either side"


def test_seeds_that_split_the_same_examples_are_corrected():
    """Three differences with t = 5.1 on independent data; a quarter as many test as training examples: t = 3.9."""
    found = results(m=FIRST, b=[value - gap for value, gap in zip(FIRST, (1.0, 1.4, 0.7), strict=True)])
    assert judged(claim(), found).verdict == "holds"
    shared = judged(claim(), with_all(found, reused=0.25))
    assert (shared.verdict, shared.remarks) == ("undecided", ("intervals widened for splits of the same examples",))
    own = replace(found, runs=tuple(replace(run, scores={"global": run.scores["mean"]}) for run in found.runs))
    assert judged(claim(score="global"), with_all(own, reused=0.25)).verdict == "holds", "a test set of its own"


def test_a_bound_holds_in_every_run_or_not_at_all():
    def bounded(*shares: float) -> Judgement:
        runs = [
            replace(run, scores={"regret": share, "regret_bound": 1.0})
            for run, share in zip(results(m=[0.0] * len(shares)).runs, shares, strict=True)
        ]
        return judged(claim("bounded", score="regret", than="regret_bound"), Results("t", "c", tuple(runs)))

    assert bounded(0.1, 0.5, 1.0).verdict == "holds"
    assert bounded(0.1, 0.5, 1.01).verdict == "does not hold"
    assert bounded(0.1, 1.01).verdict == "undecided"
    assert bounded(0.1, 0.5, 1.0).measured == "3 of 3 runs within the bound, the largest at 100% of it"


def test_a_score_against_another_of_the_same_runs():
    runs = [
        replace(run, scores={"mean": 1.0 + run.seed, "half": 2.0 + run.seed + 0.1 * run.seed})
        for run in results(m=[0.0] * 3).runs
    ]
    assert judged(claim("below", than="half"), Results("t", "c", tuple(runs))).verdict == "holds"


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9), st.floats(-50, 50))
def test_an_interval_moves_with_its_values(values, shift):
    one, other = Interval.of(values), Interval.of([value + shift for value in values])
    assert one is not None
    assert other is not None
    assert other.mean == pytest.approx(one.mean + shift, abs=1e-6)
    assert other.high - other.low == pytest.approx(one.high - one.low, abs=1e-6)
    assert one.low <= one.mean <= one.high
