"""Contributions in memory that the engine uses again in its next call, and those of them that stay in the shared memory
that the workers wrote them to and are summed by these processes.

Every process sums a range of columns over all clients, in the same chunks and order as a single process would: the
result depends neither on the number of processes nor on their speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.contributions import Notes
from fedalloy.core.errors import FedalloyError
from fedalloy.core.tree import Chunk
from fedalloy.core.types import Cohort, Payload, Tree, Weights
from fedalloy.engines.shared_memory import Layout, leaf_in

SHARED_FROM = 1 << 22
"""Leaves with at least this many numbers, over all clients, are summed by the processes; for smaller ones the
messages to them are not worth it."""

Columns = dict[str, tuple[int, int]]
"""The columns ``(begin, end)`` that one process sums, by leaf."""


class Overwritten(FedalloyError):
    """Contributions were used after the engine had begun its next round."""


class Counting(Protocol):
    """The owner of memory that is used again, with the number of times that it was."""

    calls: int


class Summing(Counting, Protocol):
    """The owner of the shared rows."""

    def sum_there(self, part: str, weights: list[float], columns: Sequence[Columns]) -> Tree | None:
        """The leaves of a part, each process summing its columns; None if the processes are not available."""


@dataclass(frozen=True)
class LentCohort(Cohort):
    """A cohort whose payload lies in memory that the engine uses again, valid until its next call: ``made`` is the
    number of the call that wrote it. ``resend`` and ``with_payload`` return a cohort without ``owner``, which is not
    checked."""

    owner: Counting | None = None
    made: int = 0

    def combine(self, part: str, weights: Weights) -> Tree:
        self._check()
        return super().combine(part, weights)

    def chunks(self, parts: Sequence[str]) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        self._check()
        return super().chunks(parts)

    def rows(self, part: str, ids: Tensor) -> Tree:
        self._check()
        return super().rows(part, ids)

    def stack(self, part: str) -> Tree:
        self._check()
        return super().stack(part)

    def take(self, index: Tensor) -> Cohort:
        self._check()
        return super().take(index)

    def resend(self, ids: Tensor, received: Payload) -> Self:
        self._check()
        return replace(super().resend(ids, received), owner=None)

    def with_stats(self, stats: Mapping[str, Tensor]) -> Self:
        return replace(self, stats={**self.stats, **stats})

    def with_payload(self, payload: Payload) -> Self:
        return replace(super().with_payload(payload), owner=None)

    def alone(self, part: str, name: str) -> Self:
        self._check()
        return super().alone(part, name)

    def keep(self) -> Cohort:
        self._check()
        copied = {part: tree.map_leaves(torch.clone, leaves) for part, leaves in self.payload.items()}
        return Cohort(self.ids, copied, self.stats, self.cross, self.notes)

    def _check(self) -> None:
        if self.owner is not None:
            check_current(self.owner, self.made)


@dataclass(frozen=True)
class SharedCohort(LentCohort):
    """A cohort whose payload is rows of shared memory. ``original`` is the payload that the processes have."""

    owner: Summing | None = None
    workers: int = 1
    original: Payload | None = None

    def combine(self, part: str, weights: Weights) -> Tree:
        self._check()
        stacked = self.payload[part]
        large = {name: leaf for name, leaf in stacked.items() if _is_large(leaf)}
        by_client = isinstance(weights, Tensor) and weights.dim() == 1
        # The processes have only the original rows, under the original names of the parts.
        if not large or not by_client or self.owner is None or self.payload is not self.original or self.workers < 2:
            return super().combine(part, weights)
        assert isinstance(weights, Tensor)
        columns = split_columns({name: leaf[0].numel() for name, leaf in large.items()}, self.workers)
        found = self.owner.sum_there(part, weights.tolist(), columns)
        if found is None:
            return super().combine(part, weights)
        rest = tree.combine({name: leaf for name, leaf in stacked.items() if name not in large}, weights)
        return {name: found[name] if name in large else rest[name] for name in stacked}


def check_current(owner: Counting, made: int) -> None:
    """Refuse to read rows that the engine has used for another round."""
    if owner.calls != made:
        raise Overwritten(
            "these contributions lay in memory that the engine has used again: keep() copies them before that"
        )


def _is_large(leaf: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.numel() >= SHARED_FROM


def split_columns(widths: dict[str, int], workers: int) -> list[Columns]:
    """Every leaf's columns in one range per worker, split only where ``tree.combine`` splits them too.

    >>> split_columns({"w": 100_000}, 2)
    [{'w': (0, 65536)}, {'w': (65536, 100000)}]
    """
    ranges: list[Columns] = [{} for _ in range(workers)]
    for name, width in widths.items():
        pieces = -(-width // tree.COLUMNS)
        cuts = [min(width, -(-pieces * worker // workers) * tree.COLUMNS) for worker in range(workers + 1)]
        for worker, (begin, end) in enumerate(pairwise(cuts)):
            if begin < end:
                ranges[worker][name] = (begin, end)
    return ranges


def sum_columns(rows: Tensor, sums: Tensor, layout: Layout, part: str, weights: list[float], columns: Columns) -> None:
    """In a worker: sum its columns over the first ``len(weights)`` rows and write the result into ``sums``."""
    weight = torch.tensor(weights, dtype=torch.float64)
    for slot in layout.slots:
        whose, name = slot.path
        if whose == part and name in columns:
            begin, end = columns[name]
            leaf = rows[: len(weights), slot.begin : slot.begin + slot.size].view(slot.dtype)
            leaf_in(sums, slot).view(-1)[begin:end].copy_(tree.combine({name: leaf[:, begin:end]}, weight)[name])


def plain_notes(notes: Notes) -> tuple[Any, ...]:
    """Notes as lists: sending a tensor through a pipe would open files and start a thread."""
    return notes.leaves, notes.squares.tolist(), notes.finite.tolist(), notes.negative.tolist()


def read_notes(told: tuple[Any, ...]) -> Notes:
    """The notes that ``plain_notes`` made into lists."""
    leaves, squares, finite, negative = told
    shape = (len(leaves), -1) if leaves else (0, 0)
    made = torch.tensor(squares, dtype=torch.float64), torch.tensor(finite, dtype=torch.bool)
    return Notes(leaves, *(one.reshape(shape) for one in (*made, torch.tensor(negative, dtype=torch.bool))))
