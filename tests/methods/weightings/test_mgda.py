"""FedMGDA+: the shortest mix of unit updates."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.weightings.mgda import FedMgda

CTX = Context(1, 20, Key.of(0))


def weigh(rule, *given):
    """Untyped on purpose: a test knows what kind of weights it looks at."""
    return rule.weigh(*given)


def sent(rows, sizes=None) -> Cohort:
    delta = torch.as_tensor(rows, dtype=torch.float64)
    stats = {} if sizes is None else {"num_examples": torch.tensor(sizes, dtype=torch.float64)}
    return Cohort(torch.arange(len(delta)), {"delta": {"a.w": delta[:, :1], "b.w": delta[:, 1:]}}, stats)


def weighed(rule: FedMgda, cohort: Cohort):
    return weigh(rule, cohort, rule.init(20), CTX)


def test_orthogonal_updates_share_and_the_length_of_an_update_does_not_matter():
    weights, _, info = weighed(FedMgda(1.0), sent([[4.0, 0.0], [0.0, 0.5]]))
    assert info["lambda"].tolist() == pytest.approx([0.5, 0.5])
    assert info["norms"].tolist() == [4, 0.5]
    assert weights.tolist() == pytest.approx([0.125, 1.0])


def test_a_known_minimum_and_the_box_around_the_prior():
    # Unit vectors at 0, 0 and 120 degrees: half of the weight belongs to the third.
    rows = [[1.0, 0.0], [2.0, 0.0], [-0.5, 3**0.5 / 2]]
    assert float(weighed(FedMgda(1.0), sent(rows))[2]["lambda"][2]) == pytest.approx(0.5)
    assert float(weighed(FedMgda(0.1), sent(rows))[2]["lambda"][2]) == pytest.approx(1 / 3 + 0.1)
    by_size = weighed(FedMgda(0.1, "samples"), sent(rows, [1, 1, 8]))[2]["lambda"]
    assert by_size.tolist() == pytest.approx([0.15, 0.15, 0.7])
    assert weighed(FedMgda(0.0, "samples"), sent(rows, [1, 1, 8]))[2]["lambda"].tolist() == [0.1, 0.1, 0.8]


def test_clients_that_move_alike_keep_their_prior():
    rows = [[1.0, 1.0], [5.0, 5.0], [0.1, 0.1]]
    assert weighed(FedMgda(1.0), sent(rows))[2]["lambda"].tolist() == pytest.approx([1 / 3] * 3, abs=1e-6)


def test_a_client_that_did_not_move_gets_nothing_and_the_others_share():
    weights, _, info = weighed(FedMgda(1.0, "samples"), sent([[0.0, 0.0], [3.0, 0.0], [0.0, 1.0]], [9, 5, 5]))
    assert info["lambda"].tolist() == pytest.approx([0, 0.5, 0.5])
    assert weights.tolist() == pytest.approx([0, 1 / 6, 0.5])
    assert weighed(FedMgda(), sent(torch.zeros(3, 2)))[0].tolist() == [0, 0, 0]
    without_data = weighed(FedMgda(0.2, "samples"), sent([[1.0, 0.0], [0.0, 1.0]], [0, 0]))
    assert without_data[2]["lambda"].tolist() == pytest.approx([0.5, 0.5])


@given(st.integers(1, 7), st.integers(2, 9), st.floats(0, 1), st.integers(0, 999))
@settings(max_examples=25)
def test_the_mix_is_a_share_in_the_box_and_shorter_than_the_prior_mix(clients, size, epsilon, seed):
    cohort = sent(Key.of(seed).normal(clients, size, dtype=torch.float64))
    weights, _, info = weighed(FedMgda(epsilon), cohort)
    found = info["lambda"]
    assert float(found.sum()) == pytest.approx(1)
    assert bool((found >= -1e-12).all())
    assert float((found - 1 / clients).abs().max()) <= epsilon + 1e-9
    step = tree.norm(tree.combine(cohort.payload["delta"], weights))
    prior = tree.norm(tree.combine(cohort.payload["delta"], 1 / clients / info["norms"]))
    assert float(step) <= float(prior) + 1e-6
    if epsilon == 1:  # a common descent direction: no client is asked to go backwards
        inner = tree.dots(cohort.payload["delta"], tree.combine(cohort.payload["delta"], weights))
        assert bool((inner >= -1e-6).all())


@pytest.mark.parametrize("settings", [{"epsilon": -0.1}, {"epsilon": 1.1}, {"prior": "sizes"}])
def test_refusals(settings):
    with pytest.raises(ValueError, match=r"epsilon must lie in \[0, 1\]|'sizes' is not allowed"):
        FedMgda(**settings)


def test_what_it_needs():
    assert FedMgda().requires == frozenset()
    assert FedMgda(prior="samples").requires == {"num_examples"}
    assert FedMgda().reads_payload
    assert FedMgda().weight_bound is None
