"""What rules computed on the way: numbers as lines, vectors over clients as heat maps, regret in hindsight."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedalloy.report.data.plain import Chart, many, pick
from fedalloy.report.data.weights import heat
from fedalloy.results.grid import Grid
from fedalloy.results.lines import responses_of
from fedalloy.results.runs import by_name
from fedalloy.results.stories import Story

MOST_REGRET = 400_000
"""Rounds x clients up to which the best fixed decision is looked for."""


def info_charts(stories: Sequence[Story]) -> list[Chart]:
    """Every column: lines over all algorithms that have it, then heat maps of the first seed of each."""
    firsts = [runs[0] for runs in by_name(stories).values()]
    names = dict.fromkeys(name for story in firsts for name in story.history.info)
    lines = [_line(firsts, name) for name in names]
    return [*lines, *(chart for story in firsts for chart in _heats(story)), *filter(None, map(_regret, firsts))]


def _line(stories: Sequence[Story], name: str) -> Chart:
    series = []
    for story in stories:
        values = story.history.info.get(name)
        if values is not None:
            kept = pick(len(values))
            at = [story.history.rounds[place] for place in kept]
            series.append({"name": story.name, "x": at, "y": many(values[place] for place in kept)})
    return {"id": f"info-{name}", "kind": "line", "title": name, "x": "round", "y": name, "series": series,
            "note": "First seed of each algorithm."}  # fmt: skip


def _heats(story: Story) -> list[Chart]:
    """Columns with the same first name are one chart: 'angle.conv1' and 'angle.fc' are panels of 'angle'."""
    groups: dict[str, dict[str, Grid]] = {}
    for name, grid in story.history.info_grids.items():
        first, _, layer = name.partition(".")
        groups.setdefault(first, {})[layer] = grid
    charts = []
    for name, grids in groups.items():
        chart = heat(story, grids)
        charts.append(chart | {
            "id": f"info-{name}-{story.name}", "title": f"{name}: {story.name}, seed {story.seed}", "value": name,
        })  # fmt: skip
    return charts


def _regret(story: Story) -> Chart | None:
    """The regret so far of a rule that decides online, against the best fixed weights in hindsight."""
    responses = responses_of(story.history.info_grids)
    losses = story.history.info.get("decision_loss")
    whole = responses is not None and responses.rounds_per_bin == responses.clients_per_bin == 1
    if responses is None or losses is None or not whole or responses.rounds * responses.clients > MOST_REGRET:
        return None
    values = responses.means()
    if len(values) != len(losses) or not all(map(math.isfinite, (*losses, *values.flatten()))):
        return None
    import torch

    from fedalloy.methods.weightings.regret import best_fixed, decision_losses

    seen = torch.tensor(values)
    best = decision_losses(seen, best_fixed(seen).expand(len(seen), -1))
    line = (torch.tensor(losses, dtype=torch.float64) - best).cumsum(0).tolist()
    kept = pick(len(line))
    series = [{"name": story.name, "x": [place + 1 for place in kept], "y": many(line[place] for place in kept)}]
    return {"id": f"regret-{story.name}", "kind": "line", "title": f"Regret: {story.name}, seed {story.seed}",
            "x": "round", "y": "regret so far", "series": series,
            "note": "Loss of the decisions so far less that of the best fixed weights, chosen in hindsight over the "
                    "whole run. What grows more slowly than the rounds is being learned."}  # fmt: skip
