"""PneumoniaMNIST: both namings of its arrays, its scales, the real counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.keys import Key
from fedalloy.tasks.datasets.pneumoniamnist import PneumoniaMnist
from tests.tasks.real_data import use_real_data

KEY = Key.of(0)
NAMINGS = [
    ("x_train", "y_train", "x_test", "y_test"),
    ("train_images", "train_labels", "test_images", "test_labels"),
]


@pytest.mark.parametrize("names", NAMINGS)
def test_ours_and_the_published_names(names, tmp_path, monkeypatch):
    pixels = np.zeros((3, 28, 28), dtype=np.uint8)
    pixels[1], pixels[2] = 255, 51
    # MedMNIST publishes labels as a column.
    labels = np.array([[0], [1], [1]])
    np.savez(tmp_path / "pneumoniamnist.npz", **dict(zip(names, (pixels, labels, pixels[:2], labels[:2]), strict=True)))
    monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))
    data = PneumoniaMnist().load(KEY)
    assert data.y.tolist() == [0, 1, 1]
    assert data.x[:, 0, 3, 3].tolist() == pytest.approx([0, 1, 0.2])
    assert data.test is not None
    assert (data.bounds, data.test.x.shape) == ((0.0, 1.0), (2, 1, 28, 28))
    other = PneumoniaMnist(scale="symmetric", side=32, flat=True).load(KEY)
    assert other.x.shape == (3, 1024)
    assert other.x[:, 40].tolist() == pytest.approx([-1, 1, -0.6])
    assert other.bounds == (-1.0, 1.0)


def test_the_real_counts(monkeypatch):
    use_real_data(PneumoniaMnist, monkeypatch)
    data = PneumoniaMnist().load(KEY)
    assert torch.bincount(data.y).tolist() == [1214, 3494]
    assert data.test is not None
    assert torch.bincount(data.test.y).tolist() == [234, 390]
    assert float(data.x.mean()) == pytest.approx(0.5719, abs=1e-3)
    assert float(data.x.std()) == pytest.approx(0.1684, abs=1e-3)


def test_a_missing_file_says_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDALLOY_DATA", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match="python -m medmnist download"):
        PneumoniaMnist().load(KEY)


def test_wrong_settings_are_refused():
    wrong: dict[str, Any] = {"scale": "standard"}
    with pytest.raises(SpecError, match="is not allowed"):
        PneumoniaMnist(**wrong)
    with pytest.raises(SpecError, match="side"):
        PneumoniaMnist(side=0)
