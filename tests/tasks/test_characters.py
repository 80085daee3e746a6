"""FEMNIST: writers or devices as clients, the parts the data came with, and either polarity."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.femnist import Femnist
from fedalloy.tasks.datasets.femnist_aj import FemnistLetters
from tests.tasks.real_data import use_real_data

KEY = Key.of(0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Image number n has the grey value n everywhere."""
    grey = np.arange(9, dtype=np.uint8).reshape(9, 1, 1) * np.ones((9, 28, 28), dtype=np.uint8)
    np.savez(
        tmp_path / "femnist_writers.npz",
        x_train=grey[:6], y_train=np.arange(6) * 10, client_train=np.array([1, 0, 1, 0, 1, 0]),
        x_test=grey[6:], y_test=np.array([60, 61, 3]), client_test=np.array([0, 1, 1]), writer=np.array(["f1", "f2"]),
    )  # fmt: skip
    np.savez(
        tmp_path / "femnist_aj_200dev.npz",
        x=grey, y=np.arange(9), train_index=np.array([0, 1, 1, 2]), train_device=np.array([0, 0, 1, 1]),
        test_index=np.array([8, 8]), test_device=np.array([0, 1]),
    )  # fmt: skip
    monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))


def test_the_published_counts_of_the_writers(monkeypatch):
    use_real_data(Femnist, monkeypatch)
    data = Femnist().load(KEY)
    assert data.owner is not None
    assert data.held_out is not None
    assert data.names is not None
    assert data.x.shape == (45958, 1, 28, 28)
    assert (int((~data.held_out).sum()), int(data.held_out.sum())) == (41257, 4701)
    assert len(data.names) == len(set(data.names)) == 300
    assert torch.bincount(data.y[~data.held_out], minlength=62)[[0, 10, 61]].tolist() == [2861, 233, 233]
    assert torch.bincount(data.y[data.held_out], minlength=62)[[0, 10, 61]].tolist() == [334, 22, 27]
    assert int((torch.bincount(data.owner[data.held_out], minlength=300) == 0).sum()) == 4
    # White ground: most of an image is 1.
    assert float(data.x.median()) == 1.0


def test_the_published_counts_of_the_devices(monkeypatch):
    use_real_data(FemnistLetters, monkeypatch)
    data = FemnistLetters(polarity="mnist").load(KEY)
    assert data.owner is not None
    assert data.held_out is not None
    assert (int((~data.held_out).sum()), int(data.held_out.sum())) == (17805, 2175)
    assert len(torch.bincount(data.owner)) == 200
    for device in (0, 7, 199):
        letters = {(device + step) % 10 for step in range(5)}
        assert set(data.y[data.owner == device].tolist()) <= letters
    assert float(data.x.median()) == 0.0


def test_writers_keep_the_parts_they_came_with(small):
    task = make_task("femnist", "logistic", test_fraction=0.9)
    assert task.names == ("f1", "f2")
    assert task.train.size.tolist() == [3, 3]
    assert task.train.y.tolist() == [10, 30, 50, 0, 20, 40]
    assert task.test.y.tolist() == [60, 61, 3]
    assert task.test.x.mul(255).round().amax((1, 2, 3)).tolist() == [6, 7, 8]
    assert task.metrics == ("accuracy", "top5", "loss")


def test_devices_share_images_but_test_on_others(small):
    task = make_task("femnist_aj", "logistic")
    assert task.train.y.tolist() == [0, 1, 1, 2]
    assert torch.equal(task.train.x[1], task.train.x[2])
    assert task.test.y.tolist() == [8, 8]
    assert task.names == ("device 0", "device 1")


@pytest.mark.parametrize("loader", [Femnist, FemnistLetters])
def test_the_other_polarity_and_shape(small, loader):
    leaf, mnist = loader().load(KEY).x, loader(flat=True, polarity="mnist").load(KEY).x
    assert mnist.shape == (len(leaf), 784)
    torch.testing.assert_close(mnist.reshape(leaf.shape), 1 - leaf)
    with pytest.raises(SpecError, match="did you mean 'mnist'"):
        loader(polarity="mnst")
