"""What the index of a run collects for pictures: the clients' weights over rounds, and their participation."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedalloy.experiment.records.index import Accumulator
from fedalloy.report.data.plain import heat_panel, spans
from fedalloy.results.grid import Grid
from fedalloy.results.sums import RunningSums, mean_of_columns, weights_by_layer

MOST_BINS = 128
"""Cells along each side of the live heat map."""
RARELY = 5
"""How many of the clients that contributed least are named."""


class Weights:
    """Mean weight by round and client in bounded memory; weights by layer are averaged over layers."""

    def __init__(self) -> None:
        self.grid = Grid(MOST_BINS)

    def add(self, row: Mapping[str, Any]) -> None:
        """One round."""
        layers = weights_by_layer(row.get("weights"), len(row["ids"]))
        if layers:
            self.grid.add(row["round"], row["ids"], mean_of_columns(list(layers.values())))

    def dump(self) -> bytes:
        """Sums and counts as arrays."""
        return _packed(self.grid.to_arrays())

    def load(self, data: bytes) -> None:
        """Restore a dumped state."""
        self.grid = Grid.from_arrays(_unpacked(data)) if data else Grid(MOST_BINS)

    def to_json(self) -> dict[str, Any] | None:
        """A heat map (:mod:`fedalloy.report.data`): one column per round, one row per client."""
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


def participation(running_sums: RunningSums, population: int) -> dict[str, Any]:
    """How evenly clients contributed, and how often they did not answer or were refused."""
    counts = running_sums.contributed(population)
    spread = {"least": counts.min(), "median": np.median(counts), "most": counts.max()} if len(counts) else {}
    rarely = np.argsort(counts, kind="stable")[:RARELY].tolist()
    totals = {
        "counted": running_sums.contributions,
        "absent": running_sums.absent,
        "dropped": running_sums.dropped.total(),
    }
    told = {**totals, **{name: float(one) for name, one in spread.items()}}
    return told | {"rarely": [[client, int(counts[client])] for client in rarely]}


def gathered() -> dict[str, Accumulator]:
    """New accumulators, for the index of a run."""
    return {"weights": Weights(), "tally": RunningSums()}


def _packed(values: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **values)
    return buffer.getvalue()


def _unpacked(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return dict(arrays)
