"""The table of results as a paper prints it: what it decides as the caption, one line per algorithm with mean and
deviation over seeds and the difference to the first with its interval. Bold is what is decided to lead."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from fedalloy.experiment.records import atomic
from fedalloy.results.conclusion import conclusion, intervals, notes
from fedalloy.results.evidence import Evidence
from fedalloy.results.looks import Look, looks_in
from fedalloy.results.outcome import RunOutcome
from fedalloy.results.runs import read_outcomes
from fedalloy.results.statistics import Spread
from fedalloy.results.table import ResultRow, leaders, summarise

_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_SPECIAL |= {one: f"\\{one}" for one in "&%$#_{}"}


def write_latex(path: Path, places: Sequence[Path]) -> int:
    """Write the table of the runs in some folders (needs the LaTeX package booktabs); returns its number of
    algorithms."""
    outcomes = read_outcomes(places)
    atomic.write_text(path, latex(outcomes, looks_in(places)))
    return len({run.name for run in outcomes})


def latex(outcomes: Sequence[RunOutcome], recorded: Sequence[Look] = ()) -> str:
    """The table as text. The caption says what is decided and what the intervals are; the rest that a reader may want
    is a comment above it."""
    rows, metric = summarise(outcomes, recorded), outcomes[0].metric
    head = [escape(metric), "mean", r"worst 10\,\%", r"best 10\,\%", "Gini"]
    head += [escape(f"against {rows[0].name}")] if len(rows) > 1 else []
    leading = leaders(rows)
    body = [" & ".join(_line(row, row.name in leading, len(rows) > 1)) + r" \\" for row in rows]
    seeds = "/".join(map(str, sorted({len(row.seeds) for row in rows})))
    said = [f"{metric} over clients; mean and standard deviation over {seeds} seeds; bold where it is decided to lead"]
    rules = [r"\toprule", " & ".join(head) + r" \\", r"\midrule", *body, r"\bottomrule"]
    caption = " ".join(filter(None, (conclusion(outcomes, recorded), intervals(outcomes, recorded))))
    return "\n".join([
        *(f"% {line}" for line in (*said, *notes(outcomes, recorded))),
        r"\begin{table}", r"\centering", rf"\caption{{{escape(caption)}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(head) - 1)}}}", *rules, r"\end{tabular}", r"\end{table}", "",
    ])  # fmt: skip


def _line(row: ResultRow, bold: bool, compared: bool) -> list[str]:
    cells = [_cell(row.mean, bold), *(_cell(one) for one in (row.worst_served, row.best_served, row.gini))]
    return [escape(_named(row)), *cells, *([_apart(row.difference)] if compared else [])]


def _named(row: ResultRow) -> str:
    """The name, with the number of seeds used where some are missing."""
    return f"{row.name}, {row.coverage} seeds" if row.coverage != str(row.asked) else row.name


def escape(text: str) -> str:
    """The text with LaTeX's special characters escaped.

    >>> escape("fed_avg 50%")
    'fed\\\\_avg 50\\\\%'
    """
    return re.sub(r"[\\~^&%$#_{}]", lambda found: _SPECIAL[found[0]], text)


def _cell(spread: Spread | None, bold: bool = False) -> str:
    if spread is None:
        return "--"
    mean = f"{spread.mean:.3f}" if math.isfinite(spread.mean) else r"\infty"
    mean = rf"\mathbf{{{mean}}}" if bold else mean
    return f"${mean}$" if spread.deviation is None else rf"${mean} \pm {spread.deviation:.3f}$"


def _apart(found: Evidence | None) -> str:
    if found is None or math.isnan(found.estimate):
        return "--"
    return f"${found.text()}$".replace("inf", r"\infty") + (f" ({found.reason})" if found.reason else "")
