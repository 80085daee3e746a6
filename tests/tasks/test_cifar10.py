"""CIFAR-10: the balanced subset, its scales, and the size of the personalisation experiments."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.cifar10 import Cifar10
from tests.tasks.real_data import use_real_data

KEY = Key.of(0)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every image has three plain colours: 0, 51 and 255 (the parts tell by their first pixel)."""
    for number, (part, count) in enumerate({"train_a": 4, "train_b": 6, "test": 2}.items()):
        x = np.zeros((count, 3, 32, 32), dtype=np.uint8)
        x[:, 1], x[:, 2], x[:, 0, 0, 0] = 51, 255, number
        np.savez(tmp_path / f"cifar10_{part}.npz", x=x, y=np.arange(count) % 10)
    monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))


def test_the_counts_and_the_means_of_the_whole_set(monkeypatch):
    use_real_data(Cifar10, monkeypatch)
    data = Cifar10("standard").load(KEY)
    assert data.test is not None
    assert torch.bincount(data.y).tolist() == [2000] * 10
    assert torch.bincount(data.test.y).tolist() == [400] * 10
    assert data.x.shape == (20000, 3, 32, 32)
    # Two fifths of the images have nearly the mean and spread of all.
    assert float(data.x.mean((0, 2, 3)).abs().max()) < 0.02
    assert float((data.x.std((0, 2, 3)) - 1).abs().max()) < 0.02


def test_both_parts_in_their_order(small):
    data = Cifar10().load(KEY)
    assert data.test is not None
    assert data.x[:, 0, 0, 0].mul(255).round().tolist() == [0] * 4 + [1] * 6
    assert data.y.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5]
    assert data.test.x.shape == (2, 3, 32, 32)


@pytest.mark.parametrize(
    ("scale", "colours"),
    [
        ("unit", [0, 0.2, 1]),
        ("symmetric", [-1, -0.6, 1]),
        ("standard", [-0.4914 / 0.2470, (0.2 - 0.4822) / 0.2435, (1 - 0.4465) / 0.2616]),
    ],
)
def test_scales_and_sides(small, scale, colours):
    for side in (32, 28):
        data = Cifar10(scale, side).load(KEY)
        assert data.x.shape == (10, 3, side, side)
        assert data.x[0, :, 9, 9].tolist() == pytest.approx(colours, abs=1e-5)


def test_a_task_of_the_personalisation_experiments(small):
    task = make_task({"kind": "cifar10", "side": 28}, "twocnn", "iid", 2)
    assert task.objective.init(KEY)[0]["classifier.hidden1.weight"].shape == (200, 3136)
    assert task.metrics == ("accuracy", "top5", "loss")


@pytest.mark.parametrize("arguments", [{"scale": "units"}, {"side": 0}])
def test_senseless_arguments_are_refused(arguments):
    with pytest.raises(SpecError, match="allowed"):
        Cifar10(**arguments)
