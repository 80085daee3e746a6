"""Regret against the best fixed decision, from recorded responses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.weightings.aaggff_s import AaggffS
from fedalloy.methods.weightings.regret import best_fixed, decision_losses, regret


def weigh(rule, *given):
    """Untyped on purpose: a test knows what kind of weights it looks at."""
    return rule.weigh(*given)


@given(st.integers(1, 8), st.integers(1, 30), st.integers(0, 999), st.sampled_from([0.02, 0.3, 3.0]))
@settings(max_examples=30)
def test_the_best_fixed_decision_is_certified(clients, rounds, seed, size):
    r = size * Key.of(seed).uniform(rounds, clients, dtype=torch.float64)
    p = best_fixed(r)
    assert float(p.sum()) == pytest.approx(1)
    assert bool((p >= -1e-12).all())
    slopes = (r / (1 + r @ p).unsqueeze(1)).sum(0)
    assert float(slopes.max() - slopes @ p) <= 1e-9  # by concavity nothing more than this can be gained


def test_known_answers():
    r = torch.tensor([[0.1, 0.3, 0.0], [0.3, 0.1, 0.0]])
    assert best_fixed(r).tolist() == pytest.approx([0.5, 0.5, 0], abs=1e-6)
    assert best_fixed(torch.zeros(4, 3)).tolist() == pytest.approx([1 / 3] * 3)
    assert best_fixed(torch.tensor([[0.1, 0.4, 0.2]])).tolist() == pytest.approx([0, 1, 0], abs=1e-9)


def test_the_best_fixed_decision_has_no_regret_and_others_have_what_they_lost():
    r = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0]], dtype=torch.float64)
    best = best_fixed(r).expand(3, -1)
    assert float(regret(r, decision_losses(r, best))) == pytest.approx(0, abs=1e-9)
    half = torch.full((3, 2), 0.5, dtype=torch.float64)
    assert float(regret(r, decision_losses(r, half))) == pytest.approx(3 * (math.log(2) - math.log(1.5)))


def test_a_run_regrets_less_per_round_the_longer_it_lasts():
    rule = AaggffS()
    state, rows, losses = rule.init(5), [], []
    stats = {"loss_before": torch.tensor([0.05, 0.1, 0.2, 0.4, 3.0], dtype=torch.float64)}
    for round in range(1, 61):
        _, state, info = weigh(rule, Cohort(torch.arange(5), {}, stats), state, Context(round, 5, Key.of(0)))
        rows.append(info["responses"].tolist())  # as they stand in a record
        losses.append(float(info["decision_loss"]))
    found = [float(regret(torch.tensor(rows[:t]), torch.tensor(losses[:t]))) / t for t in (1, 10, 60)]
    assert found[0] > found[1] > found[2] >= 0
