"""Compiled draws and looks at numbers say the same as what they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core import statistics, tree
from fedalloy.core.keys import Key
from fedalloy.core.native import draws, library, numbers
from fedalloy.core.statistics import STATISTICS, SizeLimits

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not compiled in this installation")
NUMBERS = st.sampled_from([0.0, 0.5, 1.0, 3.0, 1e9, 2e9, -1.0, torch.nan, torch.inf, -0.0])


def both(work, monkeypatch):
    """What it gives with the compiled functions and without."""
    with_them = work()
    monkeypatch.setattr(draws, "COMPILED", False)
    monkeypatch.setattr(numbers, "_LIBRARY", None)
    without = work()
    monkeypatch.undo()
    return with_them, without


@pytest.mark.parametrize("length", [1, 2, 20, 32, 33, 64, 256, 300, 5000])
def test_draws_have_the_same_bits(length, monkeypatch):
    def drawn():
        key, some = Key.of(3).fold("round", 7), torch.tensor([5, 0, 9, -4])
        batch = key.each(some).fold("plan")
        valid = torch.tensor([0, 1, length, length // 2])
        return [
            batch.state, batch.each(torch.arange(3)).state, key.bits(length), batch.bits(2, length),
            batch.permutation(length), batch.permutation(length, valid=valid), batch.rows(1, 3).fold("x").state,
            batch.each(torch.arange(2)).permutation(length, valid=valid.unsqueeze(1).expand(-1, 2)),
            key.choice(10 * length, length), key.choice(length, length), key.choice(10**9, length),
        ]  # fmt: skip

    for one, other in zip(*both(drawn, monkeypatch), strict=True):
        assert torch.equal(one, other)


def test_draws_inside_transforms_are_left_to_torch():
    batch = Key.of(1).each(torch.arange(3)).state
    mapped = torch.func.vmap(lambda state: Key(state).fold("a").bits(2))(batch)
    assert torch.equal(mapped, Key(batch).fold("a").bits(2))
    found = torch.func.grad(lambda x: x * Key(batch).uniform(1, dtype=torch.float64).sum())(torch.tensor(1.0).double())
    assert torch.equal(found, Key(batch).uniform(1, dtype=torch.float64).sum())


def test_a_planted_fault_in_draws_is_seen(monkeypatch):
    key, right = Key.of(3).each(torch.arange(4)), draws.ordered
    assert torch.equal(key.permutation(9), key.bits(9).argsort(-1))
    monkeypatch.setattr(draws, "ordered", lambda states, length, valid: right(states + 1, length, valid))
    assert not torch.equal(key.permutation(9), key.bits(9).argsort(-1))


@settings(max_examples=150)
@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), min_size=1, max_size=3))
def test_ranges_are_judged_the_same(columns):
    names = ("num_examples", "step_norm", "train_loss", "accuracy_after")
    values = torch.tensor(columns, dtype=torch.float64).T.contiguous()
    stats = dict(zip(names, values, strict=True))
    needed = frozenset({"num_examples"})
    fast = statistics.all_in_range(stats, STATISTICS, needed)
    before, numbers._LIBRARY = numbers._LIBRARY, None
    try:
        assert statistics.all_in_range(stats, STATISTICS, needed) == fast
    finally:
        numbers._LIBRARY = before
    assert not fast or not bool(statistics.out_of_range(stats, STATISTICS, needed).any())


@settings(max_examples=150)
@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_sizes_are_judged_the_same(pairs, whole, first):
    told, known = torch.tensor(pairs, dtype=torch.float64).T.contiguous()
    limits = SizeLimits(1e9, None if first else known, whole)
    assert limits.look(told) == limits._look_closer(told)


@pytest.mark.parametrize("shape", [(17, 3), (100, 20, 30), (700, 1), (40, 0)])
def test_weighted_sums_of_many_clients(shape, monkeypatch):
    rows = Key.of(1).normal(*shape)
    weights = Key.of(2).uniform(shape[0], dtype=torch.float64)
    exact = torch.tensordot(weights, rows.double(), 1)
    bound = 1e-6 * torch.tensordot(weights, rows.double().abs(), 1)
    for found in both(lambda: tree.combine({"w": rows}, weights)["w"], monkeypatch):
        assert found.shape == exact.shape
        assert bool(((found - exact).abs() <= bound).all())


def test_gradients_still_flow_through_weighted_sums():
    weights = torch.ones(30, dtype=torch.float64, requires_grad=True)
    tree.combine({"w": torch.ones(30, 2)}, weights)["w"].sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [2.0] * 30


def test_clients_that_do_not_exist_have_no_place():
    start, size = torch.tensor([0, 4]), torch.tensor([4, 1])
    found = numbers.places(torch.tensor([1]), start, size)
    assert found is not None
    assert [one.tolist() for one in found] == [[4], [1]]
    for wrong in (-1, 2):
        assert numbers.places(torch.tensor([0, wrong]), start, size) is None
