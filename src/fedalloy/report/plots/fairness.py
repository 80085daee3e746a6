"""How many clients are served how: the share of clients up to every score."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedalloy.core.errors import SpecError
from fedalloy.report.palette import assign
from fedalloy.report.plots.canvas import Options
from fedalloy.results.runs import by_name
from fedalloy.results.stories import gather


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """Empirical distributions over clients, all seeds of an algorithm together: upright means alike."""
    stories = gather(runs, options.metric)
    styles, drawn = assign(story.name for story in stories), 0
    for name, some in by_name(stories).items():
        known = [client.score for run in some for client in run.clients if not math.isnan(client.score)]
        scores = sorted(filter(math.isfinite, known))
        if scores:
            # A loss that overflowed has no place on the axis but is one of the clients: the line then ends below 1.
            shares = np.arange(1, len(scores) + 1) / len(known)
            axes.step([scores[0], *scores], [0, *shares], where="post", label=name, color=styles[name].light)
            drawn += 1
    if not drawn:
        raise SpecError("no client of these runs was scored by this metric; evaluate it first (evaluate.metrics)")
    axes.set(xlabel=options.metric or stories[0].metric, ylabel="share of clients up to here", ylim=(0, 1))
    axes.legend()
