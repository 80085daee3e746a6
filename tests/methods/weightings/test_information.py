"""FedFa's weights: what accuracy and participation tell."""

from __future__ import annotations

from math import log2, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context, State
from fedalloy.methods.weightings.fedfa import Information

CTX = Context(1, 9, Key.of(0))


def cohort(accuracies, ids=None) -> Cohort:
    ids = ids or list(range(len(accuracies)))
    return Cohort(torch.tensor(ids), {}, {"accuracy_after": torch.tensor(accuracies, dtype=torch.float64)})


def weigh(rule: Information, given: Cohort, state: State | None = None) -> tuple[list[float], State]:
    found, after, _ = rule.weigh(given, state or rule.init(9), CTX)
    assert isinstance(found, torch.Tensor)
    return found.tolist(), after


def shares(values) -> list[float]:
    return [value / sum(values) for value in values]


def test_low_accuracy_counts_more():
    found, _ = weigh(Information(1.0, 0.0), cohort([0.1, 0.3, 0.4]))
    assert found == pytest.approx(shares([-log2(0.1 / 0.8), -log2(0.3 / 0.8), -log2(0.4 / 0.8)]))
    assert found == sorted(found, reverse=True)


def test_frequent_participation_counts_more_and_this_round_counts():
    rule, state = Information(0.0, 1.0), None
    for ids in ([0, 1], [0, 2]):
        _, state = weigh(rule, cohort([0.5, 0.5], ids), state)
    found, state = weigh(rule, cohort([0.9, 0.5], [0, 1]), state)
    assert state["participation"].tolist() == [3, 2, 1, 0, 0, 0, 0, 0, 0]
    assert found == pytest.approx(shares([-log2(1 - 3 / 5), -log2(1 - 2 / 5)]))


def test_both_parts_are_mixed_after_each_was_normalised():
    found, _ = weigh(Information(0.3, 0.7), cohort([0.25, 0.75]))
    accuracy = shares([-log2(0.25), -log2(0.75)])
    assert found == pytest.approx([0.3 * one + 0.7 * 0.5 for one in accuracy])


def test_a_logarithm_of_zero_gets_the_constant():
    found, _ = weigh(Information(1.0, 0.0, c=1e-6), cohort([0.0, 0.5, 0.5]))
    assert found == pytest.approx(shares([-log2(1e-6), 1.0, 1.0]))
    found, _ = weigh(Information(1.0, 0.0, c=0.25), cohort([0.0, 0.5, 0.5]))
    assert found == pytest.approx([0.5, 0.25, 0.25])


def test_one_participant_has_all_of_it_and_no_accuracy_at_all_tells_nothing():
    for accuracy in (0.0, 0.4, 1.0, nan):
        assert weigh(Information(), cohort([accuracy], [3]))[0] == [1.0]
    assert weigh(Information(), cohort([0.0, 0.0, 0.0]))[0] == pytest.approx([1 / 3] * 3)
    assert weigh(Information(), cohort([0.0, 1.0]))[0] == pytest.approx([0.75, 0.25])


def test_absent_clients_keep_their_count():
    rule = Information()
    _, state = weigh(rule, cohort([0.5, 0.5], [1, 4]))
    before = state["participation"].clone()
    _, after = weigh(rule, cohort([0.5], [2]), state)
    assert after["participation"].tolist() == [0, 1, 1, 0, 1, 0, 0, 0, 0]
    assert state["participation"].tolist() == before.tolist()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0, 1))
def test_weights_are_a_distribution_that_follows_its_clients(accuracies, alpha):
    rule, given = Information(alpha, 1 - alpha), cohort(accuracies)
    found, _ = weigh(rule, given)
    assert sum(found) == pytest.approx(1)
    assert min(found) >= 0
    turned, _ = weigh(rule, given.take(torch.arange(len(accuracies)).flip(0)))
    assert turned[::-1] == pytest.approx(found)


@pytest.mark.parametrize(
    ("alpha", "beta", "c"), [(0.5, 0.6, 1e-6), (-0.5, 1.5, 1e-6), (0.5, 0.5, 0.0), (0.5, 0.5, 1.0)]
)
def test_senseless_settings_are_refused(alpha, beta, c):
    with pytest.raises(ValueError, match="must"):
        Information(alpha, beta, c)
