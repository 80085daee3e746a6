"""FEMNIST a-j: ten handwritten letters on 200 devices that share images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.datasets.femnist import Characters
from fedalloy.tasks.datasets.reading import read_npz

_FILE = "femnist_aj_200dev.npz"


@register("dataset", "femnist_aj")
@dataclass(frozen=True)
class FemnistLetters(Characters):
    """Which of the letters a to j is written: 200 devices with five letters each, after the FedProx experiments.

    Device u has the letters u, ..., u + 4 (mod 10), its size is lognormal. Devices share images: 17805 training and
    2175 test examples point into 3497 images; no device trains on a test image. The partition was made for fedalloy in
    that manner, because the original file was not available. The data's test flags are used instead of
    ``test_fraction``. ``polarity`` as in ``femnist``.
    """

    summary: ClassVar[str] = "19980 examples out of 3497 handwritten letters a-j on 200 devices, 10 classes, with split"
    files: ClassVar[dict[str, str]] = {_FILE: "28b491ebcbdb1549b60e0d4108027214d4326e0c82a78ee132720792549049e8"}
    hint: ClassVar[str] = (
        "make it from LEAF's femnist: x uint8 [N, 28, 28] and y 0-9 (the letters a-j), train_index and test_index into "
        "these, train_device and test_device (0-199)"
    )

    def load(self, key: Key) -> Dataset:
        """Every device's training examples, then those for testing; nothing is drawn."""
        tables = ("train_index", "test_index", "train_device", "test_device")
        arrays = read_npz(_FILE, ("x", "y", *tables), self.hint)
        rows, owner = (
            torch.from_numpy(np.concatenate([arrays[f"train_{c}"], arrays[f"test_{c}"]])).to(torch.int64)
            for c in ("index", "device")
        )
        held_out = torch.arange(len(rows)) >= len(arrays["train_index"])
        y = torch.from_numpy(arrays["y"]).to(torch.int64)[rows]
        names = tuple(f"device {number}" for number in range(int(owner.max()) + 1))
        return Dataset(self.pixels(arrays["x"])[rows], y, 10, owner, held_out, names=names)
