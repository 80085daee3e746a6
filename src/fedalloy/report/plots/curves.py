"""A metric over rounds: the mean over clients, and how far the worst-served tenth is behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedalloy.report.palette import Style, assign
from fedalloy.report.plots.canvas import Options, whole_numbers
from fedalloy.results.lines import by_round
from fedalloy.results.runs import by_name
from fedalloy.results.statistics import Band
from fedalloy.results.stories import Story, gather


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """One line per algorithm, the mean over its seeds with a band from the lowest to the highest of them; the
    tenth of its clients that is served worst dotted, where the metric has a direction."""
    stories = gather(runs, options.metric)
    seeds = by_name(stories)
    styles = assign(seeds)
    for name, told in seeds.items():
        _draw_line(axes, name, told, styles[name])
    bands = " (bands: all seeds)" if len(stories) > len(seeds) else ""
    dotted = " (dotted: worst 10 %)" if stories[0].higher_is_better is not None else ""
    axes.set(xlabel=f"round{bands}", ylabel=f"{options.metric or stories[0].metric}{dotted}")
    whole_numbers(axes.xaxis)
    axes.legend()


def _draw_line(axes: Any, name: str, seeds: Sequence[Story], style: Style) -> None:
    found = by_round({round: values for round, *values in story.curve} for story in seeds)
    means, worst = ([Band.of(values[place] for values in some) for some in found.values()] for place in (0, 1))
    dash = (0, tuple(length / 2 for length in style.dash)) if style.dash else "solid"
    axes.plot(list(found), [one.mean for one in means], label=name, color=style.light, linestyle=dash)
    axes.plot(list(found), [one.mean for one in worst], linestyle=":", color=style.light)
    if len(seeds) > 1:
        low, high = [one.low for one in means], [one.high for one in means]
        axes.fill_between(list(found), low, high, color=style.light, alpha=0.15, linewidth=0)
