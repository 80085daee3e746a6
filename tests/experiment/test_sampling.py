"""Who takes part: by key, distinct, sorted, reachable."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy import fit
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.experiment import sampling
from fedalloy.experiment.sampling import BySize, Listed, Sampling, UniformSampling, cohort_size
from fedalloy.testing import small_task
from fedalloy.testing.comparing import differences


def everyone(ids: torch.Tensor) -> torch.Tensor:
    return torch.ones(len(ids), dtype=torch.bool)


def even(ids: torch.Tensor) -> torch.Tensor:
    return ids % 2 == 0


TASK = small_task(sizes=(1, 2, 3, 4, 10, 0))
RULES = [UniformSampling(3), BySize(3), Listed(((4, 0, 2), (1, 5)))]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("available", [everyone, even])
def test_ids_are_distinct_sorted_and_reachable(rule, available):
    for round in range(1, 20):
        ids = rule.choose(TASK, round, Key.of(round), available)
        assert ids.dtype == torch.int64
        assert ids.tolist() == sorted(set(ids.tolist()))
        assert bool(available(ids).all())
        assert len(ids) <= rule.size(TASK.population)


@pytest.mark.parametrize("rule", RULES[:2])
def test_the_cohort_is_a_function_of_the_key(rule):
    draws = [tuple(rule.choose(TASK, 1, Key.of(seed), everyone).tolist()) for seed in range(20)]
    again = [tuple(rule.choose(TASK, 1, Key.of(seed), everyone).tolist()) for seed in range(20)]
    assert draws == again
    assert len(set(draws)) > 3


@given(st.integers(1, 40), st.integers(0, 1000), st.floats(0.05, 1))
def test_uniform_fills_the_cohort_while_enough_are_reachable(population, seed, share):
    task: Any = SimpleNamespace(population=population)
    reachable = Key.of(seed).fold("who").uniform(population) < share
    wanted = max(1, population // 3)
    ids = UniformSampling(wanted).choose(task, 1, Key.of(seed), lambda some: reachable[some])
    assert len(ids) == min(wanted, int(reachable.sum()))
    assert bool(reachable[ids].all())


def test_uniform_takes_reachable_clients_equally_often():
    task: Any = SimpleNamespace(population=12)
    counts = torch.zeros(12)
    for seed in range(2000):
        counts[UniformSampling(2).choose(task, 1, Key.of(seed), lambda ids: ids % 3 != 0)] += 1
    assert counts[::3].tolist() == [0] * 4
    assert counts[counts > 0].tolist() == pytest.approx([2000 * 2 / 8] * 8, rel=0.15)


def test_uniform_does_not_look_at_the_whole_population():
    task: Any = SimpleNamespace(population=10**12)
    begin = time.perf_counter()
    ids = UniformSampling(50).choose(task, 1, Key.of(0), everyone)
    assert len(ids) == 50
    assert time.perf_counter() - begin < 1


def test_by_size_takes_clients_in_proportion_to_their_examples():
    counts = torch.zeros(6)
    for seed in range(2000):
        counts[BySize(1).choose(TASK, 1, Key.of(seed), everyone)] += 1
    expected = [2000 * size / 20 for size in (1, 2, 3, 4, 10, 0)]
    assert counts.tolist() == pytest.approx(expected, abs=65)


def test_by_size_without_replacement_follows_successive_draws():
    """P(client 4 is among two) = 1/2 + sum_j p_j * 10 / (20 - n_j)."""
    hits = sum(4 in BySize(2).choose(TASK, 1, Key.of(seed), everyone).tolist() for seed in range(2000))
    expected = 0.5 + sum(size / 20 * 10 / (20 - size) for size in (1, 2, 3, 4))
    assert hits / 2000 == pytest.approx(expected, abs=0.04)


def test_by_size_of_nobody():
    assert BySize(3).choose(TASK, 1, Key.of(0), lambda ids: ids < 0).tolist() == []


def test_a_list_is_used_in_turn():
    rule = Listed(((4, 0, 2, 0), (1, 5)))
    chosen = [rule.choose(TASK, round, Key.of(0), everyone).tolist() for round in (1, 2, 3)]
    assert chosen == [[0, 2, 4], [1, 5], [0, 2, 4]]
    assert rule.size(6) == 3


@pytest.mark.parametrize(("cohort", "named"), [((0, 9), 9), ((-1, 2), -1)])
def test_a_list_that_names_a_stranger(cohort, named):
    with pytest.raises(SpecError, match=f"names client {named}, but the ids are 0 to 5"):
        Listed((cohort,)).choose(TASK, 1, Key.of(0), everyone)


@pytest.mark.parametrize("cohorts", [(), ((),), ((1,), ())])
def test_an_empty_list_is_refused(cohorts):
    with pytest.raises(SpecError, match="at least one cohort"):
        Listed(cohorts)


@pytest.mark.parametrize(("cohort", "size"), [(None, 10), (4, 4), (0.5, 5), (0.25, 3), (0.01, 1), (1.0, 10), (10, 10)])
def test_what_a_cohort_setting_means(cohort, size):
    assert cohort_size(cohort, 10) == size


@pytest.mark.parametrize("cohort", [0, -1, 11, 1.5e9, -0.5])
def test_a_cohort_that_cannot_be(cohort):
    with pytest.raises(SpecError, match="cohort must be between 1 and the number of clients"):
        cohort_size(cohort, 10)


def test_the_former_name_of_a_rule_still_works_and_says_so():
    with pytest.warns(DeprecationWarning, match="is called UniformSampling now"):
        assert sampling.Uniform is UniformSampling
    with pytest.raises(AttributeError, match="no attribute 'Unifrom'"):
        _ = sampling.Unifrom


class Backwards(Sampling):
    """A rule of one's own, in an order of its own."""

    def size(self, population):
        return 3

    def choose(self, task, round, key, available):
        return torch.tensor([2, 0, 1])


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_the_order_in_which_a_rule_names_clients_does_not_matter(engine):
    named, sorted_ = (
        fit("fednova", small_task(), rounds=2, engine=engine, sampling=rule, metrics=("loss",))
        for rule in (Backwards(), Listed(((0, 1, 2),)))
    )
    assert [row["ids"] for row in named.rounds()] == [[0, 1, 2]] * 2
    assert list(differences(named.ending.state, sorted_.ending.state)) == []
