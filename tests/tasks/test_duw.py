"""The environments of the deep-unfolding experiments, and the stand-in for the one that could not be had."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.types import Examples
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.duw_mnist import DuwMnist, with_common_test
from tests.tasks.real_data import use_real_data

SIZES = {
    "two": [1760, 5739],
    "one_client_large": [1042, 1023, 862, 1184, 4459],
    "rare_labels": [6775, 6774, 6776, 6776, 6776],
    "alike": [1713, 1713, 1713, 1713, 1716],
}


@pytest.mark.parametrize("environment", SIZES)
def test_clients_hold_what_the_experiments_gave_them(environment, monkeypatch):
    use_real_data(DuwMnist, monkeypatch)
    task = make_task(DuwMnist(environment), test_fraction=0.0)
    assert task.train.size.tolist() == SIZES[environment]
    assert task.test.size.tolist() == [10000 // task.population] * task.population
    assert (float(task.train.x.min()), float(task.train.x.max())) == (-1.0, 1.0)
    assert (float(task.test.x.min()), float(task.test.x.max())) == (-1.0, 1.0)
    assert sum(leaf.numel() for leaf in task.objective.init(Key.of(0))[0].values()) == 118_282


def test_rare_labels_are_where_the_experiments_put_them(monkeypatch):
    use_real_data(DuwMnist, monkeypatch)
    task = make_task(DuwMnist("rare_labels"), test_fraction=0.0)
    labels = [set(task.data("train", torch.tensor([k])).client(0).y.tolist()) for k in range(5)]
    assert labels == [{2, 9}, {0, 4, 6}, *[{1, 3, 5, 7, 8}] * 3]


def test_the_public_codes_scaling_is_a_switch(monkeypatch):
    use_real_data(DuwMnist, monkeypatch)
    data = DuwMnist("alike", test_scale="public_code").load(Key.of(0))
    assert data.test is not None
    assert data.held_out is not None
    assert (float(data.test.x.min()), float(data.test.x.max())) == (-0.5, 0.5)
    assert float(data.x[~data.held_out].min()) == -1.0


def test_a_common_test_set_is_dealt_evenly_in_every_class():
    test = Examples(torch.arange(40.0).unsqueeze(1), torch.arange(40) % 4)
    data = with_common_test(torch.zeros(3, 1), torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]), test)
    assert data.held_out is not None
    assert data.owner is not None
    for client in (0, 1):
        mine = data.y[data.held_out & (data.owner == client)]
        assert torch.bincount(mine).tolist() == [5, 5, 5, 5]


def test_wrong_names_are_refused():
    cases: list[tuple[dict[str, Any], str]] = [
        ({"environment": "alik"}, "did you mean 'alike'"),
        ({"test_scale": "odd"}, "test_scale"),
    ]
    for wrong, says in cases:
        with pytest.raises(SpecError, match=says):
            DuwMnist(**wrong)


def test_the_stand_in_gives_clients_labels_of_their_own(monkeypatch):
    from fedalloy.tasks.datasets import dogs_standin

    train = Examples(torch.zeros(200, 2), torch.arange(200) % 10)
    monkeypatch.setattr(dogs_standin, "_features", lambda: (train, Examples(torch.zeros(20, 2), torch.arange(20) % 10)))
    one, again = (dogs_standin.DogsStandIn().load(Key.of(seed)) for seed in (1, 2))
    assert one.owner is not None
    assert one.held_out is not None
    assert again.owner is not None
    assert torch.equal(one.owner, again.owner)
    owners = [set(one.owner[(one.y == label) & ~one.held_out].tolist()) for label in range(10)]
    assert sum(len(found) for found in owners) <= 14
    with pytest.raises(SpecError, match="1 or more"):
        dogs_standin.DogsStandIn(clients=0)


def test_the_stand_ins_features_are_products_with_patches():
    from fedalloy.tasks.datasets.dogs_standin import _patches, _responses

    images = Key.of(0).normal(200, 3, 32, 32)
    filters = _patches(images)
    assert filters.shape == (192, 3, 6, 6)
    whole = torch.nn.functional.conv2d(images[:3], filters, stride=2).relu()
    expected = torch.nn.functional.adaptive_avg_pool2d(whole, 2).flatten(1)
    torch.testing.assert_close(_responses(images[:3], filters), expected, rtol=1e-4, atol=1e-5)
