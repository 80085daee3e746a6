"""What a comparison decides: its first line, and the table with simultaneous intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedalloy.report import data
from fedalloy.report.context import ReportContext
from fedalloy.report.markup import Cell, named, paragraph, section, spread, table, text
from fedalloy.results.conclusion import notes

COLOURS = {"better": "up", "worse": "down"}


def first_line(context: ReportContext) -> str:
    """The answer of an advice, or the conclusion; nothing for one algorithm, which is compared with none."""
    if context.advices:
        return "".join(paragraph(one["first"], "lead verdict") for one in context.advices)
    return paragraph(context.conclusion, "lead verdict") if len(context.styles) > 1 else ""


def results(context: ReportContext) -> str:
    """Mean and spread over seeds; differences to the first algorithm with simultaneous intervals and verdicts."""
    rows, first = data.result_rows(context.summaries, context.looks), context.summaries[0].outcome
    head = ["algorithm", f"mean {first.metric}", "worst 10 %", "Gini"]
    head += [f"rounds to {first.target:g}"] if first.target is not None else []
    body = [_means(row, context) for row in rows]
    made = table("Results", [*head, "seeds"], body)
    note = paragraph("Mean ± standard deviation over seeds, which is not the uncertainty of the mean.", "soft")
    return section("results", "Results", _differences(context, rows), made, note, _trouble(context))


def _differences(context: ReportContext, rows: Sequence[dict[str, Any]]) -> str:
    """The table of what decides; empty for one algorithm."""
    if len(rows) < 2:
        return ""
    first, metric = rows[0]["name"], context.summaries[0].outcome.metric
    exact = any(row["difference"] and row["difference"]["exact"] is not None for row in rows)
    on_rounds = any(row["rounds_difference"] for row in rows)
    head = ["algorithm", "verdict", f"{metric} against {first}", "p", *["exact p"] * exact]
    head += ["verdict (rounds)", f"rounds against {first}", "p (rounds)"] * on_rounds
    body = [
        [named(row["name"], context.styles), *_cells(row["difference"] or _missing(row), exact),
         *(_cells(row["rounds_difference"] or "no common seed") if on_rounds else ())]
        for row in rows[1:]
    ]  # fmt: skip
    said = " ".join(notes([summary.outcome for summary in context.summaries], context.looks))
    return table(f"Differences to {first}", head, body) + paragraph(said, "soft")


def _missing(row: dict[str, Any]) -> str:
    """Why there is no difference of the means: runs that end at the target have only rounds to compare."""
    return "not compared" if row["rounds_difference"] else "no common seed"


def _cells(found: dict[str, Any] | str, exact: bool = False) -> list[Cell]:
    """A verdict, the difference with its interval, and its p, or why there are none; coloured only where decided."""
    if isinstance(found, str):
        return [text(found), *[Cell("", None)] * (2 + exact)]
    kind = COLOURS.get(found["outcome"], "")
    verdict = Cell(found["verdict"], "", f"text {kind}".strip())
    # The p of runs that have not finished would be read as a verdict.
    ps = [None, None] if found["outcome"] == data.OPEN else [found["p"], found["exact"]]
    return [verdict, Cell(found["text"], found["mean"], kind), *(_p(value) for value in ps[: 1 + exact])]


def _p(value: float | None) -> Cell:
    return Cell("", None) if value is None else Cell("< 0.0001" if value < 1e-4 else f"{value:.4f}", value)


def _means(row: dict[str, Any], context: ReportContext) -> list[Cell]:
    cells = [named(row["name"], context.styles), *(spread(row[key]) for key in ("mean", "worst_served", "gini"))]
    if context.summaries[0].outcome.target is not None:
        cells.append(_to_target(row, spread(row["rounds_to_target"], 1)))
    return [*cells, Cell(row["coverage"], row["seeds"])]


def _to_target(row: dict[str, Any], found: Cell) -> Cell:
    if not found.text:
        return Cell("not reached", None)
    missing = f" ({row['reached']}/{row['seeds']})" if row["reached"] < row["seeds"] else ""
    return Cell(found.text + missing, found.value, found.kind)


def _trouble(context: ReportContext) -> str:
    """The runs that did not finish, and why."""
    lost = [summary.outcome for summary in context.summaries if not summary.outcome.finished]
    return "".join(
        paragraph(f"{run.name}, seed {run.seed}: {run.state} in round {run.round} of {run.rounds}. {run.reason}", "bad")
        for run in lost
    )
