"""FedAdam, FedAdagrad, FedYogi by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.keys import Key
from fedalloy.core.moments import second_moment
from fedalloy.core.types import Context
from fedalloy.methods.servers.adaptive import Adagrad, Adam, Yogi
from fedalloy.testing import check_rule

CTX = Context(1, 10, Key.of(0))
RULES = (Adam, Adagrad, Yogi)


def play(rule, *updates: float) -> tuple[list[float], dict]:
    target = {"w": torch.zeros(1, dtype=torch.float64)}
    state, places = rule.init(target), []
    for update in updates:
        target, state, _ = rule.apply({"w": torch.tensor([update], dtype=torch.float64)}, state, target, CTX)
        places.append(float(target["w"]))
    return places, state


def test_two_steps_of_adam():
    places, state = play(Adam(lr=0.1, beta1=0.5, beta2=0.75, tau=2.0), 4.0, 2.0)
    # v: 4, 0.75 * 4 + 0.25 * 16 = 7, 0.75 * 7 + 0.25 * 4 = 6.25; m: 2, 2
    first = 0.1 * 2 / (7**0.5 + 2)
    assert places == pytest.approx([first, first + 0.1 * 2 / 4.5])
    assert (float(state["m"]["w"]), float(state["v"]["w"]), state["steps"]) == pytest.approx((2.0, 6.25, 2))


def test_two_steps_of_adagrad_have_no_first_moment():
    places, state = play(Adagrad(lr=0.1, tau=2.0), 4.0, -2.0)
    first = 0.1 * 4 / (20**0.5 + 2)
    assert places == pytest.approx([first, first - 0.1 * 2 / (24**0.5 + 2)])
    assert float(state["v"]["w"]) == 24.0


def test_two_steps_of_yogi_go_up_and_down_by_the_same_rule():
    _, state = play(Yogi(beta2=0.75, tau=2.0), 4.0)
    assert float(state["v"]["w"]) == 4 + 0.25 * 16
    _, state = play(Yogi(beta2=0.75, tau=2.0), 4.0, 2.0)
    assert float(state["v"]["w"]) == 8 - 0.25 * 4


@pytest.mark.parametrize("make", RULES)
def test_bias_correction_multiplies_the_step(make):
    plain, _ = play(make(beta1=0.5, beta2=0.75), 4.0)
    corrected, state = play(make(beta1=0.5, beta2=0.75, bias_correction=True), 4.0)
    assert corrected[0] == pytest.approx(plain[0] * 0.25**0.5 / 0.5)
    assert state["steps"] == 1


@pytest.mark.parametrize("make", RULES)
def test_every_promise_of_a_server(make):
    assert check_rule("server", make()) == []
    assert check_rule("server", make(bias_correction=True)) == []


@given(st.floats(0, 1e6), st.floats(-1e3, 1e3), st.sampled_from(["adam", "adagrad", "yogi"]), st.floats(0, 0.999))
def test_second_moments_never_turn_negative(v, update, kind, beta2):
    new = second_moment(kind, torch.tensor(v).double(), torch.tensor(update).double(), beta2)
    assert float(new) >= 0


@pytest.mark.parametrize("make", RULES)
@pytest.mark.parametrize("settings", [{"lr": 0.0}, {"tau": 0.0}, {"beta1": 1.0}, {"beta2": -0.1}])
def test_settings_out_of_range_are_refused(make, settings):
    with pytest.raises(ValueError, match="must"):
        make(**settings)
