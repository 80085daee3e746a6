"""FEMNIST (LEAF): handwritten characters of 62 classes with their writers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import Dataset, DatasetDefaults, DatasetLoader
from fedalloy.tasks.datasets.reading import read_npz

Polarity = Literal["leaf", "mnist"]
_FILE = "femnist_writers.npz"


@dataclass(frozen=True)
class Characters(DatasetLoader):
    """Base of the character datasets: how pixels are read."""

    flat: bool = False
    polarity: Polarity = "leaf"

    def __post_init__(self) -> None:
        if self.polarity not in get_args(Polarity):
            raise SpecError(
                f"femnist: unknown polarity '{self.polarity}': {nearest(self.polarity, get_args(Polarity))}"
            )

    def pixels(self, grey: NDArray[Any]) -> Tensor:
        """Grey values in [0, 1], inverted for polarity ``mnist``."""
        x = torch.from_numpy(grey).to(torch.float32) / 255
        x = x if self.polarity == "leaf" else 1 - x
        return x.reshape(len(x), -1) if self.flat else x.reshape(len(x), 1, 28, 28)


@register("dataset", "femnist")
@dataclass(frozen=True)
class Femnist(Characters):
    """Which of 62 characters is written (0-9, A-Z, a-z): 300 writers as clients, with LEAF's own test parts.

    Grey values in [0, 1]. ``polarity = "leaf"``: dark ink on white, 1 is white; ``"mnist"``: inverted, as in MNIST. A
    task uses the data's test flags (a tenth of every writer's images) instead of ``test_fraction``. Four writers have
    no test image and so no score.
    """

    summary: ClassVar[str] = "45958 handwritten characters of 300 writers, 28x28 pixels, 62 classes, with their split"
    files: ClassVar[dict[str, str]] = {_FILE: "61f713ff149517dc8ae1e27e042dad67a0a6698955aea5888903353a77aac057"}
    hint: ClassVar[str] = (
        "get it with 'fedalloy data fetch femnist' (other writers), or make it from LEAF's femnist (non-iid, "
        "train share 0.9, repeated images dropped): x_train and x_test uint8 [N, 28, 28], y_train and y_test "
        "int64 (0-61), client_train and client_test (0-299), writer (names)"
    )
    defaults: ClassVar[DatasetDefaults] = DatasetDefaults(metrics=("accuracy", "top5", "loss"))

    def load(self, key: Key) -> Dataset:
        """The training images, then those for testing; nothing is drawn."""
        names = [f"{column}_{part}" for column in ("x", "y", "client") for part in ("train", "test")]
        arrays = read_npz(_FILE, (*names, "writer"), self.hint)
        x, y, client = (np.concatenate([arrays[f"{c}_train"], arrays[f"{c}_test"]]) for c in ("x", "y", "client"))
        held_out = torch.arange(len(y)) >= len(arrays["y_train"])
        labels, owner = (torch.from_numpy(column).to(torch.int64) for column in (y, client))
        return Dataset(self.pixels(x), labels, 62, owner, held_out, names=tuple(arrays["writer"].tolist()))
