"""Each client keeps something to train on and something to test on, with its classes in proportion."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.splits import Split, part_sizes, split

KEY = Key.of(0)


def one(labels: torch.Tensor, seed: int = 0, **options) -> Split:
    return split([torch.arange(len(labels))], labels, Key.of(seed), **options)[0]


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    seed=st.integers(0, 999),
    test=st.sampled_from([0.0, 0.05, 0.2, 0.5, 0.89]),
    valid=st.sampled_from([0.0, 0.1]),
)
def test_parts_are_a_disjoint_cover_that_leaves_something_to_train_on(labels, seed, test, valid):
    parts = one(torch.tensor(labels), seed, test_fraction=test, valid_fraction=valid)
    rows = torch.cat([parts.train, parts.valid, parts.test])
    assert sorted(rows.tolist()) == list(range(len(labels)))
    assert len(parts.train) >= 1
    assert len(parts.test) >= (1 if len(labels) >= 2 and test > 0 else 0)
    assert (len(parts.test) == 0) or test > 0
    assert (len(parts.valid) == 0) or valid > 0
    assert all(torch.equal(part, part.sort().values) for part in (parts.train, parts.valid, parts.test))


@given(counts=st.lists(st.integers(2, 30), min_size=1, max_size=6), seed=st.integers(0, 999), test=st.floats(0.1, 0.5))
def test_every_class_gives_its_share(counts, seed, test):
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[Key.of(seed).permutation(len(labels))]
    parts = one(labels, seed, test_fraction=test)
    fraction = len(parts.test) / len(labels)
    given_away = torch.bincount(labels[parts.test], minlength=len(counts))
    assert ((given_away - fraction * torch.tensor(counts)).abs() < 1 + 1e-9).all()


def test_validation_is_stratified_too():
    labels = torch.arange(4).repeat(50)
    parts = one(labels, test_fraction=0.2, valid_fraction=0.1)
    assert torch.bincount(labels[parts.valid]).tolist() == [5, 5, 5, 5]
    assert torch.bincount(labels[parts.test]).tolist() == [10, 10, 10, 10]


@given(seed=st.integers(0, 999))
def test_a_lonely_example_stays_in_training(seed):
    labels = torch.tensor([0] * 10 + [1] * 10 + [2])
    assert 20 in one(labels, seed, test_fraction=0.4, valid_fraction=0.4).train.tolist()


def test_real_targets_are_split_without_classes():
    parts = one(torch.linspace(-1, 1, 50), test_fraction=0.2)
    assert (len(parts.train), len(parts.test)) == (40, 10)


def test_every_example_is_tested_about_equally_often():
    labels = torch.tensor([0] * 7 + [1] * 3)
    often = torch.zeros(10)
    for seed in range(1000):
        often[one(labels, seed, test_fraction=0.3).test] += 1
    assert torch.allclose(often / 1000, torch.full((10,), 0.3), atol=0.06)


def test_a_client_is_split_by_its_number_and_key_alone():
    labels = torch.arange(60) % 3
    hands = [torch.arange(0, 20), torch.arange(20, 50), torch.arange(50, 60)]
    full, cut = split(hands, labels, KEY), split(hands[:2], labels, KEY)
    assert all(torch.equal(a.test, b.test) for a, b in zip(full, cut, strict=False))
    other = split(hands, labels, Key.of(1))
    assert not all(torch.equal(a.test, b.test) for a, b in zip(full, other, strict=True))
    twins = split([torch.arange(20), torch.arange(20)], labels, KEY)
    assert not torch.equal(twins[0].test, twins[1].test)


def test_natural_flags_are_the_test_part():
    held_out = torch.tensor([False, True, False, True, False, True, True])
    hands = [torch.tensor([0, 1, 2, 3]), torch.tensor([4]), torch.tensor([5, 6])]
    parts = split(hands, torch.zeros(7, dtype=torch.int64), KEY, test_fraction=0.9, held_out=held_out)
    assert [part.test.tolist() for part in parts] == [[1, 3], [], [6]]
    assert [part.train.tolist() for part in parts] == [[0, 2], [4], [5]]


def test_validation_comes_out_of_what_is_not_flagged():
    held_out = torch.arange(10) < 5
    parts = split([torch.arange(10)], torch.zeros(10, dtype=torch.int64), KEY, valid_fraction=0.2, held_out=held_out)[0]
    assert parts.test.tolist() == [0, 1, 2, 3, 4]
    assert len(parts.valid) == 2
    assert len(parts.train) == 3


@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=20), test=st.floats(0, 0.6), valid=st.floats(0, 0.39))
def test_sizes_of_parts_add_up(sizes, test, valid):
    parts = part_sizes(torch.tensor(sizes), test, valid)
    assert torch.stack(parts).sum(0).tolist() == sizes
    assert int(parts[0].min()) >= 1
    assert min(int(part.min()) for part in parts) >= 0
    assert ((parts[2] - torch.tensor(sizes) * test).abs() <= 1).all()


@pytest.mark.parametrize(("test", "valid"), [(1.0, 0.0), (-0.1, 0.0), (0.5, 0.5), (0.2, -0.1), (float("nan"), 0.0)])
def test_fractions_that_leave_nothing_are_refused(test, valid):
    with pytest.raises(SpecError, match="together below 1"):
        one(torch.zeros(3), test_fraction=test, valid_fraction=valid)
