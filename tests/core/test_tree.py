"""Trees: one combine for all granularities, close to the float64 truth."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core import tree
from fedalloy.core.keys import Key


def stacked(clients: int, shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    scale = 10.0 ** (4 * Key.of(seed).fold("scale").uniform(clients, dtype=torch.float64) - 2)
    values = Key.of(seed).normal(clients, *shape, dtype=torch.float64)
    return (values * scale.reshape(-1, *[1] * len(shape))).to(dtype)


def reference(leaf: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact sum, and the sum of magnitudes that the error is measured against."""
    weight = weight.double().reshape(*weight.shape, *[1] * (leaf.dim() - weight.dim()))
    terms = leaf.double() * weight
    return terms.sum(0), terms.abs().sum(0)


def assert_close_to_truth(leaf: torch.Tensor, weight: torch.Tensor, bound: float = 1e-6) -> None:
    combined = tree.combine({"w": leaf}, weight)["w"]
    exact, magnitude = reference(leaf, weight)
    assert combined.dtype == leaf.dtype
    assert combined.shape == leaf.shape[1:]
    assert bool(((combined.double() - exact).abs() <= bound * magnitude).all())


@given(st.integers(1, 1000), st.integers(0, 2**32), st.booleans())
def test_combining_float32_clients_stays_within_the_promised_error(clients, seed, signed):
    leaf = stacked(clients, (37,), seed)
    weight = Key.of(seed).fold("w").uniform(clients, dtype=torch.float64) - (0.5 if signed else 0)
    assert_close_to_truth(leaf, weight)


@pytest.mark.parametrize(("clients", "columns"), [(1000, 3), (7, 200_001), (40, 66_000), (1, 5), (17, 1)])
def test_large_leaves_and_many_clients(clients, columns):
    assert_close_to_truth(stacked(clients, (columns,)), torch.full((clients,), 1 / clients, dtype=torch.float64))


def test_a_plain_float32_sum_would_not_be_good_enough():
    """The bound above can fail: adding a thousand clients one after another in float32 breaks it."""
    leaf = torch.full((1000, 1), 0.1)
    weight = torch.ones(1000, dtype=torch.float64)
    naive = torch.zeros(1)
    for row in leaf:
        naive = naive + row
    exact, magnitude = reference(leaf, weight)
    assert not bool(((naive.double() - exact).abs() <= 1e-6 * magnitude).all())
    assert_close_to_truth(leaf, weight)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("clients", [1, 5, 33])
def test_a_weight_may_be_any_prefix_of_the_leaf(clients, depth):
    leaf = stacked(clients, (4, 3, 2))
    weight = Key.of(2).uniform(*leaf.shape[:depth], dtype=torch.float64)
    assert_close_to_truth(leaf, weight)


def test_fine_weights_on_leaves_larger_than_a_chunk():
    leaf = stacked(700, (3, 2000))
    assert_close_to_truth(leaf, Key.of(1).uniform(700, 3))
    assert_close_to_truth(leaf, Key.of(1).uniform(700, 3, 2000))


def test_weights_by_leaf():
    leaves = {"a.w": stacked(3, (2, 2)), "b.w": stacked(3, (5,), 1)}
    weights = {"a.w": torch.tensor([1.0, 0.0, 0.0]), "b.w": torch.tensor([0.0, 0.0, 2.0])}
    combined = tree.combine(leaves, weights)
    assert torch.equal(combined["a.w"], leaves["a.w"][0])
    assert torch.equal(combined["b.w"], 2 * leaves["b.w"][2])


def test_scalar_leaves_and_views():
    matrix = stacked(4, (6,))
    weight = torch.tensor([0.1, 0.2, 0.3, 0.4])
    views = {"one": matrix[:, 0], "rest": matrix[:, 1:].reshape(4, 5)}
    combined = tree.combine(views, weight)
    assert combined["one"].shape == ()
    whole = tree.combine({"w": matrix}, weight)["w"]
    torch.testing.assert_close(torch.cat([combined["one"].reshape(1), combined["rest"]]), whole)


def test_integer_leaves_keep_their_dtype_and_are_rounded():
    counters = torch.tensor([10, 11, 12], dtype=torch.int64)
    combined = tree.combine({"n": counters}, torch.tensor([0.2, 0.3, 0.5]))
    assert combined["n"].dtype == torch.int64
    assert int(combined["n"]) == 11  # 11.3
    large = torch.tensor([2**40 + 1, 2**40 + 1])
    assert int(tree.combine({"n": large}, torch.tensor([0.5, 0.5]))["n"]) == 2**40 + 1


