"""EWWA-FL: shares by hand, moments that stay with their clients, and state that may live in files."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.keys import Key
from fedalloy.core.spec import from_spec, to_spec
from fedalloy.core.types import Cohort, Context
from fedalloy.experiment.records.checkpoint import load, save
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.ewwa import Ewwa
from fedalloy.testing import check_rule
from fedalloy.testing.comparing import copied, differences

KINDS = ("adam", "adagrad", "yogi")
MODES = ("paper", "official")


def ctx(round: int = 1) -> Context:
    return Context(round, 9, Key.of(0))


def cohort(rows: list[list[float]], ids: list[int] | None = None, dtype: torch.dtype = torch.float64) -> Cohort:
    delta = torch.tensor(rows, dtype=dtype)
    return Cohort(torch.tensor(ids or list(range(len(rows)))), {"delta": {"w": delta}})


def random_cohort(ids: list[int], seed: int, dtype: torch.dtype = torch.float64) -> Cohort:
    shapes = {"b": (3,), "a": (2, 4), "s": ()}
    key = Key.of(seed)
    delta = {name: key.fold(name).normal(len(ids), *shape, dtype=dtype) for name, shape in shapes.items()}
    return Cohort(torch.tensor(ids), {"delta": delta})


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_round_sees_signs(kind):
    """From zero, m = (1 - b1) g and v is proportional to g^2: the score is the sign of g times a constant."""
    rule = Ewwa(kind)
    weights, state, _ = rule.weigh(cohort([[-3.0], [0.5], [0.0]]), rule.init(3), ctx())
    size = 1.0 if kind != "adagrad" else math.sqrt(1e-3)
    scores = torch.tensor([size, -size, 0.0], dtype=torch.float64)
    assert torch.allclose(weights["w"][:, 0], torch.softmax(scores, 0), atol=1e-6)
    assert state["counts"] == {"0": 1, "1": 1, "2": 1}


def test_a_second_round_by_hand():
    rule = Ewwa(beta1=0.5, beta2=0.5, eps=1.0, lr=2.0)
    _, state, _ = rule.weigh(cohort([[-2.0], [2.0]]), rule.init(2), ctx())
    assert state["moments"]["0"].flatten().tolist() == [1.0, 2.0]
    weights, state, _ = rule.weigh(cohort([[-4.0], [0.0]]), state, ctx(2))
    assert state["moments"]["0"].flatten().tolist() == [2.5, 9.0]
    assert state["moments"]["1"].flatten().tolist() == [-0.5, 1.0]
    factor = 2 * math.sqrt(0.75) / 0.75
    scores = torch.tensor([factor * 2.5 / 4, factor * -0.5 / 2], dtype=torch.float64)
    assert torch.allclose(weights["w"][:, 0], torch.softmax(scores, 0))


def test_one_pair_is_updated_client_after_client():
    rule = Ewwa(mode="official", beta1=0.5, beta2=0.5, eps=1.0)
    weights, state, info = rule.weigh(cohort([[-2.0], [2.0]]), rule.init(2), ctx())
    scores = torch.tensor([1 / (math.sqrt(2) + 1), -0.5 / (math.sqrt(3) + 1)], dtype=torch.float64)
    scores = scores * math.sqrt(0.5) / 0.5
    shares = (scores - scores.min() + 1).log() + 1e-8
    assert torch.allclose(weights["w"][:, 0], shares / shares.sum())
    assert torch.allclose(state["moments"]["everyone"].flatten(), torch.tensor([-0.5, 3.0], dtype=torch.float64))
    assert float(info["least_score"]) == pytest.approx(float(scores.min()))


def test_the_smallest_score_is_looked_for_in_all_leaves_and_chunks(monkeypatch):
    rule, whole = Ewwa(mode="official"), random_cohort([0, 1, 2], 4)
    expected = rule.weigh(whole, rule.init(3), ctx())
    monkeypatch.setattr(tree, "_ELEMENTS", 1)
    assert list(differences(rule.weigh(whole, rule.init(3), ctx())[0], expected[0], 1e-12)) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_everything_a_rule_promises(kind, mode):
    problems = check_rule("weighting", Ewwa(kind, mode))
    if mode == "official":  # its own paper's reader finds it: the order of clients matters
        assert problems
        assert all(problem.startswith("order of clients") for problem in problems)
    else:
        assert problems == []


@given(st.integers(1, 6), st.integers(0, 2**20), st.sampled_from(KINDS), st.sampled_from(MODES))
def test_shares_of_every_element_sum_to_one(clients, seed, kind, mode):
    rule = Ewwa(kind, mode)
    state = rule.init(9)
    for round in (1, 2):
        weights, state, _ = rule.weigh(random_cohort(list(range(clients)), seed + round), state, ctx(round))
        for leaf in weights.values():
            assert bool((leaf >= 0).all())
            assert torch.allclose(leaf.sum(0), torch.ones_like(leaf[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_comes_back_finds_its_moments(kind):
    """Its shares are what they would be had the rounds it missed not been; r counts its own participations."""
    rule, first, last = Ewwa(kind), random_cohort([2, 5], 1), random_cohort([2, 5], 3)
    _, state, _ = rule.weigh(first, rule.init(9), ctx(1))
    expected, _, _ = rule.weigh(last, state, ctx(2))
    _, meanwhile, _ = rule.weigh(random_cohort([1, 7], 2), state, ctx(2))
    assert all(meanwhile["moments"][owner] is state["moments"][owner] for owner in ("2", "5"))
    found, after, info = rule.weigh(last, meanwhile, ctx(3))
    assert list(differences(found, expected)) == []
    assert after["counts"] == {"1": 1, "2": 2, "5": 2, "7": 1}
    assert info["participations"].tolist() == [2.0, 2.0]


def test_moments_follow_the_names_of_leaves_not_their_order():
    rule, one = Ewwa(), random_cohort([0, 1], 1)
    turned = Cohort(one.ids, {"delta": dict(reversed(list(one.payload["delta"].items())))})
    _, state, _ = rule.weigh(one, rule.init(2), ctx())
    straight, crossed = rule.weigh(one, state, ctx(2)), rule.weigh(turned, state, ctx(2))
    assert list(differences(crossed[0], straight[0])) == []
    assert list(differences(crossed[1], straight[1])) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_moments_in_files_are_moments_in_memory(mode, dtype, tmp_path):
    held, mapped = Ewwa(mode=mode), Ewwa(mode=mode, in_memory_mb=0, scratch=str(tmp_path))
    states = [held.init(9), mapped.init(9)]
    for round, ids in enumerate(([0, 1, 2], [1, 2, 4], [0, 4, 5]), 1):
        one = random_cohort(ids, round, dtype)
        before = copied(states[1])
        told = [rule.weigh(one, state, ctx(round)) for rule, state in zip((held, mapped), states, strict=True)]
        assert list(differences(told[1][0], told[0][0])) == []
        assert list(differences(told[1][1], told[0][1])) == []
        assert list(differences(states[1], before)) == []
        states = [told[0][1], told[1][1]]
    assert list(tmp_path.iterdir()) == []


def test_mapped_moments_are_checkpointed_like_any_tensor(tmp_path):
    rule = Ewwa(in_memory_mb=0)
    _, state, _ = rule.weigh(random_cohort([3, 8], 1), rule.init(9), ctx())
    save(tmp_path / "state.safetensors", state)
    restored = load(tmp_path / "state.safetensors")
    assert list(differences(restored, state)) == []
    again = rule.weigh(random_cohort([3, 8], 2), restored, ctx(2))
    assert list(differences(again[1], rule.weigh(random_cohort([3, 8], 2), state, ctx(2))[1])) == []


@pytest.mark.parametrize("mode", MODES)
def test_through_the_server(mode):
    """The model moves by the sum of shares times updates, and stays where it is when nobody moved."""
    algorithm = Algorithm(Sgd(), Ewwa(mode=mode), ServerSgd())
    one = random_cohort([0, 1, 2], 5)
    params = {name: torch.ones_like(leaf[0]) for name, leaf in one.payload["delta"].items()}
    state = algorithm.init(params, 9)
    weights, _, _ = algorithm.weighting.weigh(one, state["weighting"], ctx())
    step = server_step(algorithm, state, one, ctx())
    expected = tree.add(params, tree.combine(one.payload["delta"], weights))
    assert list(differences(step.state["shared"]["params"], expected, 1e-12)) == []
    still = Cohort(one.ids, {"delta": tree.zeros_like(one.payload["delta"])})
    assert list(differences(server_step(algorithm, state, still, ctx()).state["shared"]["params"], params)) == []


def test_one_client_is_taken_as_it_is():
    for rule in (Ewwa(), Ewwa(mode="official")):
        weights, _, _ = rule.weigh(cohort([[5.0, -7.0, 0.0]]), rule.init(1), ctx())
        assert torch.allclose(weights["w"], torch.ones(1, 3, dtype=torch.float64))


def test_huge_updates_give_finite_shares():
    rows = [[1e18, -1e18], [1e-30, 0.0]]
    weights, _, _ = Ewwa().weigh(cohort(rows, dtype=torch.float32), Ewwa().init(2), ctx())
    assert bool(weights["w"].isfinite().all())


def test_the_spec_survives_json():
    rule = Ewwa("yogi", "official", scratch="folder", in_memory_mb=3.0)
    assert from_spec("weighting", json.loads(json.dumps(to_spec("weighting", rule)))) == rule


@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer": "sgd"},
        {"mode": "both"},
        {"lr": 0},
        {"eps": 0},
        {"beta1": 1},
        {"beta2": -0.1},
        {"in_memory_mb": -1},
    ],
)
def test_settings_out_of_range_are_refused(settings):
    with pytest.raises(ValueError, match=r"must|is not allowed"):
        Ewwa(**settings)
