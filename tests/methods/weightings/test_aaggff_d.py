"""AAggFF-D against its equations in numpy; a million clients in a moment."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.weightings.aaggff_d import RECORDED, AaggffD


def weigh(rule, *given):
    """Untyped on purpose: a test knows what kind of weights it looks at."""
    return rule.weigh(*given)


def heard(ids, losses) -> Cohort:
    return Cohort(torch.tensor(ids), {}, {"loss_before": torch.tensor(losses, dtype=torch.float64)})


def ctx(round: int, population: int) -> Context:
    return Context(round, population, Key.of(0))


@given(st.integers(2, 9), st.integers(1, 4), st.integers(0, 999), st.sampled_from([(0.0, None), (0.1, 0.9)]))
@settings(max_examples=30)
def test_every_quantity_is_its_equation(K, rounds, seed, bounds):
    rng, (C1, C2) = np.random.default_rng(seed), bounds
    m = int(rng.integers(1, K + 1))
    C = m / K
    high = C if C2 is None else C2
    rule = AaggffD("exponential", C1, C2)
    state, p, G, cumulated = rule.init(K), np.full(K, 1 / K), np.zeros(K), 0.0
    for t in range(1, rounds + 1):
        ids, losses = np.sort(rng.choice(K, m, replace=False)), rng.lognormal(size=m)
        r = C1 + (high - C1) * (1 - np.exp(-losses / losses.mean()))
        rbar = r.mean()
        dr = np.full(K, rbar)
        dr[ids] = rbar + (r - rbar) / C
        g = -dr / (1 + rbar) + rbar * (p @ (dr - rbar)) / (1 + rbar) ** 2
        cumulated -= np.log(1 + p @ dr)
        G = G + g
        L = high / (1 + C1) + 2 * (high - C1) / (C * (1 + C1))
        scores = np.exp(-np.sqrt(np.log(K)) * G / (L * np.sqrt(t + 1)))
        p = scores / scores.sum()
        weights, state, info = weigh(rule, heard(ids.tolist(), losses.tolist()), state, ctx(t, K))
        for name, expected in {"responses": r, "estimate": dr, "gradient": g, "p": p}.items():
            assert info[name].numpy() == pytest.approx(expected, abs=1e-12), name
        assert weights.numpy() == pytest.approx(p[ids] / p[ids].sum(), abs=1e-12)
        assert float(state["objective"]) == pytest.approx(cumulated, abs=1e-12)


def test_the_public_code_pushes_participants_down():
    losses = [2.0, 2.0, 2.0]
    ours, theirs = AaggffD(), AaggffD(C=0.3, mode="official")
    p_ours = weigh(ours, heard([0, 4, 7], losses), ours.init(10), ctx(1, 10))[1]["p"]
    p_theirs = weigh(theirs, heard([0, 4, 7], losses), theirs.init(10), ctx(1, 10))[1]["p"]
    assert torch.allclose(p_ours, torch.full((10,), 0.1, dtype=torch.float64))
    assert float(p_theirs[0]) < float(p_theirs[1])


def test_the_first_round_of_the_public_code_by_hand():
    rule, r = AaggffD("exponential", C=0.5, mode="official"), 0.5 * (1 - np.exp(-np.array([0.5, 1.5])))
    rbar, p = r.mean(), np.full(4, 0.5)
    dr = np.array([(r[0] - rbar) / 0.5, rbar, rbar, (r[1] - rbar) / 0.5])
    bottom = 1 + p.sum() * rbar
    g = -dr / bottom + rbar * (p @ (dr - rbar)) / bottom**2
    info = weigh(rule, heard([0, 3], [1.0, 3.0]), rule.init(4), ctx(1, 4))[2]
    assert info["gradient"].numpy() == pytest.approx(g, abs=1e-14)


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=6))
def test_weights_are_shares_that_follow_the_losses(losses):
    ids = list(range(0, 2 * len(losses), 2))
    weights, state, _ = weigh(AaggffD(), heard(ids, losses), AaggffD().init(20), ctx(1, 20))
    assert float(weights.sum()) == pytest.approx(1)
    assert float(state["p"].sum()) == pytest.approx(1)
    assert bool((weights >= 0).all())
    assert bool((weights[torch.tensor(losses, dtype=torch.float64).argsort()].diff() >= -1e-9).all())


def test_one_client_in_a_round_and_one_in_the_world_learn_nothing():
    weights, state, _ = weigh(AaggffD(), heard([2], [7.0]), AaggffD().init(5), ctx(1, 5))
    assert weights.tolist() == [1]
    assert state["p"].tolist() == pytest.approx([0.2] * 5)
    assert weigh(AaggffD(), heard([0], [7.0]), AaggffD().init(1), ctx(1, 1))[0].tolist() == [1]


def test_many_clients_are_recorded_by_their_participants():
    K = RECORDED + 1
    info = weigh(AaggffD(), heard([5, K - 1], [1.0, 2.0]), AaggffD().init(K), ctx(1, K))[2]
    assert max(value.numel() for value in info.values()) == 2
    assert {"p_present", "estimate_present", "gradient_present"} <= set(info)


def test_a_million_clients_take_a_moment():
    K, rule = 1_000_000, AaggffD()
    state, seconds = rule.init(K), []
    for round in range(1, 8):
        given = heard(list(range(round, 100 * round, round)), [1.0 + i for i in range(99)])
        begin = time.perf_counter()
        _, state, _ = weigh(rule, given, state, ctx(round, K))
        seconds.append(time.perf_counter() - begin)
    assert sum(leaf.numel() * leaf.element_size() for leaf in state.values()) < 100e6
    assert statistics.median(seconds) < 0.05


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"C": 0.0}, r"\(0, 1\]"),
        ({"C": 1.5}, r"\(0, 1\]"),
        ({"C": 0.1, "C1": 0.2}, "below C2"),
        ({"C1": 0.2, "C2": 0.1}, "above C1"),
        ({"mode": "official"}, "give C"),
        ({"cdf": "cauchy"}, "'cauchy' is not allowed"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ValueError, match=message):
        AaggffD(**settings)


def test_a_lower_bound_above_the_share_of_a_round_is_refused_when_it_shows():
    rule = AaggffD(C1=0.5)
    with pytest.raises(AlgorithmError, match="C1 below C2"):
        weigh(rule, heard([1, 2], [1.0, 2.0]), rule.init(10), ctx(1, 10))