def test_a_weight_that_fits_no_leaf_is_refused():
    with pytest.raises(ValueError, match=r"shape \(3, 5\) is not a prefix of the leaf's \(3, 4\)"):
        tree.combine({"w": torch.ones(3, 4)}, torch.ones(3, 5))


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 2)])
def test_combine_is_differentiable_in_weights_and_leaves(shape):
    leaf = stacked(4, (3, 2), dtype=torch.float64).requires_grad_()
    weight = Key.of(1).uniform(*shape, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda w, x: tree.combine({"x": x}, w)["x"], (weight, leaf))


def test_combine_over_many_blocks_is_differentiable():
    leaf = stacked(40, (2,), dtype=torch.float64).requires_grad_()
    weight = Key.of(1).uniform(40, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda w, x: tree.combine({"x": x}, w)["x"], (weight, leaf))


@given(st.integers(1, 6), st.integers(0, 1000))
def test_dots_and_norms_match_the_flattened_matrix(clients, seed):
    leaves = {"a": stacked(clients, (3, 4), seed), "b": stacked(clients, (2,), seed + 1)}
    other = {"a": stacked(1, (3, 4), seed + 2)[0], "b": stacked(1, (2,), seed + 3)[0]}
    flat = torch.cat([leaf.reshape(clients, -1) for leaf in leaves.values()], 1).double()
    flat_other = torch.cat([leaf.reshape(-1) for leaf in other.values()]).double()
    torch.testing.assert_close(tree.dots(leaves, other), flat @ flat_other, rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(tree.norms(leaves), flat.norm(dim=1), rtol=1e-12, atol=0)
    torch.testing.assert_close(tree.dot(other, other).sqrt(), tree.norm(other))
    torch.testing.assert_close(tree.norm(other), flat_other.norm())


def test_norms_in_chunks_of_columns_and_clients():
    leaf = stacked(3, (700_000,))
    torch.testing.assert_close(tree.norms({"w": leaf}), leaf.double().norm(dim=1), rtol=1e-12, atol=0)


LEAVES = {"body.0.weight": stacked(3, (2, 2)), "body.0.bias": stacked(3, (2,), 1), "head.weight": stacked(3, (4,), 2)}


def test_lift_sees_the_whole_model_a_module_or_a_leaf():
    everything = tree.lift(tree.norms, LEAVES, "client")
    by_layer = tree.lift(tree.norms, LEAVES, "layer")
    by_leaf = tree.lift(tree.norms, LEAVES, "leaf")
    assert list(everything) == [""]
    assert list(by_layer) == ["body.0", "head"]
    assert list(by_leaf) == list(LEAVES)
    torch.testing.assert_close(everything[""] ** 2, by_layer["body.0"] ** 2 + by_layer["head"] ** 2)
    torch.testing.assert_close(by_layer["body.0"] ** 2, by_leaf["body.0.weight"] ** 2 + by_leaf["body.0.bias"] ** 2)


def test_spread_turns_scores_of_a_level_into_weights():
    by_layer = tree.spread({"body.0": torch.ones(3), "head": torch.zeros(3)}, LEAVES, "layer")
    assert not isinstance(by_layer, torch.Tensor)
    assert by_layer["body.0.bias"] is by_layer["body.0.weight"]
    combined = tree.combine(LEAVES, by_layer)
    torch.testing.assert_close(combined["body.0.weight"], LEAVES["body.0.weight"].sum(0))
    assert not bool(combined["head.weight"].any())
    assert tree.spread({"": torch.ones(3)}, LEAVES, "client").tolist() == [1, 1, 1]  # type: ignore[union-attr]


def test_add_keeps_the_dtype_of_the_first():
    mixed = {"w": torch.ones(2), "n": torch.tensor([3])}
    moved = tree.add(mixed, {"w": torch.ones(2, dtype=torch.float64), "n": torch.tensor([1.0])}, 0.5)
    assert moved["w"].dtype == torch.float32
    assert moved["n"].dtype == torch.int64
    assert tree.subtract(mixed, mixed)["w"].tolist() == [0, 0]


def test_stack_and_rows_are_inverse():
    trees = [{"w": torch.full((2,), float(i))} for i in range(3)]
    together = tree.stack(trees)
    assert torch.equal(tree.rows(together, 1)["w"], trees[1]["w"])
    assert tree.rows(together, torch.tensor([2, 0]))["w"].tolist() == [[2, 2], [0, 0]]
    assert tree.count(together) == 6
    assert tree.nbytes(together) == 24
