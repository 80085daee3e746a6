"""``fedalloy export``: runs as tables for other programs and for papers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Format(StrEnum):
    """The formats."""

    csv = "csv"
    parquet = "parquet"
    latex = "latex"


ENDINGS = {
    "": Format.csv,
    ".txt": Format.csv,
    ".csv": Format.csv,
    ".parquet": Format.parquet,
    ".pq": Format.parquet,
    ".tex": Format.latex,
}
"""The format of a file whose name says it."""


class TableName(StrEnum):
    """The tables."""

    results = "results"
    rounds = "rounds"
    clients = "clients"
    weights = "weights"


def export(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.", metavar="RUN...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The file.")],
    format: Annotated[
        Format | None, typer.Option("--format", help="latex: only the results. Default: by the file's ending, or csv.")
    ] = None,
    table: Annotated[TableName, typer.Option(help="One row per run, round, client of an evaluation, or weight.")] = (
        TableName.results
    ),
) -> None:
    """Write a table of runs: CSV, Parquet (needs pyarrow), or LaTeX for a paper (needs booktabs).

    The LaTeX table has one line per algorithm with mean and deviation over seeds, as 'fedalloy compare' prints it.
    """
    from fedalloy.core.errors import SpecError
    from fedalloy.results.export.tables import blocks
    from fedalloy.results.export.writing import WRITERS
    from fedalloy.results.runs import runs_in

    format = format or _said_by(output)
    if format is Format.latex and table is not TableName.results:
        raise SpecError(f"--table {table.value} as LaTeX: only 'results' can be written as LaTeX; use csv or parquet")
    chosen = runs_in(runs)
    output.parent.mkdir(parents=True, exist_ok=True)
    if format is Format.latex:
        from fedalloy.results.export.latex import write_latex

        count = write_latex(output, runs)
    else:
        count = WRITERS[format.value](output, lambda: blocks(table.value, chosen))
    typer.echo(f"{output}: {count} rows")


def _said_by(output: Path) -> Format:
    """The format that a file's ending says; one that says another format is refused."""
    from fedalloy.core.errors import SpecError

    ending = output.suffix.lower()
    if ending not in ENDINGS:
        known = ", ".join(one for one in ENDINGS if one)
        raise SpecError(
            f"a table as '{output.name}': the ending selects the format, allowed are {known}; or give --format"
        )
    return ENDINGS[ending]
