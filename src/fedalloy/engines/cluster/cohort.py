"""Contributions that stay with the workers: the driver has statistics and notes, and asks for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.contributions import Contributions, Notes, Payload, Stats
from fedalloy.core.tree import Chunk, Tree, Weights
from fedalloy.core.types import Cohort
from fedalloy.engines.cluster.packing import pack, unpack
from fedalloy.engines.cluster.pool import WorkerPool
from fedalloy.engines.cluster.worker import BlockWorker, Rows, add_blocks, joined, partial_sum, ranges_of, to_dtype
from fedalloy.engines.shared_cohort import Overwritten

CHUNKS_AT_ONCE = 4
"""Chunks of columns that are fetched together; as many more are on their way."""


@dataclass(frozen=True)
class Places:
    """Where contributions lie: the block of every client and its row there, of how many rows."""

    block: dict[int, int]
    row: dict[int, int]
    rows: dict[int, int]

    def wanted(self, ids: Sequence[int]) -> dict[int, list[int]]:
        """The rows of these clients, by block, both in the order of ids."""
        found: dict[int, list[int]] = {}
        for client in ids:
            found.setdefault(self.block[client], []).append(self.row[client])
        return found

    def short(self, number: int, rows: list[int]) -> Rows:
        """None instead of all rows of a block."""
        return None if rows == list(range(self.rows[number])) else rows


class BlockOwner(Protocol):
    """Whoever reaches the blocks' payloads; ``calls`` is the number of the call that made them."""

    calls: int

    def ask(self, method: str, wanted: Mapping[int, Any], *more: Any) -> dict[int, Any]:
        """The answers of a worker's method, by block."""

    def sum(
        self, part: str, wanted: Mapping[int, tuple[Rows, Weights]], template: Tree, rounded: Mapping[str, torch.dtype]
    ) -> Tree:
        """A part's weighted sum over all blocks."""

    def put(self, value: Any) -> list[Any]:
        """A reference to a value for ``ask``."""


class BlocksHere:
    """Blocks in this process's memory, read and summed as a worker does it."""

    def __init__(self, held: dict[int, Cohort]) -> None:
        self.calls, self._worker = 0, BlockWorker()
        self._worker.held = held

    def ask(self, method: str, wanted: Mapping[int, Any], *more: Any) -> dict[int, Any]:
        """The answers of this process."""
        found: dict[int, Any] = getattr(self._worker, method)(wanted, *more)
        return found

    def sum(
        self, part: str, wanted: Mapping[int, tuple[Rows, Weights]], template: Tree, rounded: Mapping[str, torch.dtype]
    ) -> Tree:
        """As the workers add their blocks."""
        held, found = self._worker.held, list[Tree]()
        for within in ranges_of(template, wanted):
            sums = {number: partial_sum(held[number], part, *given, within) for number, given in wanted.items()}
            whole = add_blocks([sums], rounded)
            found.append({name: leaf.reshape(-1) for name, leaf in whole.items()})
        return joined(found, template)

    def put(self, value: Any) -> list[Any]:
        """The value itself."""
        return [pack(value)]


