"""FedAMS by hand: both options, with and without correction for the start."""

from __future__ import annotations

import pytest
import torch

from fedalloy.core.keys import Key
from fedalloy.core.types import Context
from fedalloy.methods.servers.amsgrad import AmsGrad
from fedalloy.testing import check_rule

CTX = Context(1, 10, Key.of(0))


def play(rule: AmsGrad, *updates: float) -> tuple[list[float], dict]:
    target = {"w": torch.zeros(1, dtype=torch.float64)}
    state, steps = rule.init(target), []
    for update in updates:
        moved, state, _ = rule.apply({"w": torch.tensor([update], dtype=torch.float64)}, state, target, CTX)
        steps.append(float(moved["w"] - target["w"]))
        target = moved
    return steps, state


def test_max_remembers_the_largest_and_never_divides_by_less_than_eps():
    rule = AmsGrad(lr=0.1, beta1=0.5, beta2=0.75, eps=0.25)
    steps, state = play(rule, 4.0, 0.0)
    assert steps == pytest.approx([0.1 * 2 / 2, 0.1 * 1 / 2])  # v: 4, then 3; vhat stays 4
    assert (float(state["v"]["w"]), float(state["vhat"]["w"])) == (3.0, 4.0)
    steps, state = play(rule, 0.4)
    assert steps == pytest.approx([0.1 * 0.2 / 0.5])
    assert float(state["vhat"]["w"]) == 0.25


def test_plus_adds_eps_to_the_root():
    steps, state = play(AmsGrad(lr=0.1, beta1=0.5, beta2=0.75, eps=0.25, option="plus", vhat0=9.0), 4.0)
    assert steps == pytest.approx([0.1 * 2 / 3.25])
    assert float(state["vhat"]["w"]) == 9.0


def test_bias_correction_of_both_moments():
    steps, state = play(AmsGrad(lr=0.1, beta1=0.5, beta2=0.75, eps=0.25, option="plus", bias_correction=True), 4.0, 0.0)
    second = 0.1 * (1 / 0.75) / ((4 / (1 - 0.75**2)) ** 0.5 + 0.25)
    assert steps == pytest.approx([0.1 * 4 / 4.25, second])
    assert state["steps"] == 2


@pytest.mark.parametrize("option", ["max", "plus"])
@pytest.mark.parametrize("correct", [False, True])
def test_every_promise_of_a_server(option, correct):
    assert check_rule("server", AmsGrad(option=option, bias_correction=correct)) == []


@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.0}, {"eps": 0.0}, {"beta1": 1.0}, {"beta2": 1.0}, {"option": "min"}, {"vhat0": -1.0}],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=r"must|is not allowed"):
        AmsGrad(**settings)
