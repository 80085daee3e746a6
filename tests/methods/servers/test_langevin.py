"""The server of FedEvg: it subtracts, it shakes by its key, it keeps its limits and its schedule."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.keys import Key
from fedalloy.core.types import Context
from fedalloy.methods.servers.langevin import Langevin, diffusion, half_cosine


def context(round: int = 1, rounds: int | None = 10, seed: int = 0) -> Context:
    return Context(round, 5, Key.of(seed).fold("round", round), rounds=rounds)


def test_samples_go_down_the_gradient():
    target, slope = {"x": torch.zeros(2, 3)}, {"x": torch.ones(2, 3)}
    moved, _, info = Langevin(start=0.5, schedule="constant").apply(slope, {}, target, context())
    assert torch.equal(moved["x"], torch.full((2, 3), -0.5))
    assert float(info["step"]) == 0.5


def test_noise_comes_from_the_rounds_key_and_limits_are_kept():
    target = {"x": torch.full((50, 40), 0.5, dtype=torch.float64)}
    rule, still = Langevin(noise=0.1, schedule="constant"), {"x": torch.zeros(50, 40, dtype=torch.float64)}
    one, _, _ = rule.apply(still, {}, target, context(1))
    again, _, _ = rule.apply(still, {}, target, context(1))
    other, _, _ = rule.apply(still, {}, target, context(2))
    assert torch.equal(one["x"], again["x"])
    assert not torch.equal(one["x"], other["x"])
    assert abs(float((one["x"] - 0.5).std()) - 0.1) < 0.01
    cut, _, _ = Langevin(noise=3.0, schedule="constant", low=0.0, high=1.0).apply(still, {}, target, context())
    assert float(cut["x"].min()) == 0.0
    assert float(cut["x"].max()) == 1.0


def test_the_diffusion_schedule_stays_near_the_start_and_the_half_cosine_does_not():
    steps = [Langevin().step_at(t + 1, 500) for t in (100, 400, 480, 499)]
    assert [round(step, 2) for step in steps] == [9.98, 9.81, 9.03, 0.01]
    halfway = Langevin(schedule="half_cosine").step_at(251, 501)
    assert math.isclose(halfway, 5.005, rel_tol=1e-9)


@given(st.integers(1, 400))
def test_both_schedules_go_from_zero_to_one_without_turning_back(rounds):
    for schedule in (diffusion, half_cosine):
        passed = [schedule(round, rounds) for round in range(1, rounds + 1)]
        assert all(0 <= one <= 1 + 1e-12 for one in passed)
        assert all(late >= early - 1e-12 for early, late in itertools.pairwise(passed))
        assert rounds == 1 or math.isclose(passed[-1], 1.0, abs_tol=1e-9)


def test_a_schedule_without_an_end_is_refused():
    with pytest.raises(ValueError, match="needs the number of rounds"):
        Langevin().step_at(1, None)
    with pytest.raises(ValueError, match="allowed: constant, diffusion, half_cosine"):
        Langevin(schedule="linear")  # type: ignore[arg-type]
