"""Synthetic samples added to the clients' training parts: every client gets all of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.arguments import checked
from fedalloy.core.errors import DataError, SpecError
from fedalloy.tasks.datasets.archive import read_arrays
from fedalloy.tasks.federation import FederatedTask, Pool


@checked("synthetic")
@dataclass(frozen=True)
class SyntheticPart:
    """The file of a labelled synthetic set (arrays ``x`` and ``y``, as exported), and how many of every class to take
    (None: all)."""

    path: str
    per_class: int | None = None

    def __post_init__(self) -> None:
        if self.per_class is not None and self.per_class < 1:
            raise SpecError(f"synthetic.per_class must be 1 or more, got {self.per_class}")

    def load(self) -> tuple[Tensor, Tensor]:
        """The samples in float32, the labels as class numbers."""
        try:
            arrays = read_arrays(Path(self.path), ("x", "y"))
            x, y = torch.from_numpy(arrays["x"]).float(), torch.from_numpy(arrays["y"]).long()
        except (DataError, TypeError) as cause:
            raise DataError(
                f"synthetic set {self.path} cannot be read ({cause}): it is an .npz file with the arrays x and y"
            ) from cause
        kept = first_of_each(y, self.per_class) if self.per_class else torch.arange(len(y))
        return x[kept], y[kept]


def as_part(given: str | Mapping[str, Any] | SyntheticPart) -> SyntheticPart:
    """A path, or a table of ``path`` and ``per_class``."""
    if isinstance(given, SyntheticPart):
        return given
    table = {"path": given} if isinstance(given, str) else dict(given)
    if unknown := sorted(table.keys() - {"path", "per_class"}):
        raise SpecError(f"synthetic: unknown key '{unknown[0]}'; allowed: path, per_class")
    if not isinstance(table.get("path"), str):
        raise SpecError("synthetic: needs 'path', the .npz file of the samples")
    return SyntheticPart(**table)


def mixed_in(task: FederatedTask, x: Tensor, y: Tensor) -> FederatedTask:
    """The task with these samples at the end of every client's training part; validation and test stay real."""
    train = task.train
    if x.shape[1:].numel() != train.x.shape[1:].numel() or train.y.is_floating_point():
        raise DataError(
            f"synthetic samples of shape {tuple(x.shape[1:])} do not fit examples of shape "
            f"{tuple(train.x.shape[1:])} with class labels"
        )
    x, y = x.reshape(len(x), *train.x.shape[1:]).to(train.x), y.to(train.y)
    hands = [slice(int(start), int(start + size)) for start, size in zip(train.start, train.size, strict=True)]
    size = train.size + len(y)
    pool = Pool(
        torch.cat([part for hand in hands for part in (train.x[hand], x)]),
        torch.cat([part for hand in hands for part in (train.y[hand], y)]),
        size.cumsum(0) - size,
        size,
    )
    return replace(task, train=pool)


def first_of_each(y: Tensor, count: int) -> Tensor:
    """The rows of the first ``count`` examples of every class.

    >>> first_of_each(torch.tensor([0, 0, 1, 0, 1]), 1).tolist()
    [0, 2]
    """
    rows = [(y == label).nonzero().flatten()[:count] for label in y.unique()]
    return torch.cat(rows).sort().values
