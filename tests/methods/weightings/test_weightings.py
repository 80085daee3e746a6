"""The weightings against their formulas."""

from __future__ import annotations

import pytest
import torch

from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.weightings.nova import Nova
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.weightings.uniform import Uniform

CTX = Context(1, 10, Key.of(0))


def cohort(sizes, lengths=None, effective=None) -> Cohort:
    stats = {"num_examples": torch.tensor(sizes, dtype=torch.float64)}
    if lengths is not None:
        stats["step_norm"] = torch.tensor(lengths, dtype=torch.float64)
        stats["effective_steps"] = torch.tensor(effective or lengths, dtype=torch.float64)
    return Cohort(torch.arange(len(sizes)), {}, stats)


def weights(rule, given: Cohort) -> list[float]:
    found, state, _ = rule.weigh(given, rule.init(10), CTX)
    assert state == {}
    return found.tolist()


def test_samples_counts_examples_and_uniform_counts_clients():
    assert weights(Samples(), cohort([1, 3, 4])) == [0.125, 0.375, 0.5]
    assert weights(Uniform(), cohort([1, 3, 4, 8])) == [0.25] * 4


def test_nova_with_equal_lengths_is_samples():
    assert weights(Nova(), cohort([1, 3], [5, 5])) == [0.25, 0.75]


def test_nova_divides_by_each_length_and_multiplies_by_the_mean():
    found, _, info = Nova().weigh(cohort([1, 3], [2, 10]), {}, CTX)
    assert isinstance(found, torch.Tensor)
    effective = 0.25 * 2 + 0.75 * 10
    assert found.tolist() == pytest.approx([effective * 0.25 / 2, effective * 0.75 / 10])
    assert float(info["tau_eff"]) == effective
    assert float(sum(found)) != pytest.approx(1)


def test_nova_uses_plain_steps_with_a_proximal_term():
    assert weights(Nova(), cohort([1, 1], [2, 4], [3, 5])) == pytest.approx([4 * 0.5 / 2, 4 * 0.5 / 4])


def test_a_client_without_a_step_keeps_its_share_but_contributes_nothing():
    effective = (0 * 5 + 2 * 1 + 10 * 3) / 9
    assert weights(Nova(), cohort([5, 1, 3], [0, 2, 10])) == pytest.approx(
        [0.0, effective * 1 / 9 / 2, effective * 3 / 9 / 10]
    )
    assert weights(Nova(), cohort([5, 2], [0, 0])) == [0, 0]


def test_a_cohort_without_examples_has_weights_of_zero():
    assert weights(Samples(), cohort([0, 0])) == [0, 0]
    assert weights(Samples(), cohort([0.25, 0.75])) == [0.25, 0.75]
