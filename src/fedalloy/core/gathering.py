"""Where contributions are put as they are made: rows of one tensor per leaf, in the order of ids.

A row is copied once, to its place, and noted then; it is read next when the server asks for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.contributions import Notes, Payload, Stats
from fedalloy.core.screening import unlike
from fedalloy.core.types import Cohort, Contribution, Tree


class Gathering:
    """The contributions of the clients ``ids``, of whom some may never come; ``exact`` is for the notes, and ``like``
    the templates of what was asked for."""

    def __init__(self, ids: Tensor, *, exact: bool, like: Mapping[str, Tree]) -> None:
        self._ids, self._exact, self._like = ids.sort().values, exact, like
        self._payload: Payload | None = None
        self._in_order = False
        self._places: list[Tensor] = []
        self._stats: list[Stats] = []
        self._notes: list[Notes] = []

    def add(self, ids: Tensor, payload: Payload, stats: Stats) -> str | None:
        """The contributions of a block, in any order; or why they are none: in names, shapes and dtypes all of a block
        send the same."""
        first = {part: {name: leaf[0] for name, leaf in leaves.items()} for part, leaves in payload.items()}
        if reason := unlike(first, self._like):
            return reason
        places = torch.searchsorted(self._ids, ids)
        if len(ids) == len(self._ids) and bool((places[1:] > places[:-1]).all()):
            self._payload, self._in_order = payload, True  # everybody, in order: nothing needs to be moved
        else:
            self._put(places, payload)
        self._places.append(places)
        self._stats.append(stats)
        self._notes.append(Notes.of(payload, exact=self._exact))
        return None

    def add_one(self, client: int, found: Contribution) -> str | None:
        """The contribution of one client; or why it is none."""
        payload = {
            part: {name: leaf.unsqueeze(0) for name, leaf in leaves.items()} for part, leaves in found.payload.items()
        }
        stats = {name: torch.tensor([value], dtype=torch.float64) for name, value in found.stats.items()}
        return self.add(torch.tensor([client]), payload, stats)

    def cohort(self) -> Cohort:
        """All that came."""
        if self._payload is None:
            return Cohort(self._ids[:0], {})
        if self._in_order:
            return Cohort(self._ids, self._payload, self._stats[0], noted=self._notes[0])
        places = torch.cat(self._places)
        order = places.argsort()
        came, payload = places[order], self._payload
        if len(came) < len(self._ids):
            payload = {part: tree.rows(leaves, came) for part, leaves in payload.items()}
        stats = {name: torch.cat([one[name] for one in self._stats])[order] for name in self._stats[0]}
        return Cohort(self._ids[came], payload, stats, noted=Notes.join(self._notes).take(order))

    def _put(self, places: Tensor, payload: Payload) -> None:
        if self._payload is None:
            count = len(self._ids)
            self._payload = {
                part: {name: leaf.new_empty(count, *leaf.shape[1:]) for name, leaf in leaves.items()}
                for part, leaves in payload.items()
            }
        for part, leaves in payload.items():
            for name, leaf in leaves.items():
                self._payload[part][name].index_copy_(0, places.to(leaf.device), leaf)
