"""Pictures of what runs recorded: curves, every client's score and gain, fairness, participation, weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.report.palette import Style, assign
from fedalloy.report.plots.canvas import Options, whole_numbers
from fedalloy.results.gains import client_gains
from fedalloy.results.lines import by_round
from fedalloy.results.runs import by_name
from fedalloy.results.statistics import Band
from fedalloy.results.summaries import RunSummary, gather


def draw_curves(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """A metric over rounds: one line per algorithm, the mean over its seeds with a band from the lowest to the highest
    of them; the tenth of its clients that is served worst dotted, where the metric has a direction."""
    summaries = gather(runs, options.metric)
    seeds = by_name(summaries)
    styles = assign(seeds)
    for name, told in seeds.items():
        _draw_line(axes, name, told, styles[name])
    bands = " (bands: all seeds)" if len(summaries) > len(seeds) else ""
    dotted = " (dotted: worst 10 %)" if summaries[0].higher_is_better is not None else ""
    axes.set(xlabel=f"round{bands}", ylabel=f"{options.metric or summaries[0].metric}{dotted}")
    whole_numbers(axes.xaxis)
    axes.legend()


def _draw_line(axes: Any, name: str, seeds: Sequence[RunSummary], style: Style) -> None:
    found = by_round({round: values for round, *values in summary.curve} for summary in seeds)
    means, worst = ([Band.of(values[place] for values in some) for some in found.values()] for place in (0, 1))
    dash = (0, tuple(length / 2 for length in style.dash)) if style.dash else "solid"
    axes.plot(list(found), [one.mean for one in means], label=name, color=style.light, linestyle=dash)
    axes.plot(list(found), [one.mean for one in worst], linestyle=":", color=style.light)
    if len(seeds) > 1:
        low, high = [one.low for one in means], [one.high for one in means]
        axes.fill_between(list(found), low, high, color=style.light, alpha=0.15, linewidth=0)


SPREAD = 0.28
"""How far a dot may be above or below its line."""
_FEW = 100
"""Dots of one line that are drawn large."""


def draw_clients(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """Every client as a dot, and the median: one strip per algorithm, all its seeds together."""
    summaries = gather(runs, options.metric)
    groups = {
        name: [client.score for run in some for client in run.clients if math.isfinite(client.score)]
        for name, some in by_name(summaries).items()
    }
    groups = {name: scores for name, scores in groups.items() if scores}
    if not groups:
        raise SpecError("no client of these runs was scored by this metric; evaluate it first (evaluate.metrics)")
    styles = assign(groups)
    for place, (name, scores) in enumerate(groups.items()):
        # Random jitter from a fixed seed.
        apart = (Key.of(0).fold(name).uniform(len(scores)).numpy() - 0.5) * 2 * SPREAD
        size = 6 if len(scores) > _FEW else 18
        axes.scatter(scores, place + apart, s=size, alpha=0.6, linewidths=0, color=styles[name].light)
        axes.plot([float(np.median(scores))] * 2, [place - SPREAD, place + SPREAD], color="0.1", linewidth=1.5)
    axes.set_yticks(range(len(groups)), list(groups))
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(f"{options.metric or summaries[0].metric} of a client (line: median)")


def draw_gains(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """Every client against the first algorithm: one line per other algorithm, the largest loss at the left."""
    summaries = gather(runs, options.metric)
    metric = options.metric or summaries[0].metric
    found = client_gains(summaries, metric)
    styles, drawn = assign(summary.name for summary in summaries), 0
    for one in found:
        gains = [client.gain for client in one.clients if math.isfinite(client.gain)]
        if gains:
            shares = 100 * (np.arange(len(gains)) + 0.5) / len(gains)
            axes.step(shares, gains, where="mid", label=one.name, color=styles[one.name].light)
            drawn += 1
    if not drawn:
        why = "; ".join(one.reason for one in found if one.reason) or "give the runs of at least two algorithms"
        raise SpecError(f"no client gains or loses: {why}")
    axes.axhline(0.0, color="0.1", linewidth=0.8)
    axes.set(xlabel="clients in %, those that lose most first", ylabel=f"better off by ({metric})")
    axes.set_title(f"against {found[0].against}")
    axes.legend()


def draw_fairness(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """The share of clients up to every score, all seeds of an algorithm together: a steep line means equal scores."""
    summaries = gather(runs, options.metric)
    styles, drawn = assign(summary.name for summary in summaries), 0
    for name, some in by_name(summaries).items():
        known = [client.score for run in some for client in run.clients if not math.isnan(client.score)]
        scores = sorted(filter(math.isfinite, known))
        if scores:
            # A loss that overflowed cannot be drawn but still counts as a client: the line then ends below 1.
            shares = np.arange(1, len(scores) + 1) / len(known)
            axes.step([scores[0], *scores], [0, *shares], where="post", label=name, color=styles[name].light)
            drawn += 1
    if not drawn:
        raise SpecError("no client of these runs was scored by this metric; evaluate it first (evaluate.metrics)")
    axes.set(xlabel=options.metric or summaries[0].metric, ylabel="share of clients up to here", ylim=(0, 1))
    axes.legend()


def draw_participation(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """In how many rounds clients contributed: one line per algorithm (its first seed), fewest contributions first."""
    summaries = gather(runs)
    styles = assign(summary.name for summary in summaries)
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, (summary, *_) in by_name(summaries).items():
        counts = tuple(sorted(summary.contributed))
        alike.setdefault(counts, []).append(name)
    for counts, names in alike.items():  # a seed draws the same clients for every algorithm: one line
        axes.step(range(1, len(counts) + 1), counts, where="mid", label=", ".join(names), color=styles[names[0]].light)
    axes.set(xlabel="clients, fewest contributions first", ylabel="rounds with a contribution")
    axes.set_ylim(bottom=0)
    whole_numbers(axes.xaxis, axes.yaxis)
    axes.legend()


def draw_contributions(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """The weight of each contribution, as a heat map: empty where a client did not take part. For weights by layer, the
    last layer is shown."""
    (summary,) = gather(runs)[:1]
    if not summary.history.weights:
        raise SpecError(f"{runs[0]} has no weights yet: no contribution has been used")
    layer, grid = list(summary.history.weights.items())[-1]
    means = grid.means()
    reach = (0.5, grid.rounds_per_bin * len(means) + 0.5, grid.clients_per_bin * means.shape[1] - 0.5, -0.5)
    drawn = axes.imshow(means.T, aspect="auto", interpolation="nearest", cmap="Blues", vmin=0, extent=reach)
    axes.figure.colorbar(drawn, ax=axes, label="weight")
    axes.grid(visible=False)
    whole_numbers(axes.xaxis, axes.yaxis)
    axes.set(xlabel="round", ylabel="client", title=f"{summary.name}{f', layer {layer}' if layer else ''}")
