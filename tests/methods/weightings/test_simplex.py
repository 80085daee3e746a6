"""Projections and quadratic programmes over the simplex, against what makes them optimal."""

from __future__ import annotations

import builtins

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.methods.weightings.simplex import minimise, project, require_solver

POINTS = st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(POINTS)
def test_the_projection_is_on_the_simplex_and_no_corner_is_nearer(values):
    point = doubles(*values)
    found = project(point)
    assert bool((found >= 0).all())
    assert float(found.sum()) == pytest.approx(1, abs=1e-12)
    # <point - found, corner - found> <= 0 for every corner: the definition of the nearest point.
    residual = point - found
    assert float(residual.max() - residual @ found) <= 1e-9 * max(1, float(point.abs().max()))


@given(POINTS, st.floats(-1e3, 1e3))
def test_the_projection_ignores_shifts_and_keeps_points_of_the_simplex(values, shift):
    point = doubles(*values)
    assert torch.allclose(project(point), project(point + shift), atol=1e-9)
    inside = point.softmax(0)
    assert torch.allclose(project(inside), inside, atol=1e-15)


def test_huge_entries_keep_their_digits():
    found = project(doubles(1e16, 0.25, -1e16))
    assert found.tolist() == [1, 0, 0]
    assert project(doubles(2**40 + 0.5, 2**40 + 0.25)).tolist() == [0.625, 0.375]


def programme(size: int, rank: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    key = Key.of(seed)
    root = key.fold("root").normal(size, rank, dtype=torch.float64)
    P = root @ root.T + 1e-3 * torch.eye(size, dtype=torch.float64)
    return P, 3 * key.fold("q").normal(size, dtype=torch.float64)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000), st.floats(0.001, 1.0))
@settings(max_examples=40)
def test_the_programme_is_solved_to_rounding(size, rank, seed, category):
    P, q = programme(size, rank, seed)
    start = Key.of(seed).fold("start").uniform(size, dtype=torch.float64).softmax(0)
    low, high = (start - category).clamp(min=0), (start + category).clamp(max=1)
    x = minimise(P, q, low, high)
    assert bool((x >= low - 1e-12).all() & (x <= high + 1e-12).all())
    assert float(x.sum()) == pytest.approx(1, abs=1e-12)
    slopes = P @ x + q
    can_give, can_take = x > low + 1e-9, x < high - 1e-9
    if bool(can_give.any()) and bool(can_take.any()):  # no weight can move from one entry to another with a gain
        assert float(slopes[can_give].max() - slopes[can_take].min()) <= 1e-9 * float(P.abs().max())


def test_known_minima():
    assert minimise(torch.eye(3), doubles(0, 0, 0)).tolist() == pytest.approx([1 / 3] * 3, abs=1e-15)
    assert minimise(torch.eye(3), doubles(0, 5, 9)).tolist() == [1, 0, 0]
    assert minimise(torch.eye(2), doubles(0, 0.5)).tolist() == [0.75, 0.25]
    assert minimise(torch.eye(1), doubles(-7)).tolist() == [1]
    assert minimise(torch.eye(2), doubles(0, 9), doubles(0, 0.25), doubles(0.75, 1)).tolist() == [0.75, 0.25]


def test_a_flat_programme_still_has_an_answer():
    found = minimise(torch.ones(3, 3), doubles(0, 0, 0))
    assert float(found.sum()) == pytest.approx(1)


def test_bounds_without_room_are_named():
    with pytest.raises(ValueError, match=r"allow sums from 0 to 0\.5"):
        minimise(torch.eye(2), doubles(0, 0), None, doubles(0.25, 0.25))


def test_a_missing_solver_says_what_to_install(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **named):
        if name == "qpsolvers":
            raise ModuleNotFoundError("no qpsolvers", name="qpsolvers")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(AlgorithmError, match="qpsolvers is not installed: pip install"):
        require_solver()
