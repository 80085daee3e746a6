"""Label noise, given by a transition matrix between classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedalloy.core.arguments import build, checked
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.keys import Key

KINDS = ("pair", "symmetric")


@checked("noise")
@dataclass(frozen=True)
class LabelNoise:
    """Each of the clients' training and validation labels is wrong with probability ``ratio``, and so are the labels of
    their test parts with ``test = "noisy"``.

    ``protocol = "paper"``: examples are assigned and split by their true labels, then corrupted; a global test set
    stays clean. ``protocol = "public_code"`` reproduces the code behind the published numbers: the kinds are swapped
    (``pair`` flips symmetrically and vice versa) and labels are corrupted before examples are assigned and split, so
    the clients' test labels are noisy regardless of ``test``.
    """

    kind: Literal["pair", "symmetric"]
    ratio: float
    test: Literal["clean", "noisy"] = "clean"
    protocol: Literal["paper", "public_code"] = "paper"

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio <= 1.0:
            raise SpecError(f"noise.ratio is {self.ratio}: allowed are values in [0, 1]")

    @property
    def first(self) -> bool:
        """Whether labels are corrupted before examples are assigned and split."""
        return self.protocol == "public_code"

    def apply(self, labels: Tensor, classes: int, key: Key) -> Tensor:
        """The corrupted labels; the draw for a label depends on its row number and the key only."""
        if labels.is_floating_point() or labels.dim() != 1 or classes < 2:
            raise SpecError("label noise needs one class number per example; leave 'noise' out for these data")
        swapped = {"pair": "symmetric", "symmetric": "pair"}[self.kind] if self.first else self.kind
        return corrupt(labels, transition(swapped, classes, self.ratio), key)


def as_noise(noise: LabelNoise | Mapping[str, Any] | None) -> LabelNoise | None:
    """Label noise given as a value or a table."""
    if noise is None or isinstance(noise, LabelNoise):
        return noise
    if not isinstance(noise, Mapping):
        raise SpecError(f"noise must be a table, such as {{'kind': 'symmetric', 'ratio': 0.2}}, got {noise!r}")
    made: LabelNoise = build(LabelNoise, dict(noise), "noise")
    return made


def transition(kind: str, classes: int, ratio: float) -> Tensor:
    """Row ``i`` holds the probabilities that label ``i`` becomes each class, ``[classes, classes]`` in float64.

    ``pair``: ``1 - ratio`` stays and ``ratio`` goes to the next class, cyclically. ``symmetric``: ``ratio`` is
    spread evenly over the other classes.

    >>> transition("pair", 3, 0.25)[2]
    tensor([0.2500, 0.0000, 0.7500], dtype=torch.float64)
    """
    if kind not in KINDS:
        raise SpecError(f"unknown label noise '{kind}': {nearest(kind, KINDS)}")
    if not 0.0 <= ratio <= 1.0 or classes < 2:
        raise SpecError(f"label noise of ratio {ratio} over {classes} classes: ratio is in [0, 1], classes at least 2")
    same = torch.eye(classes, dtype=torch.float64)
    other = same.roll(1, 1) if kind == "pair" else (1.0 - same) / (classes - 1)
    return (1.0 - ratio) * same + ratio * other


def corrupt(labels: Tensor, matrix: Tensor, key: Key) -> Tensor:
    """Replace each label by a draw from its row of ``matrix``; draw ``i`` depends on ``key`` and ``i`` only."""
    edges = matrix.cumsum(1)[labels]
    draws = key.uniform(len(labels), dtype=torch.float64) * edges[:, -1]
    return (edges <= draws.unsqueeze(1)).sum(1).clamp(max=matrix.shape[1] - 1).to(labels.dtype)
