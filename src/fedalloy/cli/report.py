"""``fedalloy report``: an HTML page about runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedalloy.cli.importing import AllowImports


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, or folders that hold some.", metavar="RUN..."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page.")] = Path("report.html"),
    allow_imports: AllowImports = False,
) -> None:
    """Write one self-contained page: what is decided, results over seeds, curves, every client, who gains and who
    loses, fairness, weights, what the rules computed, participation, data, cost, how to reproduce. Charts have tables
    and can be saved; no network is needed.

    Several folders of comparisons with the same algorithms are federations: the page shows every algorithm against the
    first one on each, and average ranks from 10 federations on.

    fedalloy report runs/digits runs/adult runs/covtype -o federations.html
    """
    from fedalloy.report.page import write_page

    count = write_page(runs, output)
    typer.echo(f"{output}: {count} run{'s' if count != 1 else ''}")
