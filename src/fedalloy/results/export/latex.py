"""The table of results as a paper prints it: one line per algorithm, mean and deviation over seeds, best in bold."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from fedalloy.experiment.records import atomic
from fedalloy.results.runs import read_outcomes
from fedalloy.results.statistics import Spread, leading
from fedalloy.results.table import ResultRow, summarise

_SPECIAL = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_SPECIAL |= {one: f"\\{one}" for one in "&%$#_{}"}


def write_latex(path: Path, places: Sequence[Path]) -> int:
    """Write the table of the runs in some folders (needs the LaTeX package booktabs); returns its number of
    algorithms."""
    outcomes = read_outcomes(places)
    table = summarise(outcomes)
    atomic.write_text(path, latex(table, outcomes[0].metric))
    return len(table)


def latex(table: Sequence[ResultRow], metric: str) -> str:
    """The table as text."""
    higher = table[0].higher_is_better if table else None
    columns: dict[str, tuple[list[Spread | None], bool | None]] = {
        "mean": ([row.mean for row in table], higher),
        r"worst 10\,\%": ([row.worst_served for row in table], higher),
        r"best 10\,\%": ([row.best_served for row in table], higher),
        "Gini": ([row.gini for row in table], False),
    }
    cells = [_column(*column) for column in columns.values()]
    body = [
        f"{escape(_named(row))} & {' & '.join(line)} \\\\"
        for row, line in zip(table, zip(*cells, strict=True), strict=True)
    ]
    seeds = sorted({len(row.seeds) for row in table})
    note = f"% {metric} over clients; mean and standard deviation over {'/'.join(map(str, seeds))} seeds; best in bold"
    head = " & ".join([escape(metric), *columns]) + r" \\"
    rules = [r"\toprule", head, r"\midrule", *body, r"\bottomrule"]
    return "\n".join([note, rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", *rules, r"\end{tabular}", ""])


def _named(row: ResultRow) -> str:
    """The name, with the number of seeds used where some are missing."""
    return f"{row.name}, {row.coverage} seeds" if row.coverage != str(row.asked) else row.name


def escape(text: str) -> str:
    """The text with LaTeX's special characters escaped.

    >>> escape("fed_avg 50%")
    'fed\\\\_avg 50\\\\%'
    """
    return re.sub(r"[\\~^&%$#_{}]", lambda found: _SPECIAL[found[0]], text)


def _column(values: Sequence[Spread | None], higher: bool | None) -> list[str]:
    leader = leading(values, higher)
    return [_cell(one, one is not None and one.mean == leader) for one in values]


def _cell(spread: Spread | None, bold: bool) -> str:
    if spread is None:
        return "--"
    mean = f"{spread.mean:.3f}" if math.isfinite(spread.mean) else r"\infty"
    mean = rf"\mathbf{{{mean}}}" if bold else mean
    return f"${mean}$" if spread.deviation is None else rf"${mean} \pm {spread.deviation:.3f}$"
