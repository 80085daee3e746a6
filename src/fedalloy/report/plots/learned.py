"""Pictures of learned weight tables."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedalloy.experiment.weight_files import load_table
from fedalloy.methods.weightings.weight_table import WeightTable
from fedalloy.report.plots.canvas import Options


def panels(runs: Sequence[Path]) -> list[tuple[str, Tensor]]:
    """A title and weights ``[rounds, clients]`` for every map: one per table, or one per layer of it."""
    found: list[tuple[str, Tensor]] = []
    for path in runs:
        table = load_table(path)
        name = title(path, table) if len(runs) > 1 or table.layers else ""
        if table.layers:
            found += [(f"{name} {layer}", table.weights[:, :, place]) for place, layer in enumerate(table.layers)]
        else:
            found.append((name, table.weights))
    return found


def title(path: Path, table: WeightTable) -> str:
    """The title of a table: its file, and of how many tables it is the mean."""
    place = path.parent.name if path.parent.name not in ("", ".") else ""
    runs = f", mean of {table.runs}" if table.runs > 1 else ""
    return f"{place} {path.stem}".strip() + runs


def draw_weights(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """A heat map per table, rounds to the right and clients upwards, all on one scale from 0 to the largest weight."""
    shown = panels(runs)
    largest = max(float(weights.max()) for _, weights in shown)
    figure = axes.figure
    figure.set_size_inches(5.0, max(2.2, 1.9 * len(shown)))
    grid = [axes] if len(shown) == 1 else split(axes, len(shown))
    for place, (name, weights) in zip(grid, shown, strict=True):
        image = place.imshow(weights.T.numpy(), aspect="auto", origin="lower", vmin=0.0, vmax=largest)
        rounds, clients = weights.shape
        place.set_xticks(
            [*range(0, rounds, max(1, rounds // 10))], [str(1 + r) for r in range(0, rounds, max(1, rounds // 10))]
        )
        place.set_yticks(range(clients))
        place.set(ylabel="client", title=name)
    grid[-1].set_xlabel("round")
    figure.colorbar(image, ax=grid, label="weight")


def split(axes: Any, count: int) -> list[Any]:
    """Replace one set of axes by ``count`` of them, one below the other."""
    figure = axes.figure
    axes.remove()
    return list(figure.subplots(count, 1, sharex=False))


def draw_rows(axes: Any, runs: Sequence[Path], options: Options) -> None:
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


def variances(runs: Sequence[Path]) -> list[tuple[int, float]]:
    """Rounds and variance of every table, by rounds."""
    return sorted((table.rounds, table.variance) for table in map(load_table, runs))


def draw_variance(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """A mark per table and the curve 1/sqrt(T) of the analysis, on logarithmic axes."""
    found = variances(runs)
    rounds = sorted({count for count, _ in found})
    axes.plot(rounds, [count**-0.5 for count in rounds], color="0.4", linestyle="--", label="$1/\\sqrt{T}$")
    axes.plot([count for count, _ in found], [value for _, value in found], marker="o", label="learned weights")
    axes.set(xlabel="rounds T", ylabel="variance of a client's weights", xscale="log", yscale="log")
    axes.set_xticks(rounds, labels=[str(count) for count in rounds])
    axes.set_xticks([], minor=True)
    axes.legend()
