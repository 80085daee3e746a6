"""The weight of each contribution: one column per round, one row per client, one panel per layer."""

from __future__ import annotations

import math
from typing import Any

from fedalloy.report.data.plain import MOST_CELLS, Chart, heat_panel, spans
from fedalloy.results.clients import client_name
from fedalloy.results.grid import Grid
from fedalloy.results.summaries import RunSummary
from fedalloy.results.sums import WHOLE

SIDE = 200


def weights(summary: RunSummary) -> Chart | None:
    """The weights of one run as a heat map."""
    grids = summary.history.weights
    if not grids:
        return None
    chart = heat(summary, {"" if layer == WHOLE else layer: grid for layer, grid in grids.items()})
    more = len(summary.history.layers_left_out)
    left_out = f" {more} more layers are not shown." if more else ""
    return chart | {
        "id": f"weights-{summary.name}-{summary.seed}",
        "title": f"{summary.name}, seed {summary.seed}",
        "value": "weight",
        "note": chart["note"] + left_out,
    }


def heat(summary: RunSummary, grids: dict[str, Grid]) -> dict[str, Any]:
    """Panels over the same rounds and clients, bounded in total size."""
    side = max(16, min(SIDE, int(math.sqrt(MOST_CELLS / len(grids)))))
    made = [heat_panel(title, grid, side, side) for title, grid in grids.items()]
    small = max((grid for _, grid in made), key=lambda grid: (grid.rounds, grid.clients))
    return {
        "kind": "heat",
        "columns": {"title": "round", "labels": spans(small.rounds, small.rounds_per_bin, first=1)},
        "rows": {"title": "client", "labels": _clients(summary, small)},
        "panels": [panel for panel, _ in made],
        "note": _note([panel for panel, _ in made], small),
    }


def _clients(summary: RunSummary, grid: Grid) -> list[str]:
    if grid.clients_per_bin == 1:
        return [client_name(summary.manifest, client) for client in range(grid.clients)]
    return [f"clients {span}" for span in spans(grid.clients, grid.clients_per_bin)]


def _note(panels: list[dict[str, Any]], grid: Grid) -> str:
    gaps = any(None in row for panel in panels for row in panel["values"])
    said = ["Empty where a client did not take part."] if gaps else []
    if grid.rounds_per_bin > 1 or grid.clients_per_bin > 1:
        said.append(f"A cell is the mean over {grid.rounds_per_bin} rounds and {grid.clients_per_bin} clients.")
    return " ".join(said)
