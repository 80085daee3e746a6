"""AFL against hand-made numbers, and in rounds that clients miss."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.algorithms import afl
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.weightings.afl import Afl


def weigh(rule, *given):
    """Untyped on purpose: a test knows what kind of weights it looks at."""
    return rule.weigh(*given)


def heard(ids, losses) -> Cohort:
    return Cohort(torch.tensor(ids), {}, {"loss_before": torch.tensor(losses, dtype=torch.float64)})


def ctx(population: int, absent=()) -> Context:
    return Context(1, population, Key.of(0), absent=tuple(absent))


def test_two_rounds_by_hand():
    rule = Afl(step=0.1)
    weights, state, info = weigh(rule, heard([0, 1, 2], [1.0, 2.0, 3.0]), rule.init(3), ctx(3))
    assert weights.tolist() == pytest.approx([1 / 3 - 0.1, 1 / 3, 1 / 3 + 0.1])
    assert info["lambda"].tolist() == state["lambda"].tolist()
    weights, _, _ = weigh(rule, heard([0, 1, 2], [0.0, 9.0, 0.0]), state, ctx(3))
    assert weights.tolist() == pytest.approx([0, 0.9, 0.1])  # (.233, 1.233, .433) minus .333, cut at 0


def test_a_client_that_drops_out_counts_with_the_mean_of_those_present():
    rule = Afl(step=0.1)
    weights, state, info = weigh(rule, heard([0, 2], [1.0, 3.0]), rule.init(3), ctx(3, absent=[1]))
    assert state["lambda"].tolist() == pytest.approx([1 / 3 - 0.1, 1 / 3, 1 / 3 + 0.1])
    assert weights.tolist() == pytest.approx([(1 / 3 - 0.1) / (2 / 3), (1 / 3 + 0.1) / (2 / 3)])
    assert info["imputed"].tolist() == [1]


@given(st.lists(st.floats(0, 1e8), min_size=1, max_size=8), st.floats(1e-3, 10))
def test_weights_are_shares_and_follow_the_losses(losses, step):
    rule, clients = Afl(step), len(losses)
    weights, _, _ = weigh(rule, heard(range(clients), losses), rule.init(clients), ctx(clients))
    assert bool((weights >= 0).all())
    assert float(weights.sum()) == pytest.approx(1)
    assert bool((weights[torch.tensor(losses, dtype=torch.float64).argsort()].diff() >= -1e-9).all())


def test_equal_losses_change_nothing_and_a_lasting_gap_ends_at_the_worst_client():
    rule = Afl(step=0.1)
    state = rule.init(4)
    assert torch.allclose(weigh(rule, heard(range(4), [3.0] * 4), state, ctx(4))[0], state["lambda"])
    for _ in range(30):
        weights, state, _ = weigh(rule, heard(range(4), [1.0, 1.0, 1.5, 1.0]), state, ctx(4))
    assert weights.tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("step", [0.0, -1.0, float("inf"), float("nan")])
def test_refused_steps(step):
    with pytest.raises(ValueError, match=r"step must be above 0|expected a finite number"):
        Afl(step)


def test_a_sampled_cohort_is_refused():
    with pytest.raises(AlgorithmError, match="needs every client in every round, but the cohort is 2 of 5"):
        afl().check_cohort(2, 5)
