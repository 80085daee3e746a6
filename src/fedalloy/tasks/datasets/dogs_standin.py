"""A stand-in for the Stanford Dogs experiment: CIFAR-10 seen through fixed filters, five clients, few labels each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.core.types import Examples
from fedalloy.tasks.datasets.base import Dataset, DatasetDefaults, DatasetLoader
from fedalloy.tasks.datasets.cifar10 import Cifar10
from fedalloy.tasks.datasets.duw_mnist import with_common_test
from fedalloy.tasks.partitions.dirichlet import Dirichlet

_FILTERS, _SIDE, _STRIDE, _CHUNK = 192, 6, 2, 500


@register("dataset", "dogs_standin")
@dataclass(frozen=True)
class DogsStandIn(DatasetLoader):
    """768 features of CIFAR-10 images at 5 clients with extreme label skew. This is NOT Stanford Dogs, whose features
    were not available, but a substitute: a linear model on frozen features.

    The features are the responses of 192 fixed patches of training images, averaged over quarters of the image and
    standardised. Labels are distributed by Dir(``alpha``), the same for every seed of a run; the 4000 test images are
    distributed evenly, so that the mean over clients is the accuracy on all of them.
    """

    clients: int = 5
    alpha: float = 0.0005
    deal: int = 0

    summary: ClassVar[str] = "stand-in for Stanford Dogs: 768 features of CIFAR-10 at 5 clients with extreme label skew"
    files: ClassVar[dict[str, str]] = dict(Cifar10.files)
    hint: ClassVar[str] = Cifar10.hint
    defaults: ClassVar[DatasetDefaults] = DatasetDefaults(model="logistic")

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise SpecError(f"dogs_standin: clients is {self.clients}; allowed: 1 or more")
        if self.alpha <= 0 or self.deal < 0:
            raise SpecError(
                f"dogs_standin: alpha is {self.alpha} and deal {self.deal}; alpha must be above 0, deal 0 or more"
            )

    def load(self, key: Key) -> Dataset:
        """The features, distributed by the seed ``deal`` and not by the seed of the run."""
        train, test = _features()
        rule = Dirichlet(self.alpha, min_samples=len(train) // (10 * self.clients))
        owner = torch.empty(len(train), dtype=torch.int64)
        for client, rows in enumerate(rule.assign(train.y, self.clients, Key.of(self.deal).fold("dogs_standin"))):
            owner[rows] = client
        return with_common_test(train.x, train.y, owner, test)


@lru_cache(maxsize=1)
def _features() -> tuple[Examples, Examples]:
    """Training and test features; cached, because they take a few seconds."""
    images = Cifar10("standard").load(Key.of(0))
    assert images.test is not None
    filters = _patches(images.x)
    train, test = _responses(images.x, filters), _responses(images.test.x, filters)
    mean, spread = train.mean(0), train.std(0).clamp(min=1e-6)
    return Examples((train - mean) / spread, images.y), Examples((test - mean) / spread, images.test.y)


def _patches(images: Tensor) -> Tensor:
    """Pieces of training images, each of mean zero and length one."""
    key = Key.of(0).fold("dogs_standin", "patches")
    rows, span = key.fold("image").choice(len(images), _FILTERS), images.shape[-1] - _SIDE + 1
    places = (key.fold("place").uniform(_FILTERS, 2) * span).to(torch.int64)
    cut = [
        images[row, :, top : top + _SIDE, left : left + _SIDE]
        for row, (top, left) in zip(rows.tolist(), places.tolist(), strict=True)
    ]
    filters = torch.stack(cut)
    filters = filters - filters.mean((1, 2, 3), keepdim=True)
    unit: Tensor = filters / filters.flatten(1).norm(dim=1).clamp(min=1e-6).reshape(-1, 1, 1, 1)
    return unit


def _responses(images: Tensor, filters: Tensor) -> Tensor:
    """Apply the filters as one matrix product with all patches, on a CPU many times faster than a convolution."""
    side = (images.shape[-1] - _SIDE) // _STRIDE + 1
    pooled = []
    for part in images.split(_CHUNK):
        columns = functional.unfold(part, _SIDE, stride=_STRIDE)
        found = (filters.flatten(1) @ columns).relu_().reshape(len(part), len(filters), side, side)
        pooled.append(functional.adaptive_avg_pool2d(found, 2).flatten(1))
    return torch.cat(pooled)
