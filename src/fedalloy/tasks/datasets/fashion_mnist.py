"""Fashion-MNIST: 60000 training and 10000 test images of clothes, in the form of MNIST."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedalloy.core.registry import register
from fedalloy.tasks.datasets.mnist import Mnist


@register("dataset", "fashion_mnist")
@dataclass(frozen=True)
class FashionMnist(Mnist):
    """Ten kinds of clothes in grey, as MNIST (Xiao et al. 2017, arXiv:1708.07747)."""

    summary: ClassVar[str] = "70000 grey images of clothes, 28x28 pixels, 10 classes, with the usual 10000 for testing"
    files: ClassVar[dict[str, str]] = {"fashion_mnist_train.npz": "", "fashion_mnist_test.npz": ""}
    hint: ClassVar[str] = (
        "get it with 'fedalloy data fetch fashion-mnist', or make both files from the four IDX files (arrays x: uint8 "
        "[N, 28, 28], y: int64 [N], order kept) and put them there"
    )
    prefix: ClassVar[str] = "fashion_mnist"
