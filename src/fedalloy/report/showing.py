"""Results in a notebook: HTML without scripts, tables of pandas, pictures of matplotlib, the page.

:class:`fedalloy.core.showing.ShownRuns` calls these functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import singledispatch
from html import escape
from pathlib import Path
from typing import Any

from fedalloy.core.errors import CheckpointError, SpecError, nearest
from fedalloy.experiment.fit import RunResult
from fedalloy.experiment.records.reading import RunRecord, name_of, seed_of
from fedalloy.experiment.records.scalars import scalars
from fedalloy.report.page import write_page
from fedalloy.report.palette import LIGHT, assign
from fedalloy.report.plots import recorded
from fedalloy.report.plots.canvas import Options, whole_numbers
from fedalloy.report.plots.kinds import KINDS
from fedalloy.report.sketch import Line, legend, lines_svg
from fedalloy.results.export.tables import TABLES, client_rows, rows, weight_rows
from fedalloy.results.lines import by_round, statistic_of
from fedalloy.results.outcome import watched_by
from fedalloy.results.runs import by_name, runs_in
from fedalloy.results.statistics import Band
from fedalloy.results.summaries import gather
from fedalloy.studies.compare.comparing import Comparison
from fedalloy.tasks.describing import Describable, describe
from fedalloy.tasks.metrics.direction import higher_is_better

_COLUMNS = {"mean": "mean", "worst_served": "worst 10 %", "best_served": "best 10 %", "gini": "Gini"}
_REASONS = 5
"""Why runs did not finish: so many reasons are shown."""
_GLANCE = 50
"""Of data that are read on demand, so many clients are read to show a task; `task.describe()` reads more."""
_STYLE = "font-family:system-ui,sans-serif;font-size:13px;max-width:100%;overflow-x:auto"


@singledispatch
def html(thing: object) -> str:
    """What a notebook shows."""
    raise SpecError(f"{type(thing).__name__} has no table")


@html.register
def _(thing: RunResult) -> str:
    reason = f": {thing.ending.reason}" if thing.ending.reason else ""
    where = f"; records in {thing.folder}" if thing.folder else ""
    head = f"{thing.name}, seed {thing.seed}: {thing.status} in round {thing.ending.progress.round}{reason}{where}"
    return _run(head, list(thing.rounds()), thing.metric)


@html.register
def _(thing: RunRecord) -> str:
    head = f"{name_of(thing.recipe)}, seed {seed_of(thing.recipe)}: {thing.status.get('state', 'running')} in round "
    return _run(f"{head}{thing.last_round}; {thing.path}", list(thing.rounds()), watched_by(thing.recipe)[0])


@html.register
def _(thing: Comparison) -> str:
    metric = thing.outcomes[0].metric
    body = [
        [row.name, *(_spread(one) for one in (row.mean, row.worst_served, row.gini)),
         row.difference.text(3) if row.difference else "", row.coverage]
        for row in thing.rows
    ]  # fmt: skip
    head = ["algorithm", metric, "worst 10 %", "Gini", f"{metric} vs {thing.rows[0].name}", "seeds"]
    broken = dict.fromkeys(run.reason for run in thing.outcomes if run.reason and not run.finished)
    why = "".join(f"<div>{escape(reason)}</div>" for reason in list(broken)[:_REASONS])
    return _box(thing.conclusion, _table(head, body), why, _compared(thing), escape(str(thing.folder)))


@html.register
def _(thing: Describable) -> str:
    return _box(repr(thing).strip("<>"), describe(thing, _GLANCE)._repr_html_())


def frame(thing: Any, table: str | None) -> Any:
    """A table as a ``pandas.DataFrame``."""
    chosen = table or ("results" if isinstance(thing, Comparison) else "rounds")
    if chosen not in TABLES:
        raise SpecError(f"unknown table '{chosen}': {nearest(chosen, TABLES)}")
    try:
        import pandas as pd
    except ImportError:
        raise SpecError("to_pandas needs pandas: pip install 'fedalloy[notebook]'") from None
    if isinstance(thing, RunResult) and thing.folder is None:
        return pd.DataFrame(_in_memory(thing, chosen))
    return pd.DataFrame(list(rows(chosen, runs_in(_runs(thing)))))


def plot(thing: Any, kind: str, metric: str | None, ax: Any) -> Any:
    """A picture in axes of matplotlib."""
    if kind not in KINDS:
        raise SpecError(f"unknown picture '{kind}': {nearest(kind, KINDS)}")
    axes = ax if ax is not None else _new_axes()
    if isinstance(thing, RunResult) and thing.folder is None:
        if kind != "curves":
            raise SpecError(f"plot '{kind}' reads the records of a run: give fit a folder; 'curves' needs none")
        _draw_curve(axes, thing, metric or thing.metric)
    else:
        draw = recorded.draw_curves if kind == "curves" else KINDS[kind]
        draw(axes, _runs(thing), Options(metric))
    return axes


def page(thing: Any, path: Path) -> Path:
    """The page of ``fedalloy report``."""
    write_page(_places(thing), path)
    return path


def _runs(thing: Any) -> list[Path]:
    """The folders of a thing's runs; the folder of a comparison may hold runs of others."""
    if isinstance(thing, Comparison) and (own := [run.folder for run in thing.outcomes if run.folder]):
        return own
    return _places(thing)


