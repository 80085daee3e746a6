"""How much learned weights change over rounds, against the number of rounds T and 1 / sqrt(T)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedalloy.experiment.weight_files import load_table
from fedalloy.report.plots.canvas import Options


def gather(runs: Sequence[Path]) -> list[tuple[int, float]]:
    """Rounds and variance of every table, by rounds."""
    return sorted((table.rounds, table.variance) for table in map(load_table, runs))


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """A mark per table and the curve that the analysis compares it with, both in logarithms."""
    found = gather(runs)
    rounds = sorted({count for count, _ in found})
    axes.plot(rounds, [count**-0.5 for count in rounds], color="0.4", linestyle="--", label="$1/\\sqrt{T}$")
    axes.plot([count for count, _ in found], [value for _, value in found], marker="o", label="learned weights")
    axes.set(xlabel="rounds T", ylabel="variance of a client's weights", xscale="log", yscale="log")
    axes.set_xticks(rounds, labels=[str(count) for count in rounds])
    axes.set_xticks([], minor=True)
    axes.legend()
