"""Means over rounds x clients: exact while small, bounded however much comes."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.results.grid import Grid

ROWS = st.lists(
    st.dictionaries(st.integers(0, 40), st.floats(-5, 5, width=32), max_size=8), min_size=1, max_size=40
)  # fmt: skip


def filled(rows: list[dict[int, float]], most: int) -> Grid:
    grid = Grid(most)
    for round, row in enumerate(rows, start=1):
        grid.add(round, list(row), list(row.values()))
    return grid


def expected(rows: list[dict[int, float]], tall: int, wide: int) -> np.ndarray:
    """The same by the book: all values of a bin, averaged."""
    clients = max((max(row, default=-1) for row in rows), default=-1) + 1
    bins: dict[tuple[int, int], list[float]] = {}
    for round, row in enumerate(rows):
        for client, value in row.items():
            bins.setdefault((round // tall, client // wide), []).append(value)
    shape = (max(1, math.ceil(len(rows) / tall)), max(1, math.ceil(clients / wide)))
    return np.array(
        [[np.mean(bins[r, c]) if (r, c) in bins else np.nan for c in range(shape[1])] for r in range(shape[0])]
    )


@given(ROWS, st.sampled_from([2, 4, 64]))
def test_a_grid_holds_the_means_of_its_bins(rows, most):
    grid = filled(rows, most)
    assert max(grid.means().shape) <= most
    np.testing.assert_allclose(grid.means(), expected(rows, grid.rounds_per_bin, grid.clients_per_bin), atol=1e-9)


@given(ROWS, st.integers(1, 5), st.integers(1, 5))
def test_shrinking_is_the_same_as_having_been_small(rows, rounds, clients):
    whole = filled(rows, 64)
    small = whole.shrink(rounds, clients)
    assert small.means().shape[0] <= rounds
    assert small.means().shape[1] <= clients
    np.testing.assert_allclose(small.means(), expected(rows, small.rounds_per_bin, small.clients_per_bin), atol=1e-9)
    np.testing.assert_allclose(whole.means(), expected(rows, 1, 1), atol=1e-9)


def test_what_is_not_a_number_is_left_out():
    grid = Grid()
    grid.add(1, [0, 1, 2], [1.0, None, math.nan])
    grid.add(2, [], [])
    assert grid.means().tolist()[0][0] == 1.0
    assert np.isnan(grid.means()[1]).all()
