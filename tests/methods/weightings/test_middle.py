"""Coordinate median and trimmed mean as weights on elements."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.methods.weightings.robust import Median, TrimmedMean, middle

CTX = Context(1, 50, Key.of(0))


def weigh(rule, *given):
    """Untyped on purpose: a test knows what kind of weights it looks at."""
    return rule.weigh(*given)


def sent(rows, dtype=torch.float64) -> Cohort:
    delta = torch.as_tensor(np.asarray(rows), dtype=dtype)
    return Cohort(torch.arange(len(delta)), {"delta": {"w": delta}}, {})


def combined(rule, cohort: Cohort) -> torch.Tensor:
    return tree.combine(cohort.payload["delta"], weigh(rule, cohort, {}, CTX)[0])["w"]


# Few values, so that most columns hold ties.
TABLES = st.integers(1, 9).flatmap(
    lambda clients: st.lists(
        st.lists(st.integers(-2, 2).map(float), min_size=clients, max_size=clients), min_size=1, max_size=6
    )
)


@given(TABLES)
def test_the_median_is_numpys(columns):
    rows = np.array(columns).T
    assert combined(Median(), sent(rows)).numpy() == pytest.approx(np.median(rows, axis=0), abs=1e-12)


@given(TABLES, st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.49]))
def test_the_trimmed_mean_is_that_of_the_sorted_middle(columns, trim):
    rows = np.array(columns).T
    clients = len(rows)
    cut = min(int(np.ceil(trim * clients - 1e-9)), (clients - 1) // 2)
    expected = np.sort(rows, axis=0)[cut : clients - cut].mean(axis=0)
    assert combined(TrimmedMean(trim), sent(rows)).numpy() == pytest.approx(expected, abs=1e-12)


@given(TABLES, st.integers(0, 4), st.randoms())
def test_weights_are_shares_and_equal_values_get_equal_weights(columns, cut, random):
    values = torch.tensor(columns, dtype=torch.float64).T
    cut = min(cut, (len(values) - 1) // 2)
    weights = middle(values, cut)
    assert bool((weights >= 0).all())
    assert torch.allclose(weights.sum(0), torch.ones(values.shape[1], dtype=torch.float64))
    order = list(range(len(values)))
    random.shuffle(order)
    assert torch.allclose(middle(values[order], cut), weights[order])
    for column, weight in zip(values.T.tolist(), weights.T.tolist(), strict=True):
        assert len({(value, round(w, 12)) for value, w in zip(column, weight, strict=True)}) == len(set(column))


def test_hostile_clients_cannot_pull_the_result_out():
    honest = np.random.default_rng(0).normal(size=(7, 30))
    for hostile in (1e30, -1e30):
        rows = np.vstack([honest, np.full((3, 30), hostile)])
        for rule in (Median(), TrimmedMean(0.3)):
            found = combined(rule, sent(rows)).numpy()
            assert bool((found >= honest.min(0)).all() & (found <= honest.max(0)).all())


def test_how_many_are_cut():
    def cut(rule, clients: int) -> int:
        return int(weigh(rule, sent(np.zeros((clients, 1))), {}, CTX)[2]["cut"])

    assert [cut(TrimmedMean(0.1), n) for n in (1, 2, 3, 10, 11, 30)] == [0, 0, 1, 1, 2, 3]
    assert [cut(Median(), n) for n in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]
    assert cut(TrimmedMean(0.0), 9) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_leaves_keep_their_shape_and_type(dtype):
    cohort = Cohort(torch.arange(3), {"delta": {"w": torch.rand(3, 2, 4).to(dtype), "b": torch.rand(3).to(dtype)}}, {})
    weights = weigh(Median(), cohort, {}, CTX)[0]
    assert not isinstance(weights, torch.Tensor)
    assert {name: tuple(leaf.shape) for name, leaf in weights.items()} == {"w": (3, 2, 4), "b": (3,)}
    assert all(leaf.dtype == dtype for leaf in weights.values())


@pytest.mark.parametrize("trim", [-0.1, 0.5, float("nan")])
def test_refusals(trim):
    with pytest.raises(ValueError, match=r"must lie in \[0, 0.5\)|expected a finite number"):
        TrimmedMean(trim)
