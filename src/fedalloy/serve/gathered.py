"""What the index of a run gathers for pictures: the weights of clients over rounds, and who took part how often."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedalloy.records.index import Accumulator
from fedalloy.report.data.plain import heat_panel, spans
from fedalloy.results.grid import Grid

MOST_BINS = 128
"""Cells of the live heat map along each side."""
RARELY = 5
"""Clients that are named because they were heard least."""


class Weights:
    """Mean weight by round and client in bounded space; weights by layer count with their mean over layers."""

    def __init__(self) -> None:
        self.grid = Grid(MOST_BINS)

    def add(self, row: Mapping[str, Any]) -> None:
        """One round."""
        weights, ids = row.get("weights"), row["ids"]
        if isinstance(weights, Mapping):
            layers = [one for one in weights.values() if isinstance(one, list) and len(one) == len(ids)]
            weights = np.mean(np.array(layers, dtype=np.float64), axis=0).tolist() if layers else None
        if isinstance(weights, list) and len(weights) == len(ids):
            self.grid.add(row["round"], ids, weights)

    def dump(self) -> bytes:
        """Sums and counts as arrays."""
        return _packed(self.grid.to_arrays())

    def load(self, data: bytes) -> None:
        """Go on from there."""
        self.grid = Grid.from_arrays(_unpacked(data)) if data else Grid(MOST_BINS)

    def to_json(self) -> dict[str, Any] | None:
        """A heat map (:mod:`fedalloy.report.data`): rounds across, clients down."""
        if not self.grid.clients:
            return None
        panel, small = heat_panel("all layers", self.grid, MOST_BINS, MOST_BINS)
        joined = small.rounds_per_bin > 1 or small.clients_per_bin > 1
        mean = f" A cell is the mean over {small.rounds_per_bin} rounds and {small.clients_per_bin} clients."
        return {
            "kind": "heat", "value": "weight", "panels": [panel],
            "columns": {"title": "round", "labels": spans(small.rounds, small.rounds_per_bin, first=1)},
            "rows": {"title": "client", "labels": spans(small.clients, small.clients_per_bin)},
            "note": "Empty where a client did not take part." + (mean if joined else ""),
        }  # fmt: skip


class Participation:
    """How often each client's contribution counted, was awaited in vain, or was refused."""

    kinds = ("ids", "absent", "dropped")

    def __init__(self) -> None:
        self.counts = np.zeros((len(self.kinds), 0), dtype=np.int64)

    def add(self, row: Mapping[str, Any]) -> None:
        """One round."""
        for kind, name in enumerate(self.kinds):
            found = row.get(name) or ()
            ids = np.array(list(map(int, found)) if isinstance(found, Mapping) else found, dtype=np.int64)
            if len(ids):
                self._reach(int(ids.max()) + 1)
                self.counts[kind] += np.bincount(ids, minlength=self.counts.shape[1])

    def dump(self) -> bytes:
        """The counts."""
        return _packed({"counts": self.counts})

    def load(self, data: bytes) -> None:
        """Go on from there."""
        self.counts = _unpacked(data)["counts"] if data else np.zeros((len(self.kinds), 0), dtype=np.int64)

    def to_json(self) -> dict[str, Any]:
        """How evenly clients were heard."""
        heard = np.sort(self.counts[0])
        quantiles = {"least": heard[0], "median": np.median(heard), "most": heard[-1]} if len(heard) else {}
        totals = dict(zip(("counted", "absent", "dropped"), self.counts.sum(1).tolist(), strict=True))
        rarely = np.argsort(self.counts[0], kind="stable")[:RARELY].tolist()
        return {**totals, **{name: float(one) for name, one in quantiles.items()},
                "rarely": [[client, int(self.counts[0, client])] for client in rarely]}  # fmt: skip

    def _reach(self, clients: int) -> None:
        missing = clients - self.counts.shape[1]
        if missing > 0:
            self.counts = np.pad(self.counts, ((0, 0), (0, missing)))


def gathered() -> dict[str, Accumulator]:
    """Fresh ones, for the index of a run."""
    return {"weights": Weights(), "participation": Participation()}


def _packed(values: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **values)
    return buffer.getvalue()


def _unpacked(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)
