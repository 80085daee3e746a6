"""How often clients were heard: rounds in which a contribution counted, clients sorted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedalloy.report.gathering import by_name, gather
from fedalloy.report.palette import assign
from fedalloy.report.plots.kinds import Options


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """One line per algorithm (its first seed), from the client that was heard least to the one heard most."""
    stories = gather(runs)
    styles = assign(story.name for story in stories)
    for name, (story, *_) in by_name(stories).items():
        counts = sorted(story.tally.counted[client] for client in range(story.population))
        axes.step(range(1, len(counts) + 1), counts, where="mid", label=name, color=styles[name].light)
    axes.set(xlabel="clients, least heard first", ylabel="rounds that counted")
    axes.set_ylim(bottom=0)
    axes.legend()
