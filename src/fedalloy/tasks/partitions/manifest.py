"""The record of a partition: counts per client and class, hashes of the assigned and of the test rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class SplitRecord:
    """The numbers of training and test examples of all clients, and what tells two splits apart.

    ``labels`` is a hash of all labels: other examples, other hash. ``rows`` is a hash of the rows that are for testing.
    ``common_test`` says that the data come with a global test set of their own.
    """

    train: int
    test: int
    labels: str
    rows: str
    common_test: bool

    @staticmethod
    def of(labels: Tensor, train: Sequence[Tensor], test: Sequence[Tensor], common_test: bool) -> SplitRecord:
        """Describe a split; which client has a row does not matter."""
        rows = torch.cat(list(test)).sort().values
        counts = sum(map(len, train)), sum(map(len, test))
        seen = hashlib.sha256(labels.contiguous().numpy().tobytes()).hexdigest()
        return SplitRecord(*counts, seen, digest([rows]), common_test)


@dataclass(frozen=True, eq=False, repr=False)
class Manifest:
    """``sizes`` is ``[K]``, ``class_counts`` ``[K, classes]`` (``[K, 0]`` if an example has several targets);
    ``digest`` changes if any example is assigned differently; ``unused`` is the number of examples without a client;
    ``split`` is None where it is not known."""

    sizes: Tensor
    class_counts: Tensor
    digest: str
    unused: int = 0
    split: SplitRecord | None = None

    def __repr__(self) -> str:
        return f"<partition {self.digest[:12]}: {int(self.sizes.sum())} examples of {len(self.sizes)} clients>"

    @staticmethod
    def of(assignment: Sequence[Tensor], labels: Tensor, classes: int, split: SplitRecord | None = None) -> Manifest:
        """Describe an assignment.

        >>> Manifest.of([torch.tensor([0, 2]), torch.tensor([1])], torch.tensor([0, 1, 0]), 2).class_counts.tolist()
        [[2, 0], [0, 1]]
        """
        sizes = torch.tensor([len(rows) for rows in assignment], dtype=torch.int64)
        counts = _class_counts(assignment, sizes, labels, classes)
        return Manifest(sizes, counts, digest(assignment), len(labels) - int(sizes.sum()), split)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, lists and strings."""
        return {
            "clients": len(self.sizes),
            "sizes": self.sizes.tolist(),
            "class_counts": self.class_counts.tolist(),
            "unused": self.unused,
            "digest": self.digest,
            **({"split": asdict(self.split)} if self.split else {}),
        }


def digest(assignment: Sequence[Tensor]) -> str:
    """The SHA-256 of which rows each client has, in order; the same on every machine."""
    sizes = torch.tensor([len(rows) for rows in assignment], dtype=torch.int64)
    state = hashlib.sha256(f"{len(assignment)} clients".encode())
    for numbers in (sizes, *assignment):
        state.update(numbers.to(torch.int64).numpy().astype("<i8").tobytes())
    return state.hexdigest()


def _class_counts(assignment: Sequence[Tensor], sizes: Tensor, labels: Tensor, classes: int) -> Tensor:
    if classes == 0 or not assignment or labels.dim() > 1 or labels.is_floating_point():
        return torch.zeros(len(assignment), classes if labels.dim() == 1 else 0, dtype=torch.int64)
    client = torch.arange(len(sizes)).repeat_interleave(sizes)
    cell = client * classes + labels[torch.cat(list(assignment))]
    return torch.bincount(cell, minlength=len(sizes) * classes).reshape(-1, classes)
