"""Compiled draws and looks at numbers say the same as what they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedalloy.core import statistics, tree
from fedalloy.core.elements import combine_elements
from fedalloy.core.keys import Key
from fedalloy.core.native import draws, library, numbers, tracing
from fedalloy.core.statistics import STATISTICS, SizeLimits
from fedalloy.core.types import Cohort, Context, Tree
from fedalloy.methods.weightings.robust import TrimmedMean
from tests.engines.kernels import compiled, needs_compiler

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


def drawn(length: int) -> list[Any]:
    """Draws of every kind."""
    key, some = Key.of(3).fold("round", 7), torch.tensor([5, 0, 9, -4])
    batch = key.each(some).fold("plan")
    valid = torch.tensor([0, 1, length, length // 2])
    return [
        batch.state, batch.each(torch.arange(3)).state, key.bits(length), batch.bits(2, length),
        batch.permutation(length), batch.permutation(length, valid=valid), batch.rows(1, 3).fold("x").state,
        batch.each(torch.arange(2)).permutation(length, valid=valid.unsqueeze(1).expand(-1, 2)),
        key.choice(10 * length, length), key.choice(length, length), key.choice(10**9, length),
    ]  # fmt: skip


@pytest.mark.parametrize("length", [1, 2, 20, 32, 33, 64, 256, 300, 5000])
def test_draws_have_the_same_bits(length, monkeypatch):
    for one, other in zip(*both(lambda: drawn(length), monkeypatch), strict=True):
        assert torch.equal(one, other)


DRAW_FAULTS = {
    "a label is ignored": ("out[i] = mix(keys[i] ^ label);", "out[i] = mix(keys[i]);"),
    "labels are shifted": ("mix(labels[j] * GOLDEN + 1)", "mix(labels[j] * GOLDEN)"),
    "draws are shifted": ("out[i * many + j] = mix(keys[i] + (j + 1)", "out[i * many + j] = mix(keys[i] + j"),
    "equal numbers have one place": ("numbers[j] <= numbers[i]", "numbers[j] < numbers[i]"),
    "unused places are drawn too": ("long used = valid ? valid[i] : many;", "long used = many;"),
    "members are chosen twice": ("picks[i] = taken ? top : pick;", "picks[i] = pick;"),
}


@needs_compiler
@pytest.mark.parametrize("fault", DRAW_FAULTS)
def test_every_planted_fault_in_compiled_draws_is_seen(fault, tmp_path, monkeypatch):
    right = drawn(20)
    kernels = compiled(tmp_path, *DRAW_FAULTS[fault], source="draws.c")
    monkeypatch.setattr(draws, "library", lambda: kernels)
    monkeypatch.setattr(draws, "_LIBRARY", draws._prepared())
    assert not all(torch.equal(one, other) for one, other in zip(drawn(20), right, strict=True))


def numbers_are_right() -> bool:
    """Whether the compiled functions say what they should about some numbers."""
    limits = SizeLimits(10.0, torch.tensor([3.0, torch.nan], dtype=torch.float64), whole=True)
    told = [torch.tensor(pair, dtype=torch.float64) for pair in ([3, 4], [-1, 4], [3, 11], [3, 4.5], [2, 4])]
    judged = all(limits.look(one) == limits._look_closer(one) for one in told)
    ranges, whole = torch.tensor([0.0, 10.0, 1.0], dtype=torch.float64).reshape(3, 1, 1), torch.tensor([[[True]]])
    wrong = [torch.tensor([3.0, value], dtype=torch.float64) for value in (-1.0, 11.0, 0.5, 2.5, torch.nan)]
    strict = not any(numbers.in_range([one], ranges, whole[0]) for one in wrong)
    strict &= not numbers.in_range([wrong[2]], ranges, ~whole[0])
    rows, weights = Key.of(1).normal(5, 700), Key.of(2).uniform(5, dtype=torch.float64)
    found, start = numbers.combined(weights, rows), torch.tensor([0, 4])
    summed = found is not None and torch.allclose(found, (weights @ rows.double()).float(), rtol=0, atol=1e-6)
    apart = numbers.combined(weights, Key.of(1).normal(5, 700)[:, 20:650])
    summed = found is not None and summed and apart is not None and torch.equal(apart, found[20:650])
    places = numbers.places(torch.tensor([1]), start, torch.tensor([4, 1]))
    placed = places is not None and [one.item() for one in places] == [4, 1]
    missing = numbers.places(torch.tensor([2]), start, torch.tensor([4, 1])) is None
    return judged and strict and summed and placed and missing


NUMBER_FAULTS = {
    "sizes below 0": ("told[i] >= 0 && ", ""),
    "sizes above the limit": ("told[i] <= most && ", ""),
    "sizes that are not whole": ("(!whole || told[i] == floor(told[i]))", "1"),
    "sizes that changed": ("same &= ", "1 || "),
    "sizes that are not known": ("all &= told[i] == known[i];", ";"),
    "numbers below their range": ("value >= low[s] && ", "value == value && "),
    "numbers above their range": ("value <= high[s] && ", ""),
    "numbers below the least": ("!(value > 0 && value < least[s])", "1"),
    "numbers that are not whole": ("good &= !whole[s] || value == floor(value);", ";"),
    "weights are ignored": ("sums[j] += weight * row[j]", "sums[j] += row[j]"),
    "a second piece is the first": ("rows + i * stride + from", "rows + i * stride"),
    "rows with others between them": ("rows + i * stride", "rows + i * columns"),
    "the size of another client": ("sizes[i] = size[ids[i]];", "sizes[i] = size[i];"),
    "a client that does not exist": ("ids[i] >= population", "ids[i] > population"),
}


@needs_compiler
@pytest.mark.parametrize("fault", NUMBER_FAULTS)
def test_every_planted_fault_in_compiled_looks_and_sums_is_seen(fault, tmp_path, monkeypatch):
    assert numbers_are_right()
    kernels = compiled(tmp_path, *NUMBER_FAULTS[fault], source="numbers.c")
    monkeypatch.setattr(numbers, "library", lambda: kernels)
    monkeypatch.setattr(numbers, "_LIBRARY", numbers._prepared())
    assert not numbers_are_right()


def test_an_answer_about_sizes_that_were_written_since_is_not_given_again():
    limits, sizes = SizeLimits(10.0), torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert limits.look(sizes)[0]
    sizes[1] = 11.0
    assert not limits.look(sizes)[0]


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


def test_ids_in_another_form_are_left_to_torch():
    start, size = torch.tensor([0, 4]), torch.tensor([4, 1])
    assert numbers.places(torch.tensor([[0], [1]]), start, size) is None
    assert numbers.places(torch.tensor(1), start, size) is None


def test_weighted_sums_do_not_depend_on_the_default_dtype():
    rows, weights = Key.of(1).normal(20, 600), Key.of(2).uniform(20, dtype=torch.float64)
    expected = tree.combine({"w": rows}, weights)["w"]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = tree.combine({"w": rows}, weights)["w"]
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_weights_on_elements_do_not_depend_on_the_default_dtype():
    cohort = Cohort(torch.arange(20), {"delta": {"w": Key.of(1).normal(20, 600)}})

    def trimmed() -> Tree:
        round = TrimmedMean(0.2).open(cohort, {}, Context(1, 20, Key.of(2)))
        return combine_elements(round, cohort, "delta", ("delta",))[1]["delta"]

    expected, before = trimmed()["w"], torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = trimmed()["w"]
    finally:
        torch.set_default_dtype(before)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_weights_that_are_not_one_per_row_are_left_to_torch():
    rows = Key.of(1).normal(20, 600)
    assert numbers.combined(torch.ones(5), rows) is None
    assert numbers.combined(torch.ones(20, 1), rows) is None
    with pytest.raises(RuntimeError):
        tree.combine({"w": rows}, torch.ones(5))
    told = torch.ones(3, dtype=torch.float64)
    assert numbers.look_at_sizes(told, told[:2], 9.0, True) is None


def test_more_members_than_there_are_never_reach_the_compiled_function(monkeypatch):
    """It would divide by zero, which ends the process."""
    monkeypatch.setattr(draws, "_LIBRARY", None)
    assert draws.chosen(1, 2, 3) is None
    assert draws.chosen(1, 2, -1) is None


def test_sizes_of_another_type_are_read_as_they_are():
    batch, valid = Key.of(1).each(torch.arange(3)), torch.tensor([2, 3, 5])
    for length in (5, 50):
        expected = batch.permutation(length, valid=valid)
        assert torch.equal(batch.permutation(length, valid=valid.int()), expected)


def test_nothing_is_compiled_where_new_tensors_are_not_on_the_cpu():
    """The compiled functions write into new tensors, and those of another device have no address here."""
    with torch.device("cpu"):
        assert not tracing()
    with torch.device("meta"):
        assert tracing()
        assert Key.of(1).uniform(4).is_meta
