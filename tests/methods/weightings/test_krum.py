"""Krum and multi-Krum against their definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.weightings.krum import Krum, MultiKrum, krum_scores
from fedalloy.methods.weightings.pairs import gram, squared_distances

CTX = Context(1, 50, Key.of(0))


def weigh(rule, *given):
    """Untyped on purpose: a test knows what kind of weights it looks at."""
    return rule.weigh(*given)


def sent(rows, ids=None) -> Cohort:
    delta = torch.as_tensor(np.asarray(rows), dtype=torch.float64)
    ids = torch.arange(len(delta)) if ids is None else torch.tensor(ids)
    return Cohort(ids, {"delta": {"a.w": delta[:, :1], "b.w": delta[:, 1:]}}, {})


def weights(rule, cohort: Cohort) -> list[float]:
    return weigh(rule, cohort, {}, CTX)[0].tolist()


@given(st.integers(0, 3), st.integers(0, 5), st.integers(0, 999))
@settings(max_examples=30)
def test_scores_are_sums_over_the_nearest_neighbours(byzantine, more, seed):
    clients = 2 * byzantine + 3 + more
    rows = np.random.default_rng(seed).normal(size=(clients, 4))
    apart = ((rows[:, None] - rows[None]) ** 2).sum(-1)
    expected = [np.sort(np.delete(apart[i], i))[: clients - byzantine - 2].sum() for i in range(clients)]
    cohort = sent(rows)
    assert krum_scores(cohort, byzantine).numpy() == pytest.approx(expected)
    best = int(np.argmin(expected))
    assert weights(Krum(byzantine), cohort) == [float(i == best) for i in range(clients)]
    kept = set(np.argsort(expected)[: clients - byzantine].tolist())
    share = 1 / (clients - byzantine)
    assert weights(MultiKrum(byzantine), cohort) == pytest.approx([share * (i in kept) for i in range(clients)])


@pytest.mark.parametrize("size", [1e3, 1e12, 1e25])
def test_hostile_clients_are_never_chosen(size):
    honest = np.random.default_rng(1).normal(size=(7, 3))
    rows = np.vstack([honest, np.full((2, 3), size)])
    assert sum(weights(Krum(2), sent(rows))[:7]) == 1
    assert weights(MultiKrum(2), sent(rows)) == pytest.approx([1 / 7] * 7 + [0, 0])
    # The distances between honest clients keep their digits beside something huge.
    alone = krum_scores(sent(honest), 0)
    assert krum_scores(sent(rows), 2)[:7].numpy() == pytest.approx(alone.numpy())


def test_equal_scores_go_to_the_smaller_id():
    rows = [[1.0, 1.0]] * 4
    assert weights(Krum(), sent(rows, [7, 2, 9, 4])) == [0, 1, 0, 0]
    assert weights(MultiKrum(keep=2), sent(rows, [7, 2, 9, 4])) == [0, 0.5, 0, 0.5]


def test_small_rounds():
    assert weights(Krum(), sent([[1.0, 2.0]])) == [1]
    assert weights(MultiKrum(keep=5), sent([[1.0, 2.0], [1.0, 3.0]])) == [0.5, 0.5]
    assert weights(Krum(), sent([[0.0, 0.0]] * 3)) == [1, 0, 0]
    with pytest.raises(AlgorithmError, match="2 hostile clients only among at least 7, but the round has 6"):
        weights(Krum(2), sent(np.zeros((6, 2))))


def test_refusals():
    with pytest.raises(ValueError, match="at least 0, got -1"):
        Krum(-1)
    with pytest.raises(ValueError, match="at least 0, got -2"):
        MultiKrum(-2)
    with pytest.raises(ValueError, match="keep must be at least 1"):
        MultiKrum(1, 0)


def test_pairs_in_chunks_are_pairs_at_once(monkeypatch):
    leaves = {"a": torch.randn(4, 7, 3), "b": torch.randn(4)}
    flat = torch.cat([leaves["a"].reshape(4, -1), leaves["b"].reshape(4, 1)], 1).double()
    monkeypatch.setattr("fedalloy.core.tree._ELEMENTS", 20)
    cohort = Cohort(torch.arange(4), {"delta": leaves})
    assert torch.allclose(gram(cohort), flat @ flat.T)
    assert torch.allclose(squared_distances(cohort), torch.cdist(flat, flat).square())
