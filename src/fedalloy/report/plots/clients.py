"""Every client of every algorithm as a dot, and the median."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.report.palette import assign
from fedalloy.report.plots.canvas import Options
from fedalloy.results.runs import by_name
from fedalloy.results.stories import gather

SPREAD = 0.28
"""How far a dot may stand above or below its line."""


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """One strip per algorithm, all its seeds together."""
    stories = gather(runs, options.metric)
    groups = {
        name: [client.score for run in some for client in run.clients if math.isfinite(client.score)]
        for name, some in by_name(stories).items()
    }
    groups = {name: scores for name, scores in groups.items() if scores}
    if not groups:
        raise SpecError("no client of these runs was scored by this metric; evaluate it first (evaluate.metrics)")
    styles = assign(groups)
    for place, (name, scores) in enumerate(groups.items()):
        # Dots are set apart at random, but always in the same way.
        apart = (Key.of(0).fold(name).uniform(len(scores)).numpy() - 0.5) * 2 * SPREAD
        axes.scatter(scores, place + apart, s=6, alpha=0.6, linewidths=0, color=styles[name].light)
        axes.plot([float(np.median(scores))] * 2, [place - SPREAD, place + SPREAD], color="0.1", linewidth=1.5)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"{options.metric or stories[0].metric} of a client (line: median)")