def _places(thing: Any) -> list[Path]:
    place = thing.path if isinstance(thing, RunRecord) else thing.folder
    if place is None:
        raise SpecError("this needs the records of the run: give fit a folder")
    return [Path(place)]


def _in_memory(result: RunResult, table: str) -> list[dict[str, Any]]:
    if table == "results":
        raise SpecError("the table 'results' reads the records of a run: give fit a folder; the others need none")
    found: Iterable[dict[str, Any]] = ({"round": row["round"], **scalars(row)} for row in result.rounds())
    if table == "clients":
        found = client_rows(result.clients(), result.trained.fed.task.names)
    elif table == "weights":
        found = weight_rows(result.rounds())
    return [{"name": result.name, "seed": result.seed, **row} for row in found]


def _new_axes() -> Any:
    try:
        from matplotlib import pyplot
    except ImportError:
        raise SpecError("drawing needs matplotlib: pip install 'fedalloy[report]'") from None
    return pyplot.subplots(figsize=(5.6, 3.4), layout="constrained")[1]


def _draw_curve(axes: Any, result: RunResult, metric: str) -> None:
    result.last(metric)  # refuses a metric by which the run was not scored
    points = _points(list(result.rounds()), metric)
    for statistic, line in (("mean", "solid"), ("worst_served", "dotted")):
        found = [(round, value) for round, value in points[statistic] if math.isfinite(value)]
        axes.plot(*zip(*found, strict=True), linestyle=line, label=f"{result.name}, {_COLUMNS[statistic]}")
    axes.set(xlabel="round", ylabel=metric)
    whole_numbers(axes.xaxis)
    axes.legend()


def _run(head: str, rounds: Sequence[Mapping[str, Any]], metric: str) -> str:
    scored = [row for row in rounds if row.get("evaluation")]
    last = scored[-1]["evaluation"] if scored else {}
    body = [[name, *(_number(found.get(column)) for column in _COLUMNS)] for name, found in last.items()]
    points = _points(scored, metric)
    lines: list[Line] = [(LIGHT[0], "", points["mean"]), (LIGHT[0], "2 3", points["worst_served"])]
    said = f"{metric}: mean over clients, and (dotted) the tenth that is served worst"
    drawn = lines_svg(lines, said)
    below = f"<div>{escape(said)}</div>" if drawn else ""
    return _box(head, _table(["over clients", *_COLUMNS.values()], body) if body else "", drawn, below)


def _points(rounds: Iterable[Mapping[str, Any]], metric: str) -> dict[str, list[tuple[float, float]]]:
    higher, scored = higher_is_better(metric), [row for row in rounds if row.get("evaluation")]
    return {
        name: [(float(row["round"]), statistic_of(row, metric, name, higher)) for row in scored]
        for name in ("mean", "worst_served")
    }


def _compared(comparison: Comparison) -> str:
    """The mean over the seeds of every algorithm, over rounds."""
    try:
        groups = by_name(gather(_runs(comparison)))
    except (CheckpointError, SpecError, OSError):
        return ""
    styles = assign(groups)
    lines: list[Line] = []
    for name, seeds in groups.items():
        found = by_round({round: mean for round, mean, _ in summary.curve} for summary in seeds)
        points = [(float(round), Band.of(values).mean) for round, values in found.items()]
        lines.append((styles[name].light, " ".join(map(str, styles[name].dash)), points))
    said = f"{comparison.outcomes[0].metric}: mean over clients and seeds"
    drawn = lines_svg(lines, said)
    below = f"<div>{escape(said)}</div>" if drawn else ""
    return drawn + below + legend({name: styles[name].light for name in groups})


def _spread(spread: Any) -> str:
    return spread.text() if spread else ""


def _number(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.3f}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    cells = [f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in body]
    top = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head)}</tr>" if any(head) else ""
    return f'<table style="text-align:left">{top}{"".join(cells)}</table>'


def _box(head: str, *parts: str) -> str:
    return f'<div style="{_STYLE}"><b>{escape(head)}</b>{"".join(parts)}</div>'
