"""Weights on elements by compiled functions are those of torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedalloy.core.keys import Key
from fedalloy.core.native import elements, library
from fedalloy.methods.weightings import robust
from tests.engines.kernels import compiled, needs_compiler

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not compiled in this installation")


def table(clients: int, columns: int, seed: int = 0, apart: int = 3) -> Tensor:
    """Numbers with ties, and others between the rows."""
    wide = (4 * Key.of(seed).normal(clients, columns + apart)).round() / 4
    return wide[:, apart:]


@settings(max_examples=40, deadline=None)
@given(clients=st.integers(1, 40), columns=st.sampled_from([0, 1, 15, 1023, 2051]), seed=st.integers(0, 99))
def test_all_three_say_what_torch_says(clients, columns, seed):
    values = table(clients, columns, seed)
    assert says_the_same(values, Key.of(seed).uniform(clients, columns))


def says_the_same(values: Tensor, weights: Tensor) -> bool:
    """Weights and counts to the last bit, sums within the rounding of float64."""
    kept = max(1, len(values) // 2)
    low, high = values.min(0).values / 2, values.max(0).values / 2
    found, expected = elements.between(values, low, high, kept), robust._between(values, low, high, kept)
    assert found is not None
    same = torch.equal(found[0], expected[0]) and torch.equal(found[1].long(), expected[1])
    summed = elements.weighed(values, weights)
    assert summed is not None
    products = (values * weights).sum(0, dtype=torch.float64)
    same &= torch.allclose(summed, products.float(), rtol=1e-7, atol=1e-12)
    totals = elements.row_sums(values)
    assert totals is not None
    return same and torch.allclose(totals, values.sum(1, dtype=torch.float64), rtol=1e-12, atol=1e-9)


def test_what_is_not_a_number_is_treated_as_by_torch():
    values = table(9, 40)
    values[2, :7] = torch.nan
    values[3, 5:9] = torch.inf
    low, high = values[0].clone(), values[1].clone()
    low[6] = torch.nan
    found, expected = elements.between(values, low, high, 3), robust._between(values, low, high, 3)
    assert found is not None
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1].long(), expected[1])


def test_trimming_is_the_same_without_compiled_functions(monkeypatch):
    values = table(30, 500)
    with_them = [robust.middle(values, cut) for cut in (0, 3, 14)]
    monkeypatch.setattr(elements, "_LIBRARY", None)
    assert all(torch.equal(robust.middle(values, cut), one) for cut, one in zip((0, 3, 14), with_them, strict=True))


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(3, 4, dtype=torch.float64), torch.ones(4, 3).T, torch.ones(3), torch.ones(3, 4, requires_grad=True),
        torch.ones(3, 4, device="meta"),
    ],
)  # fmt: skip
def test_other_tables_are_left_to_torch(values):
    assert elements.row_sums(values) is None
    assert elements.weighed(values, values) is None
    if values.dim() == 2:
        assert elements.between(values, values[0], values[0], 1) is None


def test_the_default_dtype_changes_nothing():
    values, weights = table(9, 40), Key.of(1).uniform(9, 40)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert says_the_same(values, weights)
        summed = elements.weighed(values, weights)
    finally:
        torch.set_default_dtype(before)
    assert summed is not None
    assert summed.dtype == torch.float32


def test_nothing_is_read_inside_a_transformation():
    def nothing(rows: Tensor) -> Tensor:
        assert elements.row_sums(rows) is None
        return rows.sum()

    assert torch.vmap(nothing)(torch.ones(2, 3, 4)).tolist() == [12, 12]


FAULTS = {
    "values below the least": ("(row[j] >= least[j]) &", "1 &"),
    "values at the most are left out": ("row[j] <= most[j]", "row[j] < most[j]"),
    "values that are not counted": ("count[j] += one;", ";"),
    "a second piece of the weights is the first": ("weights + i * columns + from", "weights + i * columns"),
    "a second piece of the values is the first": ("stride + from, *weight", "stride, *weight"),
    "rows lie close together": ("rows + i * stride", "rows + i * columns"),
    "weights lie close together": ("weights + i * weight_stride", "weights + i * columns"),
    "weights are ignored": ("weight[j] * row[j]", "row[j]"),
    "the rest of a row": ("total += row[j];", ";"),
    "a lane": ("lane = 0; lane < 16; lane++) total", "lane = 1; lane < 16; lane++) total"),
}


@needs_compiler
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, tmp_path, monkeypatch):
    values, weights = table(7, 1100), Key.of(1).uniform(7, 1103)[:, 3:]
    assert says_the_same(values, weights)
    kernels = compiled(tmp_path, *FAULTS[fault], source="elements.c")
    monkeypatch.setattr(elements, "library", lambda: kernels)
    monkeypatch.setattr(elements, "_LIBRARY", elements._prepared())
    assert not says_the_same(values, weights)
