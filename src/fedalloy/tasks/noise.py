"""Label noise: which class becomes which, as a transition matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.keys import Key

KINDS = ("pair", "symmetric")


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
    """Labels after one draw from their row of the transition matrix; label ``i`` depends on ``key`` and ``i`` only."""
    edges = matrix.cumsum(1)[labels]
    draws = key.uniform(len(labels), dtype=torch.float64) * edges[:, -1]
    return (edges <= draws.unsqueeze(1)).sum(1).clamp(max=matrix.shape[1] - 1).to(labels.dtype)
