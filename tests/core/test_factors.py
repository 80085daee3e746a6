"""Leaves kept as factors: the numbers of the leaves themselves."""

from __future__ import annotations

import torch

from fedalloy.core import tree
from fedalloy.core.contributions import Notes
from fedalloy.core.factors import FactoredTree, LowRank, first_of, stored
from fedalloy.core.gathering import Gathering
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Work

KEY = Key.of(3)


def made() -> tuple[FactoredTree, dict[str, torch.Tensor]]:
    """Four clients' leaves, of which one is kept as factors and arranged in another order."""
    left, right = KEY.fold("l").normal(4, 3, 2, dtype=torch.float64), KEY.fold("r").normal(4, 2, 6, dtype=torch.float64)

    def arrange(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.unflatten(2, (2, 3)).transpose(2, 3)

    bias = KEY.normal(4, 3, dtype=torch.float64)
    kept = FactoredTree({"w": LowRank(left, right, arrange), "b": bias})
    return kept, {"w": arrange(left @ right).contiguous(), "b": bias}


def test_sums_lengths_and_sizes_are_those_of_the_leaves():
    kept, whole = made()
    weights = torch.tensor([0.1, 0.5, 0.0, 2.0], dtype=torch.float64)
    sums, expected = tree.combine(kept, weights), tree.combine(whole, weights)
    assert list(sums) == list(expected)
    assert all(torch.allclose(sums[name], leaf) for name, leaf in expected.items())
    for exact in (True, False):
        found, right = Notes.of({"delta": kept}, exact=exact), Notes.of({"delta": whole}, exact=exact)
        assert torch.allclose(found.squares, right.squares)
        assert torch.equal(found.finite, right.finite)
    assert tree.nbytes(kept) == tree.nbytes(whole)
    assert not kept._whole
    assert {n: leaf.shape for n, leaf in first_of(kept).items()} == {n: leaf[0].shape for n, leaf in whole.items()}


def test_whatever_else_reads_a_leaf_gets_it():
    kept, whole = made()
    assert {name: leaf.shape for name, leaf in {**kept}.items()} == {name: leaf.shape for name, leaf in whole.items()}
    layers = {"w": torch.ones(4, dtype=torch.float64), "b": torch.zeros(4, dtype=torch.float64)}
    assert torch.allclose(tree.combine(kept, layers)["w"], whole["w"].sum(0))
    cohort = Cohort(torch.arange(4), {"delta": kept})  # type: ignore[dict-item]
    assert torch.allclose(cohort.take(torch.tensor([2])).payload["delta"]["w"], whole["w"][2:3])
    assert cohort.template("delta")["w"].shape == whole["w"].shape[1:]


def test_a_cohort_in_another_order_keeps_its_factors():
    kept, whole = made()
    gathering = Gathering(Work.of(torch.tensor([3, 5, 7, 9])), exact=True, like={"delta": first_of(whole)})
    ids = torch.tensor([7, 3, 9, 5])
    assert gathering.add(ids, {"delta": kept}, {"loss": ids.double()}) is None  # type: ignore[dict-item]
    cohort = gathering.cohort()
    assert isinstance(cohort.payload["delta"], FactoredTree)
    assert torch.equal(cohort.stats["loss"], torch.tensor([3.0, 5.0, 7.0, 9.0], dtype=torch.float64))
    order = torch.tensor([1, 3, 0, 2])
    assert torch.allclose(cohort.payload["delta"]["w"], whole["w"][order])
    assert torch.allclose(cohort.norms("delta"), tree.norms(whole)[order])


def test_a_factor_that_is_not_finite_is_noted():
    kept, _ = made()
    factors = stored(kept)["w"]
    assert isinstance(factors, LowRank)
    factors.right[2, 0, 0] = torch.inf
    notes = Notes.of({"delta": kept})
    assert notes.finite.all(0).tolist() == [True, True, False, True]
