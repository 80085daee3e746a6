"""``fedalloy plot``: one picture of a run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedalloy.cli.importing import AllowImports


class Kind(StrEnum):
    """The kinds of pictures."""

    curves = "curves"
    clients = "clients"
    gains = "gains"
    weights = "weights"
    fairness = "fairness"
    participation = "participation"
    lambda_ = "lambda"
    reliability = "reliability"
    line = "line"
    plane = "plane"
    rows = "rows"
    variance = "variance"


class Width(StrEnum):
    """Widths of a picture."""

    column = "column"
    page = "page"


def plot(
    kind: Annotated[Kind, typer.Argument(help="What to draw.")],
    runs: Annotated[
        list[Path],
        typer.Argument(help="A run folder, or a table of weights; several for some kinds.", metavar="RUN..."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture: .png, .pdf or .svg.")] = Path("plot.png"),
    metric: Annotated[
        str | None, typer.Option(help="The metric; default: the run's own, a loss for landscapes.")
    ] = None,
    points: Annotated[int, typer.Option(min=2, help="Points on a line, or along each side of a plane.")] = 21,
    clients: Annotated[int, typer.Option(min=1, help="For kind 'line': how many clients, drawn at random once.")] = 20,
    width: Annotated[Width, typer.Option(help="The width of a column of a paper, or of its page.")] = Width.column,
    allow_imports: AllowImports = False,
) -> None:
    """Draw a run for a paper. Needs matplotlib, which the extra 'report' installs.

    curves: a metric over rounds. clients: every client's score. gains: every client against the first algorithm,
    sorted. weights: how much each contribution counted, or the table that 'fedalloy unfold' learned.
    fairness: the share of clients below every score. participation: how often clients contributed. lambda: a metric
    against the share of the local model, with the spread over clients. reliability: accuracy against confidence. line:
    the loss between federated and local models. plane: the loss around the global model.

    For learned tables only. rows: every client's weight over rounds. variance: how much weights change over rounds
    against 1/sqrt(rounds), for several tables of different length.
    """
    from fedalloy.report.plots.canvas import Options
    from fedalloy.report.plots.kinds import draw

    draw(kind.value, runs, output, Options(metric, points, clients, width.value))
    typer.echo(str(output))
