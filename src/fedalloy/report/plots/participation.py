"""How often clients were heard: rounds in which a contribution counted, clients sorted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedalloy.report.palette import assign
from fedalloy.report.plots.canvas import Options, whole_numbers
from fedalloy.results.runs import by_name
from fedalloy.results.stories import gather


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """One line per algorithm (its first seed), from the client that was heard least to the one heard most."""
    stories = gather(runs)
    styles = assign(story.name for story in stories)
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, (story, *_) in by_name(stories).items():
        counts = tuple(sorted(story.heard))
        alike.setdefault(counts, []).append(name)
    for counts, names in alike.items():  # one seed draws the same clients for every algorithm: one line for all of them
        axes.step(range(1, len(counts) + 1), counts, where="mid", label=", ".join(names), color=styles[names[0]].light)
    axes.set(xlabel="clients, least heard first", ylabel="rounds that counted")
    axes.set_ylim(bottom=0)
    whole_numbers(axes.xaxis, axes.yaxis)
    axes.legend()
