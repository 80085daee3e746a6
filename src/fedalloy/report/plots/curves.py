"""A metric over rounds: the mean over clients, and how far the worst tenth is behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedalloy.report.gathering import gather
from fedalloy.report.palette import assign
from fedalloy.report.plots.canvas import whole_numbers
from fedalloy.report.plots.kinds import Options


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """One line per run, in the colour of its algorithm; the worst tenth of its clients dotted."""
    stories = gather(runs, options.metric)
    several_seeds = len({story.seed for story in stories}) > 1
    styles = assign(story.name for story in stories)
    for story in stories:
        rounds, means, worst = zip(*story.curve, strict=True) if story.curve else ((), (), ())
        label = f"{story.name}, seed {story.seed}" if several_seeds else story.name
        style = styles[story.name]
        dash = (0, tuple(length / 2 for length in style.dash)) if style.dash else "solid"
        axes.plot(rounds, means, label=label, color=style.light, linestyle=dash)
        axes.plot(rounds, worst, linestyle=":", color=style.light)
    axes.set(xlabel="round", ylabel=f"{options.metric or stories[0].metric} (dotted: worst 10 %)")
    whole_numbers(axes.xaxis)
    axes.legend()
