"""Learned weights over rounds: a line per client, a panel per table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedalloy.report.plots.canvas import Options
from fedalloy.report.plots.weights import panels, split


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """Lines with a mark in every round; clients keep their colours from panel to panel."""
    shown = panels(runs)
    axes.figure.set_size_inches(5.0, max(3.4, 2.4 * len(shown)))
    grid = [axes] if len(shown) == 1 else split(axes, len(shown))
    for place, (name, weights) in zip(grid, shown, strict=True):
        rounds = range(1, len(weights) + 1)
        for client in range(weights.shape[1]):
            place.plot(rounds, weights[:, client].numpy(), marker=".", label=f"client {client}")
        place.set(ylabel="weight", title=name, ylim=(0.0, None))
    grid[-1].set_xlabel("round")
    grid[0].legend(ncols=2, fontsize="small")
