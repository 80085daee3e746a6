"""A Dirichlet split in which clients share examples, as coded elsewhere. For measurements only, not for use."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedalloy.core.keys import Key
from fedalloy.tasks.partitions.base import Partition


@dataclass(frozen=True)
class SharedDirichlet(Partition):
    """Client after client draws its mix of classes and takes examples from the *front* of each class.

    The concentration is ``alpha`` times the class frequencies, so that it sums to ``alpha``. After a client has been
    served, the pool of a class is what it was given instead of what is left: the next clients get the same examples.
    """

    alpha: float = 0.5
    least: int = 5
    classes_each: int = 2

    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        drawing = np.random.default_rng(key.fold("shared").seed())
        pools = [(labels == label).nonzero().flatten() for label in labels.unique()]
        return [self._client(pools, len(labels) // clients, drawing) for _ in range(clients)]

    def _client(self, pools: list[Tensor], wanted: int, drawing: np.random.Generator) -> Tensor:
        """One client's rows; ``pools`` shrink to what it was given."""
        hand: list[Tensor] = []
        asked = 0
        while asked < wanted:
            counts = self._counts(pools, wanted, drawing)
            for label in np.flatnonzero(counts):
                pools[label] = pools[label][: counts[label]]
                hand.append(pools[label])
            asked += int(counts.sum())
        return torch.cat(hand).sort().values

    def _counts(self, pools: list[Tensor], wanted: int, drawing: np.random.Generator) -> np.ndarray:
        """The number of examples of every class to take at once; classes with too few are skipped."""
        frequencies = np.array([len(pool) for pool in pools], dtype=float)
        while True:
            mix = drawing.dirichlet(self.alpha * frequencies / frequencies.sum())
            if np.isnan(mix).any():
                continue
            counts = drawing.multinomial(wanted, mix)
            if (counts > 0).sum() >= self.classes_each:
                return np.where(counts > self.least, counts, 0)
