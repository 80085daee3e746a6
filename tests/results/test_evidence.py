"""Evidence: what decides, and what cannot be decided."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from scipy import stats

from fedalloy.results.conclusion import conclusion
from fedalloy.results.evidence import (
    PairedDifferences,
    compare_together,
    exact_p,
    fewest_by_ranks,
    rank_p,
    seeds_to_decide,
)
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.rounds import Span, not_within, reached_in, rounds_apart


def one(*values: float, **more):
    return compare_together([PairedDifferences(values, **more)])[0]


def some(seed: int, count: int, mean: float = 0.0) -> tuple[float, ...]:
    draw = random.Random(seed)
    return tuple(draw.gauss(mean, 1.0) for _ in range(count))


@pytest.mark.parametrize("count", [3, 4, 9, 25])
def test_a_single_comparison_is_the_paired_t_test(count):
    values = some(count, count, 0.5)
    found, known = one(*values), stats.ttest_1samp(values, 0.0)
    inside = known.confidence_interval(0.95)
    assert (found.p, found.low, found.high) == pytest.approx((known.pvalue, inside.low, inside.high))


def test_the_correction_for_shared_examples_widens_by_its_factor():
    plain, wide = one(1.0, 2.0, 4.0, 3.0), one(1.0, 2.0, 4.0, 3.0, reused=0.3 / 0.7)
    assert (wide.high - wide.low) / (plain.high - plain.low) == pytest.approx(math.sqrt(1 + 4 * 0.3 / 0.7))
    assert (plain.outcome, wide.outcome) == ("better", "undecided")


def test_holm_decides_more_than_the_intervals_show_and_says_so():
    lists = [(1.0, 1.01, 0.99, 1.0), (1.0, 1.6, 0.6, 1.2)]
    sure, less = compare_together([PairedDifferences(values) for values in lists])
    assert (sure.outcome, less.outcome) == ("better", "better")
    assert (sure.family, sure.reason) == (2, "")
    together = compare_together([PairedDifferences(lists[0]), PairedDifferences((1.0, 1.9, 0.4, 1.1))])[1]
    assert together.outcome == "better"
    assert together.word == "better (Holm)", "Holm has alpha for the second, the interval half of it"
    by_ranks = one(-0.1, -0.2, *(1.0 + place / 10 for place in range(7)), ranked=True)
    assert by_ranks.low < 0 < by_ranks.high
    assert by_ranks.word == "better (ranks)"


@pytest.mark.parametrize(
    ("higher", "above", "below"),
    [(True, "better", "worse"), (False, "worse", "better"), (None, "higher", "lower")],
)
def test_the_direction_of_the_metric_gives_the_word(higher, above, below):
    values = (1.0, 1.1, 0.9, 1.05)
    assert one(*values, higher_is_better=higher).outcome == above
    assert one(*(-value for value in values), higher_is_better=higher).outcome == below


def test_too_few_pairs_decide_nothing_but_their_intervals_are_simultaneous_too():
    assert one(5.0).outcome == one(5.0, 5.1).outcome == "too few seeds"
    assert compare_together([PairedDifferences(())])[0].outcome == "too few seeds"
    found = compare_together([PairedDifferences(values) for values in ((1.0, 1.1, 0.9), (1.0, 1.2), (1.0,))])
    assert [each.family for each in found] == [2, 2, 2], "one value has no interval"
    assert found[1].high - found[1].low > 1.5 * (one(1.0, 1.2).high - one(1.0, 1.2).low)


def test_equal_differences_are_no_proof_until_the_exact_test_can_speak():
    assert one(2.0, 2.0, 2.0).outcome == "undecided"
    assert one(0.1 + 0.2, 0.3, 0.3).outcome == "undecided", "rounding is no spread"
    found = one(*[2.0] * 6)
    assert (found.outcome, found.p, found.low, found.high) == ("better", 0.03125, 2.0, 2.0)
    same = one(*[0.0] * 8)
    assert (same.outcome, same.p) == ("undecided", 1.0)


def test_an_overflowed_value_is_compared_by_ranks():
    few = one(-math.inf, 0.1, 0.2, 0.1)
    assert (few.outcome, few.ranked) == ("undecided", True)
    many = one(math.inf, *some(1, 7, 9.0), higher_is_better=False)
    assert (many.outcome, many.p) == ("worse", 2 / 2**8)
    assert math.isfinite(many.low)


def test_shared_examples_leave_ranks_without_a_verdict():
    found = one(*[-math.inf] * 9, higher_is_better=False, reused=0.25)
    assert found.outcome == "undecided"
    assert math.isnan(found.p)


@pytest.mark.parametrize("count", [6, 9, 12])
def test_the_exact_test_counts_every_pattern_of_signs(count):
    values = some(count, count, 0.4)
    sums = [abs(sum(s * v for s, v in zip(signs, values, strict=True)))
            for signs in itertools.product((1, -1), repeat=count)]  # fmt: skip
    assert exact_p(values) == (sum(each >= sums[0] - 1e-9 for each in sums) / 2**count, "permutation")


def test_the_exact_test_speaks_for_every_number_of_seeds_from_six_on():
    assert exact_p(some(0, 5)) is None
    for count in range(6, 40):
        p, test = exact_p([1.0] * count) or (math.nan, "")
        assert p == pytest.approx(2.0 ** (1 - count))
        assert test == ("permutation" if count <= 16 else "sign")
    assert exact_p([0.0] * 20) == (1.0, "sign")


def test_ranks_agree_with_scipy():
    for count in (7, 12, 30):
        values = some(count, count, 0.3)
        assert rank_p(values) == pytest.approx(stats.wilcoxon(values).pvalue)


def test_a_run_that_never_reached_the_target_loses_against_one_that_did():
    found = rounds_apart(spans(3, None, None, 1), {**spans(4, 9, None), 7: reached_in(2)})
    assert found.values == (-1, math.inf, 0.0)
    assert found.ranked
    assert not rounds_apart(spans(3), spans(4)).ranked


def spans(*rounds: int | None, ran: int = 20) -> dict[int, Span]:
    return {seed: not_within(ran) if one is None else reached_in(one) for seed, one in enumerate(rounds)}


def test_a_run_that_ended_too_early_to_reach_the_target_does_not_lose_against_a_longer_one():
    found = rounds_apart(spans(30, 5), spans(None, None, ran=10))
    assert found.values == (0.0, -math.inf), "the first might have reached it in rounds 11 to 29"
    assert found.bounds == ((-math.inf, 19), (-math.inf, -6))


def test_the_interval_of_censored_rounds_covers_what_longer_runs_might_have_shown():
    """Seven of ten pairs are unknown, and all others differ by three rounds: nobody knows the median."""
    mine, theirs = [None] * 7 + [3, 4, 5], [None] * 7 + [6, 7, 8]
    found = compare_together([rounds_apart(spans(*mine), spans(*theirs))])[0]
    assert (found.low, found.high) == (-math.inf, math.inf)
    known = compare_together([rounds_apart(spans(*range(3, 12), 12), spans(*range(6, 15), None))])[0]
    assert known.high == -3
    assert known.low == -3, "one unknown of ten does not move the inner order statistics"


def test_what_cannot_be_tested_makes_nothing_else_easier():
    values = (1.0, 1.9, 0.4, 1.1)
    equal = PairedDifferences((0.0,) * 4, reused=0.25)
    alone, beside = one(*values), compare_together([PairedDifferences(values), equal, equal])[0]
    assert (alone.outcome, alone.family) == ("better", 1)
    assert (beside.outcome, beside.family) == ("undecided", 3)
    assert beside.high - beside.low > alone.high - alone.low


def test_censored_rounds_need_as_many_seeds_as_the_rank_test():
    for family in (1, 4, 8):
        fewest = fewest_by_ranks(family)
        for count, outcome in ((fewest - 1, "undecided"), (fewest, "better")):
            reached = rounds_apart(spans(*[5] * count), spans(*[None] * count))
            others = [PairedDifferences(some(place, count)) for place in range(family - 1)]
            assert compare_together([reached, *others])[0].outcome == outcome


def test_about_as_many_more_seeds_as_the_spread_asks_for():
    found = one(*some(3, 5, 0.4))
    more = seeds_to_decide(found)
    assert more is not None
    for seeds, enough in ((5 + more, True), (5 + more - 1, False)):
        half = stats.t.isf(0.025, seeds - 1) * (found.deviation or 0) / math.sqrt(seeds)
        assert (half <= abs(found.estimate)) == enough
    assert seeds_to_decide(one(1.0, 1.1, 0.9)) == 0
    assert (seeds_to_decide(found, alpha=0.008) or 0) > more, "a second look has less"
    assert seeds_to_decide(one(1.0, 1.8, 0.2, 1.2, reused=0.9)) is None, "more seeds share the same examples"
    assert seeds_to_decide(one(2.0, 2.0, 2.0)) == 3
    ranked = one(3.0, 2.0, 4.0, 5.0, -1.0, math.inf)
    assert ranked.outcome == "undecided"
    assert 1 <= (seeds_to_decide(ranked) or 0) <= 6, "as many more as a test of the same spread needs"
    assert seeds_to_decide(one(1.0, -1.0, 2.0, -2.0, ranked=True)) is None


@pytest.mark.parametrize(("higher", "word"), [(False, "worse"), (True, "better"), (None, "higher")])
def test_ties_do_not_turn_the_direction_of_a_rank_test(higher, word):
    """Both never reach the target with seven seeds, I never with six more: the median is zero."""
    (one,) = compare_together([PairedDifferences((0.0,) * 7 + (math.inf,) * 6, higher, ranked=True)])
    assert (one.estimate, one.outcome) == (0.0, word)


def test_a_later_run_with_a_median_of_zero_is_said_to_be_later():
    def run(name: str, seed: int, reached: int | None) -> RunOutcome:
        scores = {"mean": 0.5 + seed / 100}
        return RunOutcome(name, seed, "finished", rounds=9, scores=scores, reached=reached, target=0.8)

    mine = [run("mine", seed, None) for seed in range(19)]
    first = [run("first", seed, 5 if seed < 9 else None) for seed in range(19)]
    assert "mine reaches 0.8 later (mine did not reach it with 19 of 19 seeds)" in conclusion([*first, *mine])
