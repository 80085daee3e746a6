"""Contributions that do not fit into memory: written to a file as they arrive, and read in pieces over parameters.

The pieces are cut where ``core.tree`` cuts in memory, so that the numbers are the same. Only one client's row, or one
piece, is in memory at a time; the page cache of the system holds what it has storage for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.contributions import Contributions, Notes
from fedalloy.core.errors import SpecError
from fedalloy.core.gathering import Storage
from fedalloy.core.tree import Chunk
from fedalloy.core.types import Payload, Stats, Tree, Weights
from fedalloy.engines import processes
from fedalloy.engines.freed_memory import return_large_blocks
from fedalloy.engines.mapped_rows import MOST_BYTES, MappedRows, slab_width
from fedalloy.engines.shared_memory import Layout, Slot

_FEW = 512
_WRITTEN = 16 << 20
"""Bytes after whose writing their memory is given back."""
LIMIT_MB = 4000.0
"""Contributions of a round above this size are kept on disk."""
log = logging.getLogger("fedalloy")


@dataclass(frozen=True)
class StorageLimit:
    """Where the contributions of a round are kept: in memory up to ``limit_mb``, above it in a file below ``folder``
    (default: the system's temporary folder). Those on a GPU always stay there."""

    limit_mb: float = LIMIT_MB
    folder: Path | None = None

    def open(self, clients: int, like: Mapping[str, Tree]) -> FileRows | None:
        """Rows on disk for contributions such as ``like``; None if they are kept in memory."""
        size = sum([leaf.numel() * leaf.element_size() for leaves in like.values() for leaf in leaves.values()])
        if clients * size <= self.limit_mb * 1e6 or not size:
            return None
        if any(leaf.device.type != "cpu" for leaves in like.values() for leaf in leaves.values()):
            return None
        return_large_blocks()
        layout = Layout.of(like)
        log.info("the contributions of a round (%.1f GB) are kept on disk", clients * layout.size / 1e9)
        return FileRows(MappedRows(clients, layout, self.folder), self)


@dataclass(frozen=True)
class FileRows:
    """Rows on disk that are being filled (:class:`fedalloy.core.gathering.Rows`)."""

    rows: MappedRows
    storage: StorageLimit

    def put(self, places: Tensor, payload: Payload) -> None:
        """Write the rows of a block of clients."""
        size = 0
        for slot in self.rows.layout.slots:
            part, name = slot.path
            self.rows.leaf(slot).index_copy_(0, places, payload[part][name].detach())
            size += len(places) * slot.size
            if size > _WRITTEN:
                self.rows.written()
                size = 0
        self.rows.written()

    def cohort(self, ids: Tensor, places: Tensor, stats: Stats, notes: Notes) -> MappedContributions:
        """The contributions in these rows."""
        parts = {slot.path[0]: slot.path[0] for slot in self.rows.layout.slots}
        parts |= {path[0]: path[0] for path in self.rows.layout.empty}
        return MappedContributions(ids, self.rows, places, parts, stats, None, notes, self.storage)


def _always() -> None:
    """The rows of a round have a file of their own."""


@dataclass(frozen=True)
class MappedContributions(Contributions):
    """The contributions of clients whose rows are at ``places`` in a file. ``parts_there`` are the names of the parts
    in the file; ``late`` marks clients whose contribution is ``given`` instead. ``check`` raises once the rows are
    used for another round."""

    ids: Tensor
    kept: MappedRows
    places: Tensor
    parts_there: Mapping[str, str]
    stats: Stats
    cross: Tensor | None
    noted: Notes
    storage: StorageLimit
    late: Tensor | None = None
    given: Payload = field(default_factory=dict)
    check: Callable[[], None] = _always

    @property
    def notes(self) -> Notes:
        return self.noted

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.parts_there)

    @property
    def payload(self) -> Payload:  # type: ignore[override]
        """Everything that was sent, as views of a file."""
        return {part: self.stack(part) for part in self.parts_there}

    def template(self, part: str) -> Tree:
        return {slot.path[1]: torch.empty((), dtype=slot.dtype).expand(slot.shape) for slot in self._slots(part)}

    def select(self, ids: Tensor) -> Self:
        index = torch.isin(self.ids, ids).nonzero().flatten()
        cross = None if self.cross is None else self.cross[index][:, index]
        stats = {name: values[index] for name, values in self.stats.items()}
        late = None if self.late is None else self.late[index]
        chosen = replace(self, ids=self.ids[index], places=self.places[index], stats=stats, cross=cross, late=late)
        return replace(chosen, noted=self.noted.take(index))

    def resend(self, ids: Tensor, received: Payload) -> Self:
        if self.late is not None:  # what was given before may differ
            return self._rewritten().resend(ids, received)
        late = torch.isin(self.ids, ids)
        instead_of = Notes.alone({part: received[part] for part in self.parts_there})
        noted = self.noted.replaced(late, instead_of)
        given = {there: received[part] for part, there in self.parts_there.items()}
        return replace(self, late=late, given=given, noted=noted)

    def with_stats(self, stats: Mapping[str, Tensor]) -> Self:
        return replace(self, stats={**self.stats, **stats})

    def with_cross(self, cross: Tensor) -> Self:
        return replace(self, cross=cross)

    def alone(self, part: str, name: str) -> Self:
        return replace(self, parts_there={name: self.parts_there[part]}, noted=self.noted.alone_as(part, name))

    def combine(self, part: str, weights: Weights) -> Tree:
        self.check()
        small = {slot.path[1]: self._whole(slot) for slot in self._slots(part) if self._is_small(slot)}
        found = tree.combine(small, _of_leaves(weights, small)) if small else {}
        for slot in self._slots(part):
            name = slot.path[1]
            if name not in found:
                found[name] = self._combine_leaf(slot, weights)
        return {slot.path[1]: found[slot.path[1]] for slot in self._slots(part)}

    def chunks(self, parts: Sequence[str]) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        self.check()
        width = tree.chunk_width(len(self))
        leaves = [[self._slot(part, first.path[1]) for part in parts] for first in self._slots(parts[0])]
        slabs = [slab_width(len(self), max(slot.dtype.itemsize for slot in slots), width) for slots in leaves]
        streams = [self._stream(list(zip(same, slabs, strict=True))) for same in zip(*leaves, strict=True)]
        for pieces in zip(*streams, strict=True):
            slot, begin, first = pieces[0]
            cuts = [*range(0, first.shape[1], width), first.shape[1]]
            for low, high in pairwise(cuts):
                chunk = Chunk(slot.path[1], slice(begin + low, begin + high))
                yield chunk, tuple(piece[:, low:high] for _, _, piece in pieces)

    def rows(self, part: str, ids: Tensor) -> Tree:
        """In memory up to the limit of the storage, above it views of another file."""
        self.check()
        place = {client: row for row, client in enumerate(self.ids.tolist())}
        return self._copied(part, torch.tensor([place[client] for client in ids.tolist()], dtype=torch.int64))

    def stack(self, part: str) -> Tree:
        """Views of the file, or of another one if rows are missing or replaced."""
        self.check()
        whole = self.late is None and self.places.tolist() == list(range(len(self.kept.bytes)))
        if whole:
            return {slot.path[1]: self.kept.leaf(slot) for slot in self._slots(part)}
        return self._copied(part, torch.arange(len(self)))

    def keep(self) -> Contributions:
        if self.check is _always:
            return self
        self.check()
        return self._rewritten()

    def _rewritten(self) -> Self:
        """The same contributions in a file of their own."""
        like = {part: self.template(part) for part in self.parts_there}
        copy = FileRows(MappedRows(len(self), Layout.of(like), self.storage.folder), self.storage)
        for row in range(len(self)):
            one = torch.tensor([row])
            copy.put(one, {part: self._row(part, row) for part in self.parts_there})
        there = {part: part for part in self.parts_there}
        same = replace(self, kept=copy.rows, places=torch.arange(len(self)), parts_there=there, check=_always)
        return replace(same, late=None, given={})

    def _slots(self, part: str) -> list[Slot]:
        there = self.parts_there[part]
        return [slot for slot in self.kept.layout.slots if slot.path[0] == there]

    def _slot(self, part: str, name: str) -> Slot:
        return next(slot for slot in self._slots(part) if slot.path[1] == name)

    def _is_small(self, slot: Slot) -> bool:
        """Whether ``tree.combine`` would put this leaf beside others."""
        return slot.dtype.is_floating_point and len(self) * slot.shape.numel() <= tree.SMALL

    def _slabs(self, slot: Slot, width: int, reuse: bool = False) -> Iterator[tuple[int, Tensor]]:
        yield from ((begin, piece) for _, begin, piece in self._stream([(slot, width)], reuse))

    def _stream(self, slots: Sequence[tuple[Slot, int]], reuse: bool = False) -> Iterator[tuple[Slot, int, Tensor]]:
        """Pieces of several leaves, each with its width, and with what was given instead of late rows."""
        for slot, begin, piece in self.kept.stream(slots, self.places.tolist(), reuse=reuse):
            if self.late is not None:
                given = self.given[slot.path[0]][slot.path[1]].to(piece).reshape(-1)
                piece[self.late] = given[begin : begin + piece.shape[1]]
            yield slot, begin, piece

    def _whole(self, slot: Slot) -> Tensor:
        """A small leaf of all clients, in memory."""
        pieces = [piece for _, piece in self._slabs(slot, max(1, slot.shape.numel()))]
        return (pieces[0] if pieces else torch.empty(0, dtype=slot.dtype)).reshape(len(self), *slot.shape)

    def _combine_leaf(self, slot: Slot, weights: Weights) -> Tensor:
        """Weights of clients are applied piece by piece; a weight for every sample or element needs the whole leaf."""
        name, row = slot.path[1], len(self) * slot.dtype.itemsize
        if not slot.shape:  # single numbers are added in another way than columns of a matrix
            return tree.combine({name: self._whole(slot)}, weights)[name]
        # Sums are cut at the same columns as in memory, for very many clients at a fraction of them.
        width = slab_width(len(self), slot.dtype.itemsize, tree.COLUMNS if row * tree.COLUMNS <= MOST_BYTES else _FEW)
        if (weights if isinstance(weights, Tensor) else weights[name]).dim() > 1 or not slot.size:
            whole = self.stack(next(part for part, there in self.parts_there.items() if there == slot.path[0]))
            return tree.combine({name: whole[name]}, weights)[name]
        pieces = [tree.combine({name: piece}, weights)[name] for _, piece in self._slabs(slot, width, reuse=True)]
        return torch.cat(pieces).reshape(slot.shape)

    def _row(self, part: str, row: int) -> Tree:
        """What one client sent, with a leading axis."""
        place = int(self.places[row])
        if self.late is not None and bool(self.late[row]):
            given = self.given[self.parts_there[part]]
            return {slot.path[1]: given[slot.path[1]].to(slot.dtype).unsqueeze(0) for slot in self._slots(part)}
        return {slot.path[1]: self.kept.leaf(slot)[place : place + 1] for slot in self._slots(part)}

    def _copied(self, part: str, index: Tensor) -> Tree:
        """Some clients' rows in memory, or in another file if they are larger than the limit."""
        like = {part: self.template(part)}
        there = self.storage.open(len(index), like)
        if there is None:
            rows = [self._row(part, row) for row in index.tolist()]
            empty = {name: leaf.new_empty(0, *leaf.shape) for name, leaf in like[part].items()}
            return {name: torch.cat([one[name] for one in rows]) if rows else empty[name] for name in like[part]}
        for place, row in enumerate(index.tolist()):
            there.put(torch.tensor([place]), {part: self._row(part, row)})
        return {slot.path[1]: there.rows.leaf(slot) for slot in there.rows.layout.slots}


def shared_with_forks(storage: Storage | None, clients: int, like: Mapping[str, Tree]) -> FileRows | None:
    """Rows on disk that other processes fill, which get the file only as forks; None if they are kept in memory."""
    rows = None if storage is None else storage.open(clients, like)
    if isinstance(rows, FileRows) and not processes.forks():
        raise SpecError(
            "engine 'workers': these contributions are kept on disk (contributions_mb), which needs processes that are "
            "forked, and this system has none: use the engine 'loop' or 'batched', or raise contributions_mb"
        )
    return rows if isinstance(rows, FileRows) else None


def _of_leaves(weights: Weights, leaves: Tree) -> Weights:
    return weights if isinstance(weights, Tensor) else {name: weights[name] for name in leaves}