@dataclass(frozen=True)
class RayCohort(Contributions):
    """A round's contributions at the workers, valid until the engine's next call. ``names`` are the parts by the names
    that rules use, ``replaced`` holds what counts for a client instead of what it sent."""

    ids: Tensor
    stats: Stats
    noted: Notes
    owner: BlockOwner = field(repr=False)
    made: int
    places: Places = field(repr=False)
    templates: dict[str, Tree] = field(repr=False)
    names: dict[str, str]
    cross: Tensor | None = None
    replaced: dict[int, Payload] = field(default_factory=dict, repr=False)

    @property
    def notes(self) -> Notes:
        return self.noted

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.names)

    @property
    def payload(self) -> Payload:  # type: ignore[override]
        return {part: self.rows(part, self.ids) for part in self.names}

    def template(self, part: str) -> Tree:
        return self.templates[self.names[part]]

    def select(self, ids: Tensor) -> Self:
        index = torch.isin(self.ids, ids).nonzero().flatten()
        return replace(
            self,
            ids=self.ids[index],
            stats={name: values[index] for name, values in self.stats.items()},
            noted=self.notes.take(index),
            cross=None if self.cross is None else self.cross[index][:, index],
        )

    def resend(self, ids: Tensor, received: Payload) -> Self:
        late, instead = torch.isin(self.ids, ids), {original: received[part] for part, original in self.names.items()}
        noted = self.notes.replaced(late, Notes.alone({part: received[part] for part in self.names}))
        return replace(self, replaced={**self.replaced, **dict.fromkeys(self.ids[late].tolist(), instead)}, noted=noted)

    def with_stats(self, stats: Mapping[str, Tensor]) -> Self:
        return replace(self, stats={**self.stats, **stats})

    def with_cross(self, cross: Tensor) -> Self:
        return replace(self, cross=cross)

    def alone(self, part: str, name: str) -> Self:
        return replace(self, names={name: self.names[part]}, noted=self.notes.alone_as(part, name))

    def combine(self, part: str, weights: Weights) -> Tree:
        self._check()
        own, template, original = self._own(), self.template(part), self.names[part]
        dtypes = {name: leaf.dtype for name, leaf in template.items()}
        chosen = _rows_of(weights, own)
        wanted, begin = {}, 0
        for number, rows in self.places.wanted(self._clients(own)).items():
            some = torch.arange(begin, begin + len(rows))
            wanted[number] = (self.places.short(number, rows), _rows_of(chosen, some))
            begin += len(rows)
        if not self.replaced:
            return self.owner.sum(original, wanted, template, dtypes) if wanted else _zeros(template)
        total = self.owner.sum(original, wanted, template, {}) if wanted else _zeros(template, torch.float64)
        for late, instead in self._substitutes():
            given = Cohort(late, {original: {name: leaf.unsqueeze(0) for name, leaf in instead[original].items()}})
            summed = partial_sum(given, original, None, _summed_rows(weights, late))
            total = {name: leaf + summed[name] for name, leaf in total.items()}
        return {name: to_dtype(leaf, dtypes[name]) for name, leaf in total.items()}

    def chunks(self, parts: Sequence[str]) -> Iterator[tuple[Chunk, tuple[Tensor, ...]]]:
        self._check()
        width = max(1, tree._ELEMENTS // max(1, len(self)))
        every = (
            Chunk(name, slice(begin, min(begin + width, leaf.numel())))
            for name, leaf in self.template(parts[0]).items()
            for begin in range(0, leaf.numel(), width)
        )
        while some := list(islice(every, CHUNKS_AT_ONCE)):
            yield from zip(some, self._columns(parts, some), strict=True)

    def rows(self, part: str, ids: Tensor) -> Tree:
        self._check()
        wanted = ids.tolist()
        own = [client for client in wanted if client not in self.replaced]
        original, found = self.names[part], {}
        there = self.places.wanted(sorted(set(own)))
        asked = {number: self.places.short(number, rows) for number, rows in there.items()}
        for number, packed in self.owner.ask("rows", asked, original).items():
            block = unpack(packed)
            for place, row in enumerate(there[number]):
                found[number, row] = {name: leaf[place] for name, leaf in block.items()}
        each = [
            self.replaced[client][original]
            if client in self.replaced
            else found[self.places.block[client], self.places.row[client]]
            for client in wanted
        ]
        like = self.template(part)
        if not each:
            return {name: leaf.new_empty(0, *leaf.shape) for name, leaf in like.items()}
        return {name: torch.stack([one[name].to(leaf.dtype) for one in each]) for name, leaf in like.items()}

    def stack(self, part: str) -> Tree:
        return self.rows(part, self.ids)

    def dots(self, part: str, other: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self._check()
        if self.replaced:
            return super().dots(part, other)
        there = self._wanted()
        reference = self.owner.put(dict(other))
        found = self.owner.ask("dots", there, self.names[part], reference)
        return {name: torch.cat([found[number][name] for number in there]) for name in other}

    def keep(self) -> RayCohort:
        """A copy in this process, still in blocks, so that its sums are the same to the last digit."""
        self._check()
        there = self.places.wanted(self._clients(self._own()))
        asked = {number: self.places.short(number, rows) for number, rows in there.items()}
        payloads: dict[int, Payload] = {number: {} for number in there}
        for original in self.names.values():
            for number, packed in self.owner.ask("rows", asked, original).items():
                payloads[number][original] = {name: leaf.clone() for name, leaf in unpack(packed).items()}
        copied = {number: Cohort(torch.arange(len(rows)), payloads[number]) for number, rows in there.items()}
        numbered = {client: place for rows in self._by_block() for place, client in enumerate(rows)}
        places = Places(self.places.block, numbered, {number: len(rows) for number, rows in there.items()})
        return replace(self, owner=BlocksHere(copied), made=0, places=places)

    def scored(self, pool: WorkerPool, ids: Tensor, update: str) -> Tensor:
        """Every client's model on the validation parts of ``ids``, measured where the models are."""
        self._check()
        there = self._wanted()
        found = pool.ask("cross", there, pool.shared_reference(), ids, update)
        return torch.cat([found[number] for number in there])

    def _columns(self, parts: Sequence[str], some: list[Chunk]) -> Iterator[tuple[Tensor, ...]]:
        """The columns of some chunks, a row per client."""
        own, originals = self._own(), [self.names[part] for part in parts]
        places = [(chunk.leaf, chunk.columns.start, chunk.columns.stop) for chunk in some]
        blocks = [unpack(one) for one in self.owner.ask("columns", self._wanted(), originals, places).values()]
        for place, chunk in enumerate(some):
            yield tuple(
                self._completed(own, [block[which][place] for block in blocks], original, chunk)
                for which, original in enumerate(originals)
            )

    def _completed(self, own: Tensor, blocks: list[Tensor], original: str, chunk: Chunk) -> Tensor:
        """The blocks' rows below each other, with those of replaced clients."""
        if not self.replaced:
            return torch.cat(blocks)
        leaf = self.templates[original][chunk.leaf]
        whole = torch.empty(len(self), chunk.columns.stop - chunk.columns.start, dtype=leaf.dtype)
        if blocks:
            whole[own] = torch.cat(blocks)
        for late, instead in self._substitutes():
            whole[late] = instead[original][chunk.leaf].reshape(-1)[chunk.columns].to(leaf.dtype)
        return whole

    def _by_block(self) -> list[list[int]]:
        """The clients whose own contributions count, block by block."""
        groups: dict[int, list[int]] = {}
        for client in self._clients(self._own()):
            groups.setdefault(self.places.block[client], []).append(client)
        return list(groups.values())

    def _wanted(self) -> dict[int, Rows]:
        there = self.places.wanted(self._clients(self._own()))
        return {number: self.places.short(number, rows) for number, rows in there.items()}

    def _own(self) -> Tensor:
        """The positions of the clients whose own contributions count."""
        if not self.replaced:
            return torch.arange(len(self))
        return torch.tensor(
            [i for i, one in enumerate(self.ids.tolist()) if one not in self.replaced], dtype=torch.int64
        )

    def _clients(self, positions: Tensor) -> list[int]:
        clients: list[int] = self.ids[positions].tolist()
        return clients

    def _substitutes(self) -> Iterator[tuple[Tensor, Payload]]:
        """The positions of replaced clients, with what counts instead."""
        groups: dict[int, tuple[list[int], Payload]] = {}
        for position, client in enumerate(self.ids.tolist()):
            if client in self.replaced:
                instead = self.replaced[client]
                groups.setdefault(id(instead), ([], instead))[0].append(position)
        return ((torch.tensor(positions), instead) for positions, instead in groups.values())

    def _check(self) -> None:
        if self.owner.calls != self.made:
            raise Overwritten(
                "these contributions lay with workers that have begun another round or have ended: keep() copies them "
                "before that"
            )


def _rows_of(weights: Weights, rows: Tensor) -> Weights:
    return weights[rows] if isinstance(weights, Tensor) else {name: leaf[rows] for name, leaf in weights.items()}


def _summed_rows(weights: Weights, rows: Tensor) -> Weights:
    """The sum of some clients' weights, as the weights of one client; in float64, because the rows they are for may
    be."""
    some = _rows_of(weights, rows)
    if isinstance(some, Tensor):
        return some.double().sum(0, keepdim=True)
    return {name: leaf.double().sum(0, keepdim=True) for name, leaf in some.items()}


def _zeros(template: Tree, dtype: torch.dtype | None = None) -> Tree:
    return {name: torch.zeros(leaf.shape, dtype=dtype or leaf.dtype) for name, leaf in template.items()}
