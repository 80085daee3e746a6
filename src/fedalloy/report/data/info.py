"""Intermediate values of rules: numbers as lines, vectors over clients as heat maps, and regret in hindsight."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedalloy.report.data.plain import Chart, many, pick
from fedalloy.report.data.weights import heat
from fedalloy.results.grid import Grid
from fedalloy.results.lines import responses_of
from fedalloy.results.runs import by_name
from fedalloy.results.summaries import RunSummary

MOST_REGRET = 400_000
"""Rounds x clients up to which the best fixed decision is computed."""


def info_charts(summaries: Sequence[RunSummary]) -> list[Chart]:
    """Every column: lines over all algorithms that have it, then heat maps of the first seed of each."""
    firsts = [runs[0] for runs in by_name(summaries).values()]
    names = dict.fromkeys(name for summary in firsts for name in summary.history.info)
    lines = [_line(firsts, name) for name in names]
    return [*lines, *(chart for summary in firsts for chart in _heats(summary)), *filter(None, map(_regret, firsts))]


def _line(summaries: Sequence[RunSummary], name: str) -> Chart:
    series = []
    for summary in summaries:
        values = summary.history.info.get(name)
        if values is not None:
            kept = pick(len(values))
            at = [summary.history.rounds[place] for place in kept]
            series.append({"name": summary.name, "x": at, "y": many(values[place] for place in kept)})
    return {"id": f"info-{name}", "kind": "line", "title": name, "x": "round", "y": name, "series": series,
            "note": "First seed of each algorithm."}  # fmt: skip


def _heats(summary: RunSummary) -> list[Chart]:
    """Columns with the same first name are one chart: 'angle.conv1' and 'angle.fc' are panels of 'angle'."""
    groups: dict[str, dict[str, Grid]] = {}
    for name, grid in summary.history.info_grids.items():
        first, _, layer = name.partition(".")
        groups.setdefault(first, {})[layer] = grid
    charts = []
    for name, grids in groups.items():
        chart = heat(summary, grids)
        charts.append(chart | {
            "id": f"info-{name}-{summary.name}", "title": f"{name}: {summary.name}, seed {summary.seed}", "value": name,
        })  # fmt: skip
    return charts


def _regret(summary: RunSummary) -> Chart | None:
    """The regret so far of a rule that decides online, against the best fixed weights in hindsight."""
    responses = responses_of(summary.history.info_grids)
    losses = summary.history.info.get("decision_loss")
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
    series = [{"name": summary.name, "x": [place + 1 for place in kept], "y": many(line[place] for place in kept)}]
    return {"id": f"regret-{summary.name}", "kind": "line", "title": f"Regret: {summary.name}, seed {summary.seed}",
            "x": "round", "y": "regret so far", "series": series,
            "note": "Loss of the decisions so far minus that of the best fixed weights, chosen in hindsight over the "
                    "whole run. Regret that grows more slowly than the rounds shows learning."}  # fmt: skip
