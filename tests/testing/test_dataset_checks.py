"""Loaders of data sets are held to their promises, and a loader that breaks one is found."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fedalloy.core.keys import Key
from fedalloy.tasks.datasets.base import Dataset, DatasetLoader
from fedalloy.tasks.datasets.digits import Digits
from fedalloy.tasks.datasets.synthetic import Synthetic
from fedalloy.testing import check_rule


@dataclass(frozen=True)
class Forgetful(DatasetLoader):
    """Draws from torch's own generator."""

    def load(self, key: Key) -> Dataset:
        return Dataset(torch.randn(40, 2), torch.arange(40) % 2, classes=2)


@dataclass(frozen=True)
class Unbounded(DatasetLoader):
    """Says that its features lie in [0, 1], and they do not."""

    def load(self, key: Key) -> Dataset:
        return Dataset(key.normal(40, 2), torch.arange(40) % 2, classes=2, bounds=(0.0, 1.0))


@dataclass(frozen=True)
class Steep(DatasetLoader):
    """Has features at which every loss overflows."""

    def load(self, key: Key) -> Dataset:
        return Dataset(torch.full((40, 2), 3e38), torch.arange(40) % 2, classes=2)


@pytest.mark.parametrize("loader", [Digits(), Synthetic(0.5, 0.5, devices=5)])
def test_a_data_set_of_ours_keeps_its_promises(loader):
    assert check_rule("dataset", loader) == []


@pytest.mark.parametrize(
    ("loader", "problem"),
    [
        (Forgetful(), "same again: a second load with the same key differs: x"),
        (Unbounded(), "bounds: features range from "),
        (Steep(), "learns: round 2: the training loss is None"),
    ],
)
def test_a_broken_promise_is_found(loader, problem):
    assert any(found.startswith(problem) for found in check_rule("dataset", loader))
