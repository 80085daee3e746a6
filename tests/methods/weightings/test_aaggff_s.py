"""AAggFF-S against an independent solution of its definition, and in rounds that clients miss."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.algorithms import aaggff_s, named
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.core.spec import from_spec, to_spec
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.weightings.aaggff_d import AaggffD
from fedalloy.methods.weightings.aaggff_s import AaggffS
from fedalloy.methods.weightings.cdf import Cdf


def weigh(rule, *given):
    """Untyped on purpose: a test knows what kind of weights it looks at."""
    return rule.weigh(*given)


def heard(losses, ids=None) -> Cohort:
    ids = torch.arange(len(losses)) if ids is None else torch.tensor(ids)
    return Cohort(ids, {}, {"loss_before": torch.tensor(losses, dtype=torch.float64)})


def ctx(round: int, population: int, absent=()) -> Context:
    return Context(round, population, Key.of(0), absent=tuple(absent))


def play(rule: AaggffS, rounds):
    """All rounds in turn: the state after the last, and every round's info."""
    state, infos = rule.init(len(rounds[0])), []
    for number, losses in enumerate(rounds, 1):
        _, state, info = weigh(rule, heard(losses), state, ctx(number, len(losses)))
        infos.append(info)
    return state, infos


def objective(p, gradients, decisions, alpha, beta):
    """The definition, term by term, in numpy."""
    quadratic = sum((g @ (p - before)) ** 2 for g, before in zip(gradients, decisions, strict=True))
    return sum(g @ p for g in gradients) + alpha / 2 * p @ p + beta / 2 * quadratic


@given(st.integers(2, 6), st.integers(1, 5), st.integers(0, 999))
@settings(max_examples=20)
def test_no_point_of_the_simplex_is_better(clients, rounds, seed):
    rng = np.random.default_rng(seed)
    losses = rng.lognormal(size=(rounds, clients))
    _, infos = play(AaggffS(), losses.tolist())
    decisions = [np.full(clients, 1 / clients), *(info["p"].numpy() for info in infos)]
    gradients = []
    for info, row, p in zip(infos, losses, decisions, strict=False):
        r = (1 - np.exp(-((row / row.mean()) ** 2))) / clients
        gradients.append(-r / (1 + p @ r))
        assert info["responses"].numpy() == pytest.approx(r, abs=1e-14)
        assert info["gradient"].numpy() == pytest.approx(gradients[-1], abs=1e-14)
        assert float(info["decision_loss"]) == pytest.approx(-np.log(1 + p @ r), abs=1e-14)
    slope = 1 / clients
    best = objective(decisions[-1], gradients, decisions[:-1], 4 * clients * slope, 1 / (4 * slope))
    for other in [*np.eye(clients), *rng.dirichlet(np.ones(clients), size=20)]:
        mixed = 0.999 * decisions[-1] + 0.001 * other
        assert objective(mixed, gradients, decisions[:-1], 4 * clients * slope, 1 / (4 * slope)) >= best - 1e-13


def test_the_first_step_by_hand():
    # Two clients: r = (1 - e^-.25, 1 - e^-2.25) / 2, and without bounds the sum of p fixes one unknown.
    r = np.array([1 - np.exp(-0.25), 1 - np.exp(-2.25)]) / 2
    g = -r / (1 + r.mean())
    alpha, beta = 4.0, 0.5
    q = g * (1 - beta * g.mean())
    P = alpha * np.eye(2) + beta * np.outer(g, g)
    # Minimise along p = (x, 1 - x).
    d = np.array([1.0, -1.0])
    x = -(d @ (P @ np.array([0.0, 1.0]) + q)) / (d @ P @ d)
    _, infos = play(AaggffS(), [[1.0, 3.0]])
    assert infos[0]["p"].tolist() == pytest.approx([x, 1 - x], abs=1e-12)


def test_the_public_code_differs_in_three_places():
    r = np.array([1 - np.exp(-0.25), 1 - np.exp(-2.25)]) / 2
    g = -r / (1 + r.sum())  # the first p is all ones
    P = (4 + 0.5 * 4) * np.eye(2) + 0.5 * np.outer(g, g)  # the ridge twice
    d = np.array([1.0, -1.0])
    x = -(d @ (P @ np.array([0.0, 1.0]) + g)) / (d @ P @ d)  # no p_t in the linear term
    _, infos = play(AaggffS(mode="official"), [[1.0, 3.0]])
    assert infos[0]["p"].tolist() == pytest.approx([x, 1 - x], abs=1e-12)


