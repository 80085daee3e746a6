"""Means over rounds x clients in bounded memory, for pictures of long runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
MOST = 256


class Grid:
    """Adds values of clients round by round. When an axis outgrows ``most`` bins, its bins are joined in pairs.

    >>> grid = Grid(most=2)
    >>> for round in (1, 2, 3, 4):
    ...     grid.add(round, [0], [float(round)])
    >>> grid.means().tolist(), grid.rounds_per_bin
    ([[1.5], [3.5]], 2)
    """

    def __init__(self, most: int = MOST) -> None:
        self.most = most
        self.rounds_per_bin = 1
        self.clients_per_bin = 1
        self.rounds = 0
        self.clients = 0
        self._sum: Array = np.zeros((1, 1))
        self._count: Array = np.zeros((1, 1))

    def add(self, round: int, clients: Sequence[int], values: Sequence[float | None]) -> None:
        """One round's values; None and NaN are left out. Rounds count from 1, clients from 0."""
        numbers = np.array(values, dtype=np.float64)
        ids = np.array(clients, dtype=np.int64)
        known = np.isfinite(numbers)
        self.rounds = max(self.rounds, round)
        ids, numbers = ids[known], numbers[known]
        self.clients = max(self.clients, int(ids.max(initial=-1)) + 1)
        self._make_space()
        row, places = (round - 1) // self.rounds_per_bin, ids // self.clients_per_bin
        width = self._sum.shape[1]
        self._sum[row] += np.bincount(places, numbers, width)
        self._count[row] += np.bincount(places, minlength=width)

    def means(self) -> Array:
        """``[bins of rounds, bins of clients]``; NaN where no client had a value."""
        rows = max(1, -(-self.rounds // self.rounds_per_bin))
        columns = max(1, -(-self.clients // self.clients_per_bin))
        found, counts = np.full((rows, columns), np.nan), self._count[:rows, :columns]
        inside = np.s_[: counts.shape[0], : counts.shape[1]]
        np.divide(self._sum[:rows, :columns], counts, out=found[inside], where=counts > 0)
        return found

    def shrink(self, rounds: int, clients: int) -> Grid:
        """The same values in at most ``rounds`` x ``clients`` bins."""
        small = Grid(self.most)
        small.rounds, small.clients = self.rounds, self.clients
        small.rounds_per_bin, small.clients_per_bin = self.rounds_per_bin, self.clients_per_bin
        small._sum, small._count = self._sum, self._count
        while -(-small.rounds // small.rounds_per_bin) > rounds:
            small._join(0)
        while -(-small.clients // small.clients_per_bin) > clients:
            small._join(1)
        return small

    def to_arrays(self) -> dict[str, Any]:
        """The state for :meth:`from_arrays`."""
        return vars(self)

    @staticmethod
    def from_arrays(kept: Mapping[str, Any]) -> Grid:
        """The grid of a stored state, in which numbers may have become 0-dimensional arrays."""
        grid = Grid()
        for name, value in kept.items():
            setattr(grid, name, value if np.ndim(value) else int(value))
        return grid

    def _make_space(self) -> None:
        while -(-self.rounds // self.rounds_per_bin) > self.most:
            self._join(0)
        while -(-self.clients // self.clients_per_bin) > self.most:
            self._join(1)
        needed = (-(-self.rounds // self.rounds_per_bin), -(-self.clients // self.clients_per_bin))
        grow = [(0, max(0, want - have)) for want, have in zip(needed, self._sum.shape, strict=True)]
        if any(more for _, more in grow):
            # Doubling, so that a long run is not copied every round.
            grow = [(0, max(more, have) if more else 0) for (_, more), have in zip(grow, self._sum.shape, strict=True)]
            self._sum, self._count = np.pad(self._sum, grow), np.pad(self._count, grow)

    def _join(self, axis: int) -> None:
        """Bins 0 and 1 become bin 0, 2 and 3 bin 1, and so on."""
        self._sum, self._count = _pairs(self._sum, axis), _pairs(self._count, axis)
        if axis == 0:
            self.rounds_per_bin *= 2
        else:
            self.clients_per_bin *= 2


def _pairs(values: Array, axis: int) -> Array:
    odd = [(0, values.shape[axis] % 2 if axis == this else 0) for this in (0, 1)]
    even = np.moveaxis(np.pad(values, odd), axis, 0)
    return np.ascontiguousarray(np.moveaxis(even[::2] + even[1::2], 0, axis))
