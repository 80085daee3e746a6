"""How much each contribution counted, rounds across and clients down."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError
from fedalloy.report.plots.canvas import Options, whole_numbers
from fedalloy.results.stories import gather


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """A heat map; empty where a client did not take part. Of weights by layer the last layer is shown."""
    (story,) = gather(runs)[:1]
    if not story.history.weights:
        raise SpecError(f"{runs[0]} has no weights yet: nobody's contribution has counted")
    layer, grid = list(story.history.weights.items())[-1]
    means = grid.means()
    reach = (0.5, grid.rounds_per_bin * len(means) + 0.5, grid.clients_per_bin * means.shape[1] - 0.5, -0.5)
    drawn = axes.imshow(means.T, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, extent=reach)
    axes.figure.colorbar(drawn, ax=axes, label="weight")
    axes.grid(visible=False)
    whole_numbers(axes.xaxis, axes.yaxis)
    axes.set(xlabel="round", ylabel="client", title=f"{story.name}{f', layer {layer}' if layer else ''}")