def test_lasting_differences_end_at_the_worst_client_and_the_code_is_slower():
    rounds = [[0.05, 0.1, 0.2, 0.4, 3.0]] * 20
    ours, theirs = play(AaggffS(), rounds)[0]["p"], play(AaggffS(mode="official"), rounds)[0]["p"]
    assert float(ours[4]) == pytest.approx(0.8045, abs=1e-4)
    assert float(theirs[4]) < float(ours[4])


def test_the_objective_adds_up():
    state, infos = play(AaggffS("logistic"), [[1.0, 2.0], [3.0, 1.0], [1.0, 1.0]])
    assert float(state["objective"]) == pytest.approx(sum(float(info["decision_loss"]) for info in infos))
    assert float(infos[-1]["objective"]) == float(state["objective"])


@pytest.mark.parametrize("mode", ["paper", "official"])
def test_the_weighted_loss_has_the_weights_that_made_the_received_model(mode):
    _, infos = play(AaggffS(mode=mode), [[1.0, 3.0], [2.0, 6.0]])
    assert float(infos[0]["weighted_loss"]) == pytest.approx(2.0)  # equal weights, also where the code's p sums to 2
    assert float(infos[1]["weighted_loss"]) == pytest.approx(float(infos[0]["p"] @ torch.tensor([2.0, 6.0]).double()))


def test_a_client_that_drops_out_responds_with_the_mean():
    rule = AaggffS()
    weights, state, info = weigh(rule, heard([1.0, 3.0], [0, 2]), rule.init(3), ctx(1, 3, absent=[1]))
    assert float(info["responses"][1]) == pytest.approx(float(info["responses"][[0, 2]].mean()))
    assert info["imputed"].tolist() == [1]
    assert float(state["p"].sum()) == pytest.approx(1)
    assert weights.tolist() == pytest.approx((state["p"][[0, 2]] / state["p"][[0, 2]].sum()).tolist())
    assert float(weights[1]) > float(weights[0])


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=6), st.sampled_from(["weibull", "frechet", "normal"]))
@settings(max_examples=30)
def test_weights_are_shares_that_follow_the_losses(losses, cdf):
    weights, _, _ = weigh(AaggffS(cdf), heard(losses), AaggffS(cdf).init(len(losses)), ctx(1, len(losses)))
    assert bool((weights >= 0).all())
    assert float(weights.sum()) == pytest.approx(1)
    assert bool((weights[torch.tensor(losses, dtype=torch.float64).argsort()].diff() >= -1e-9).all())


def test_equal_clients_stay_equal_and_state_is_not_changed():
    rule, state = AaggffS(), AaggffS().init(4)
    weights, _, _ = weigh(rule, heard([2.0] * 4), state, ctx(1, 4))
    assert weights.tolist() == pytest.approx([0.25] * 4, abs=1e-12)
    assert not bool(state["gram"].any())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cdf": "cauchy"}, "'cauchy' is not allowed"),
        ({"C1": -0.1}, "C1 must be"),
        ({"C1": 0.5, "C2": 0.5}, "above C1"),
        ({"mode": "code"}, "allowed: official, paper"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        AaggffS(**settings)


def test_a_sampled_cohort_and_a_lower_bound_above_the_upper_are_refused():
    with pytest.raises(AlgorithmError, match="needs every client"):
        aaggff_s().check_cohort(3, 4)
    with pytest.raises(AlgorithmError, match="C1 below C2"):
        play(AaggffS(C1=0.5), [[1.0, 2.0, 3.0]])


def test_settings_of_the_cdf_travel_as_data():
    rule = AaggffS(Cdf("weibull", shape=3.0), C2=0.5)
    assert from_spec("weighting", json.loads(json.dumps(to_spec("weighting", rule)))) == rule
    assert named("aaggff_s", cdf={"kind": "gumbel", "scale": 2.0}).weighting == AaggffS(Cdf("gumbel", scale=2.0))
    assert named("aaggff_d", cdf="weibull").weighting == AaggffD("weibull")
