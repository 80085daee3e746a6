"""Every client's features at the scale of its own training part, and of nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedalloy.core.errors import FedalloyError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart
from fedalloy.core.types import Examples
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.standardise import Scaler

PARTS: tuple[DataPart, ...] = ("train", "valid", "test")


def data_of(x: torch.Tensor, **more) -> Dataset:
    rows = torch.arange(len(x))
    return Dataset(x, rows % 2, 2, owner=rows % 3, **more)


def task_of(x: torch.Tensor, **options) -> FederatedTask:
    return make_task(data_of(x), standardise="client", valid_fraction=0.2, **options)


X = Key.of(1).normal(60, 4) * torch.tensor([1.0, 10.0, 100.0, 1000.0]) + torch.tensor([5.0, -7.0, 0.0, 1e4])


def test_training_parts_have_mean_zero_and_spread_one():
    task = task_of(X)
    for k in range(3):
        mine = task.everyone("train").client(k).x.double()
        torch.testing.assert_close(mine.mean(0), torch.zeros(4).double(), atol=1e-5, rtol=0)
        torch.testing.assert_close(mine.std(0, correction=0), torch.ones(4).double(), atol=1e-4, rtol=0)


def test_the_other_parts_take_the_scale_of_the_training_part():
    plain, scaled = make_task(data_of(X), valid_fraction=0.2), task_of(X)
    for k in range(3):
        train = plain.everyone("train").client(k).x.double()
        for part in PARTS[1:]:
            mine = plain.everyone(part).client(k).x.double()
            wanted = (mine - train.mean(0)) / train.std(0, correction=0)
            torch.testing.assert_close(scaled.everyone(part).client(k).x.double(), wanted, atol=1e-4, rtol=1e-4)
    assert scaled.global_test is not None
    assert torch.equal(scaled.global_test.x, scaled.test.x)


def differing(one: FederatedTask, other: FederatedTask) -> set[tuple[DataPart, int]]:
    """The parts of the clients that are not the same, bit for bit."""
    return {
        (part, k)
        for part in PARTS
        for k in range(3)
        if not torch.equal(one.everyone(part).client(k).x, other.everyone(part).client(k).x)
    }


@given(row=st.integers(0, 59), seed=st.integers(0, 5))
def test_nothing_leaks_from_a_row_but_into_its_own_clients_training(row, seed):
    """Change one row beyond recognition: if it is held out, nothing else changes; if it is trained on, no other
    client does."""
    changed = X.clone()
    changed[row] = 1e6
    before, after = task_of(X, seed=seed), task_of(changed, seed=seed)
    rows = make_task(data_of(torch.arange(60.0).unsqueeze(1)), valid_fraction=0.2, seed=seed)
    client = row % 3
    [home] = [part for part in PARTS if row in rows.everyone(part).client(client).x]
    if home == "train":
        assert differing(before, after) == {(part, client) for part in PARTS}
        return
    assert differing(before, after) == {(home, client)}
    mine = rows.everyone(home).client(client).x[:, 0] == row
    ours = (before.everyone(home).client(client).x != after.everyone(home).client(client).x).any(1)
    assert torch.equal(mine, ours)


def test_constant_features_and_single_rows_become_zero():
    scaler = Scaler.learn(torch.tensor([[3.3, 1.0], [3.3, 2.0], [3.3, 4.0], [9.0, 9.0]]), torch.tensor([3, 1]))
    assert scaler.spread[:, 0].tolist() == [1.0, 1.0]
    test = scaler.apply(torch.tensor([[3.3, 1.0], [5.3, 1.0], [9.0, 8.0]]), torch.tensor([2, 1]))
    torch.testing.assert_close(test[:, 0], torch.tensor([0.0, 2.0, 0.0]))
    assert float(test[2, 1]) == -1.0


def test_images_keep_their_shape():
    x = torch.rand(6, 1, 2, 2)
    scaler = Scaler.learn(x, torch.tensor([2, 4]))
    assert scaler.apply(x, torch.tensor([2, 4])).shape == x.shape


def test_what_cannot_be_scaled_is_told():
    tokens = data_of(torch.arange(60).reshape(30, 2))
    with pytest.raises(SpecError, match="no measurements"):
        make_task(
            tokens, lambda: nn.Sequential(nn.Embedding(60, 3), nn.Flatten(), nn.Linear(6, 2)), standardise="client"
        )
    # A model that takes no whole numbers gets them as measurements.
    assert make_task(tokens, standardise="client").train.x.is_floating_point()
    common = Examples(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(SpecError, match="common test set"):
        make_task(data_of(X, test=common), standardise="client")
    with pytest.raises(FedalloyError, match="did you mean 'client'"):
        make_task(data_of(X), standardise="clients")  # type: ignore[arg-type]
