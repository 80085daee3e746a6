"""A metric over rounds: the mean over clients, and how far the worst-served tenth is behind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedalloy.report.palette import Style, assign
from fedalloy.report.plots.canvas import whole_numbers
from fedalloy.report.plots.kinds import Options
from fedalloy.results.stories import Story, gather


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """One line per algorithm, the mean over its seeds with a band from the lowest to the highest of them; the
    tenth of its clients that is served worst dotted, where the metric has a direction."""
    stories = gather(runs, options.metric)
    seeds: dict[str, list[Story]] = {}
    for story in stories:
        seeds.setdefault(story.name, []).append(story)
    styles = assign(seeds)
    for name, told in seeds.items():
        _draw_line(axes, name, told, styles[name])
    bands = " (bands: all seeds)" if len(stories) > len(seeds) else ""
    dotted = " (dotted: worst 10 %)" if stories[0].higher_is_better is not None else ""
    axes.set(xlabel=f"round{bands}", ylabel=f"{options.metric or stories[0].metric}{dotted}")
    whole_numbers(axes.xaxis)
    axes.legend()


def _draw_line(axes: Any, name: str, seeds: Sequence[Story], style: Style) -> None:
    rounds, means, worst = common_rounds(seeds)
    dash = (0, tuple(length / 2 for length in style.dash)) if style.dash else "solid"
    axes.plot(rounds, means.mean(0), label=name, color=style.light, linestyle=dash)
    axes.plot(rounds, worst.mean(0), linestyle=":", color=style.light)
    if len(seeds) > 1:
        axes.fill_between(rounds, means.min(0), means.max(0), color=style.light, alpha=0.15, linewidth=0)


def common_rounds(seeds: Sequence[Story]) -> tuple[list[int], NDArray[np.float64], NDArray[np.float64]]:
    """The rounds that every seed was scored in, and its means and worst-served tenths there, ``[seeds, rounds]``."""
    scored = [{round: values for round, *values in story.curve} for story in seeds]
    rounds = sorted(set.intersection(*map(set, scored)))
    values = np.array([[of_seed[round] for round in rounds] for of_seed in scored], dtype=np.float64)
    means, worst = np.moveaxis(values.reshape(len(seeds), len(rounds), 2), -1, 0)
    return rounds, means, worst
