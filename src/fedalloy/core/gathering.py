"""Collects contributions as they are made: rows of one tensor per leaf, in the order of ids.

A row is copied to its place once and noted at that time; it is not read again until the server asks for it. The place
may be on disk, if the engine has a ``storage`` that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, cast

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.contributions import Contributions, Notes, Payload, Stats
from fedalloy.core.factors import FactoredTree, first_of
from fedalloy.core.screening import unlike
from fedalloy.core.types import Cohort, Contribution, Tree, Work


class Rows(Protocol):
    """A place outside of memory with one row per client; implemented in ``engines.out_of_core``."""

    def put(self, places: Tensor, payload: Payload) -> None:
        """Write the rows of a block of clients."""

    def cohort(self, ids: Tensor, places: Tensor, stats: Stats, notes: Notes) -> Contributions:
        """The contributions in these rows."""


class Storage(Protocol):
    """Decides where the contributions of a round are kept."""

    def open(self, clients: int, like: Mapping[str, Tree]) -> Rows | None:
        """Rows for so many contributions with these templates; None if they are kept in memory."""


class Gathering:
    """The contributions to some work, not all of which may arrive. ``exact`` is passed to the notes; ``like`` holds the
    templates of the expected parts; ``storage`` decides whether they are kept in memory, as they are without one."""

    def __init__(self, work: Work, *, exact: bool, like: Mapping[str, Tree], storage: Storage | None = None) -> None:
        self._ids = work.ids if work.ascending else work.ids.sort().values
        self._exact, self._like = exact, like
        self._rows = None if storage is None else storage.open(len(work), like)
        self._payload: Payload | None = None
        self._in_order = False
        self._places: list[Tensor] = []
        self._stats: list[Stats] = []
        self._notes: list[Notes] = []

    def add(self, ids: Tensor, payload: Payload, stats: Stats, notes: Notes | None = None) -> str | None:
        """Add the contributions of a block, in any order. Returns the reason if they do not match the templates; names,
        shapes and dtypes are the same for the whole block. ``notes`` are made here unless they are known."""
        if not self._fits(payload):
            first = {part: first_of(leaves) for part, leaves in payload.items()}
            if reason := unlike(first, self._like):
                return reason
        if len(ids) == len(self._ids) and any(isinstance(leaves, FactoredTree) for leaves in payload.values()):
            # Factors are sorted as they are; rows of their own they have none. They stay in memory, where the block
            # made them: sums of rows on disk would be other sums.
            self._rows, order = None, ids.argsort()
            ids, stats = ids[order], {name: values[order] for name, values in stats.items()}
            notes = None if notes is None else notes.take(order)
            payload = {part: _sorted(leaves, order) for part, leaves in payload.items()}
        if self._rows is None and (ids is self._ids or torch.equal(ids, self._ids)):
            self._payload, self._in_order = payload, True  # all clients in order: no copy is needed
        else:
            places = torch.searchsorted(self._ids, ids)
            self._put(places, payload)
            self._places.append(places)
        self._stats.append(stats)
        self._notes.append(Notes.of(payload, exact=self._exact) if notes is None else notes)
        return None

    def _fits(self, payload: Payload) -> bool:
        """Whether a block matches the templates; what is wrong otherwise, :func:`unlike` says."""
        if payload.keys() != self._like.keys():
            return False
        for part, leaves in payload.items():
            like = self._like[part]
            if type(leaves) is not dict or leaves.keys() != like.keys():
                return False
            for name, leaf in leaves.items():
                wanted = like[name]
                if leaf.shape[1:] != wanted.shape or leaf.dtype != wanted.dtype:
                    return False
        return True

    def add_one(self, client: int, found: Contribution) -> str | None:
        """Add the contribution of one client. Returns the reason if it does not match the templates."""
        payload = {
            part: {name: leaf.unsqueeze(0) for name, leaf in leaves.items()} for part, leaves in found.payload.items()
        }
        stats = {name: torch.tensor([value], dtype=torch.float64) for name, value in found.stats.items()}
        return self.add(torch.tensor([client]), payload, stats)

    def cohort(self) -> Contributions:
        """All contributions that arrived."""
        if not self._stats:
            return Cohort(self._ids[:0], {})
        if self._in_order:
            return Cohort(self._ids, self._payload or {}, self._stats[0], noted=self._notes[0])
        places = torch.cat(self._places)
        order = places.argsort()
        came, payload = places[order], self._payload or {}
        stats = {name: torch.cat([one[name] for one in self._stats])[order] for name in self._stats[0]}
        notes = Notes.join(self._notes).take(order)
        if self._rows is not None:
            return self._rows.cohort(self._ids[came], came, stats, notes)
        if len(came) < len(self._ids):
            payload = {part: tree.rows(leaves, came) for part, leaves in payload.items()}
        return Cohort(self._ids[came], payload, stats, noted=notes)

    def _put(self, places: Tensor, payload: Payload) -> None:
        if self._rows is not None:
            self._rows.put(places, payload)
            return
        if self._payload is None:
            count = len(self._ids)
            self._payload = {
                part: {name: leaf.new_empty(count, *leaf.shape[1:]) for name, leaf in leaves.items()}
                for part, leaves in payload.items()
            }
        for part, leaves in payload.items():
            for name, leaf in leaves.items():
                self._payload[part][name].index_copy_(0, places.to(leaf.device), leaf)


def _sorted(leaves: Tree, order: Tensor) -> Tree:
    """The rows in another order; leaves kept as factors stay factors."""
    if bool((order[1:] > order[:-1]).all()):
        return leaves
    if isinstance(leaves, FactoredTree):
        return cast(Tree, leaves.take(order))
    return {name: leaf[order.to(leaf.device)] for name, leaf in leaves.items()}
