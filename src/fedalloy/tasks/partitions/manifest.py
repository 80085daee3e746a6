"""The record of a partition: counts per client and class, and a hash of the assigned rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Manifest:
    """``sizes`` is ``[K]``, ``class_counts`` ``[K, classes]``; ``digest`` changes if any example is assigned
    differently; ``unused`` is the number of examples without a client."""

    sizes: Tensor
    class_counts: Tensor
    digest: str
    unused: int = 0

    @staticmethod
    def of(assignment: Sequence[Tensor], labels: Tensor, classes: int) -> Manifest:
        """Describe an assignment.

        >>> Manifest.of([torch.tensor([0, 2]), torch.tensor([1])], torch.tensor([0, 1, 0]), 2).class_counts.tolist()
        [[2, 0], [0, 1]]
        """
        sizes = torch.tensor([len(rows) for rows in assignment], dtype=torch.int64)
        counts = _class_counts(assignment, sizes, labels, classes)
        return Manifest(sizes, counts, digest(assignment), len(labels) - int(sizes.sum()))

    def to_json(self) -> dict[str, Any]:
        """Plain numbers, lists and strings."""
        return {
            "clients": len(self.sizes),
            "sizes": self.sizes.tolist(),
            "class_counts": self.class_counts.tolist(),
            "unused": self.unused,
            "digest": self.digest,
        }


def digest(assignment: Sequence[Tensor]) -> str:
    """The SHA-256 of which rows each client has, in order; the same on every machine."""
    sizes = torch.tensor([len(rows) for rows in assignment], dtype=torch.int64)
    state = hashlib.sha256(f"{len(assignment)} clients".encode())
    for numbers in (sizes, *assignment):
        state.update(numbers.to(torch.int64).numpy().astype("<i8").tobytes())
    return state.hexdigest()


def _class_counts(assignment: Sequence[Tensor], sizes: Tensor, labels: Tensor, classes: int) -> Tensor:
    if classes == 0 or not assignment:
        return torch.zeros(len(assignment), classes, dtype=torch.int64)
    client = torch.arange(len(sizes)).repeat_interleave(sizes)
    cell = client * classes + labels[torch.cat(list(assignment))]
    return torch.bincount(cell, minlength=len(sizes) * classes).reshape(-1, classes)
