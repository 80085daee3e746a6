"""``fedalloy report``: one page about some runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.", metavar="RUN...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page.")] = Path("report.html"),
) -> None:
    """Write one self-contained page: results, fairness, worst clients, data, participation, how to reproduce."""
    from fedalloy.report.page import write_page

    count = write_page(runs, output)
    typer.echo(f"{output}: {count} run{'s' if count != 1 else ''}")
