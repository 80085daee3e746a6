"""FedBoosting against its formula, and what happens where scores are missing."""

from __future__ import annotations

from math import exp, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.weightings.boosting import Boosting, foreign_scores

CTX = Context(1, 10, Key.of(0))


def weigh(scores, cross) -> list[float]:
    stats = {"accuracy_after": torch.tensor(scores, dtype=torch.float64)}
    given = Cohort(torch.arange(len(scores)), {}, stats, torch.tensor(cross, dtype=torch.float64))
    found, state, _ = Boosting().weigh(given, {}, CTX)
    assert isinstance(found, torch.Tensor)
    assert state == {}
    return found.tolist()


def softmax(values) -> list[float]:
    return [exp(value) / sum(map(exp, values)) for value in values]


def test_home_and_abroad_by_hand():
    scores, cross = [0.9, 0.5, 0.1], [[1.0, 0.2, 0.4], [0.3, 1.0, 0.7], [0.0, 0.5, 1.0]]
    expected = softmax([home * away for home, away in zip(softmax(scores), [0.6, 1.0, 0.5], strict=True)])
    assert weigh(scores, cross) == pytest.approx(expected)


def test_the_own_validation_part_does_not_count():
    assert weigh([0.5, 0.5], [[1.0, 0.3], [0.3, 0.0]]) == pytest.approx([0.5, 0.5])


def test_who_has_no_validation_examples_judges_nobody():
    assert weigh([0.5, 0.5, 0.5], [[1.0, 0.6, nan], [0.6, 1.0, nan], [0.6, 0.6, nan]]) == pytest.approx([1 / 3] * 3)
    assert foreign_scores(torch.full((2, 2), nan)).tolist() == [0.0, 0.0]


def test_one_client_has_all_of_it():
    assert weigh([0.3], [[0.9]]) == [1.0]
    assert weigh([nan], [[nan]]) == [1.0]


@given(st.integers(1, 6), st.integers(0, 999))
def test_weights_are_a_distribution_that_follows_its_clients(clients, seed):
    random = torch.Generator().manual_seed(seed)
    cross = torch.rand(clients, clients, generator=random, dtype=torch.float64)
    stats = {"accuracy_after": torch.rand(clients, generator=random, dtype=torch.float64)}
    given, order = Cohort(torch.arange(clients), {}, stats, cross), torch.randperm(clients, generator=random)
    found, _, _ = Boosting().weigh(given, {}, CTX)
    turned, _, _ = Boosting().weigh(given.take(order), {}, CTX)
    assert isinstance(found, torch.Tensor)
    assert isinstance(turned, torch.Tensor)
    assert float(found.sum()) == pytest.approx(1)
    assert bool((found > 0).all())
    assert turned.tolist() == pytest.approx(found[order].tolist())


def test_a_cohort_without_scores_is_refused():
    stats = {"accuracy_after": torch.ones(2)}
    with pytest.raises(AlgorithmError, match="cross scores"):
        Boosting().weigh(Cohort(torch.arange(2), {}, stats), {}, CTX)
