"""The MNIST environments of the deep-unfolding experiments, with their fixed assignment of images to clients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.core.types import Examples
from fedalloy.tasks.datasets.base import Dataset, DatasetDefaults, DatasetLoader
from fedalloy.tasks.datasets.reading import read_npz

Environment = Literal["two", "one_client_large", "rare_labels", "alike"]
Scale = Literal["equal", "public_code"]
_FILES: dict[str, str] = {
    "two": "duw_mnist_2clients.npz",
    "one_client_large": "duw_mnist_5clients_env1.npz",
    "rare_labels": "duw_mnist_5clients_env2.npz",
    "alike": "duw_mnist_5clients_env3_4.npz",
}
_TEST = "mnist_test.npz"


@register("dataset", "duw_mnist")
@dataclass(frozen=True)
class DuwMnist(DatasetLoader):
    """Handwritten digits at 2 or 5 clients, exactly as distributed in the deep-unfolding experiments.

    ``environment``: ``one_client_large`` (I), ``rare_labels`` (II: clients with 2, 3, 5, 5 and 5 of the labels),
    ``alike`` (III and IV, which differ in epochs and links), ``two`` (the study of the variance). Grey values lie in
    [-1, 1]. The 10000 test images of MNIST are distributed evenly to the clients, so that the mean over clients is the
    accuracy on all of them. ``test_scale = "public_code"`` scales them to [-0.5, 0.5] instead, a mistake of the
    published code.
    """

    environment: Environment = "one_client_large"
    test_scale: Scale = "equal"

    summary: ClassVar[str] = "MNIST at 2 or 5 clients as in the deep-unfolding experiments, tested on the usual 10000"
    files: ClassVar[dict[str, str]] = {
        "duw_mnist_2clients.npz": "d973023e26ce110ae53042a2ded40e077526777c6b3529fb31d6d9a4fc2bcdea",
        "duw_mnist_5clients_env1.npz": "3794e7934015b31240520c0fd5b1165beca2106f275a345d96b309dd5895ec61",
        "duw_mnist_5clients_env2.npz": "3b28ee900ea2a90905a9cacbda57c8f3e7b976ca5cf63243c82e2a59cf8d2460",
        "duw_mnist_5clients_env3_4.npz": "aa77617846121c87cf3baa7b7600187cdedf985fd9f38a81b1ffa7990e5d70e1",
        "mnist_test.npz": "fe03ede69adf7bb5408464916ac4f1d4cd475510fdfb08add4409b34f0a435ec",
    }
    hint: ClassVar[str] = (
        "make them from the arrays of the published experiment: x uint8 [N, 28, 28] (its values u with "
        "(u/255 - 0.5)/0.5), y int64 [N], client int64 [N]; mnist_test.npz as for the dataset 'mnist'"
    )
    defaults: ClassVar[DatasetDefaults] = DatasetDefaults(model="duw_mlp")

    def __post_init__(self) -> None:
        for name, kind in (("environment", Environment), ("test_scale", Scale)):
            value = getattr(self, name)
            if value not in get_args(kind):
                raise SpecError(f"duw_mnist: unknown {name} '{value}': {nearest(str(value), get_args(kind))}")

    def load(self, key: Key) -> Dataset:
        """The clients' images, then the test images as their held-out parts; nothing is random."""
        train = read_npz(_FILES[self.environment], ("x", "y", "client"), self.hint)
        seen = read_npz(_TEST, ("x", "y"), self.hint)
        test = Examples(
            _scaled(torch.from_numpy(seen["x"]), 0.5 if self.test_scale == "equal" else 1.0),
            torch.from_numpy(seen["y"]).to(torch.int64),
        )
        x, y = _scaled(torch.from_numpy(train["x"]), 0.5), torch.from_numpy(train["y"]).to(torch.int64)
        return with_common_test(x, y, torch.from_numpy(train["client"]).to(torch.int64), test)


def with_common_test(x: Tensor, y: Tensor, owner: Tensor, test: Examples) -> Dataset:
    """A dataset whose clients are tested on equal shares of one balanced set.

    >>> test = Examples(torch.zeros(4, 1), torch.tensor([0, 1, 0, 1]))
    >>> with_common_test(torch.zeros(2, 1), torch.tensor([0, 1]), torch.tensor([0, 1]), test).owner
    tensor([0, 1, 0, 0, 1, 1])
    """
    clients = int(owner.max()) + 1
    # Distribute the examples sorted by class in turn, so that the shares are as balanced as the set.
    places = test.y.argsort(stable=True)
    takers = torch.empty(len(test), dtype=torch.int64)
    takers[places] = torch.arange(len(test)) % clients
    held_out = torch.arange(len(y) + len(test)) >= len(y)
    everything = torch.cat([y, test.y])
    classes = int(everything.max()) + 1
    return Dataset(torch.cat([x, test.x]), everything, classes, torch.cat([owner, takers]), held_out, test)


def _scaled(pixels: Tensor, spread: float) -> Tensor:
    return ((pixels.to(torch.float32) / 255 - 0.5) / spread).reshape(len(pixels), -1)
