"""``fedalloy plot``: one picture of a run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Kind(StrEnum):
    """The pictures there are."""

    curves = "curves"
    lambda_ = "lambda"
    reliability = "reliability"
    line = "line"
    plane = "plane"


def plot(
    kind: Annotated[Kind, typer.Argument(help="What is drawn.")],
    runs: Annotated[list[Path], typer.Argument(help="A run folder; several for curves.", metavar="RUN...")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The picture: .png, .pdf or .svg.")] = Path("plot.png"),
    metric: Annotated[
        str | None, typer.Option(help="The metric; default: the run's own, a loss for landscapes.")
    ] = None,
    points: Annotated[int, typer.Option(min=2, help="Points on a line, or along each side of a plane.")] = 21,
    clients: Annotated[int, typer.Option(min=1, help="For lines: as many clients, drawn once.")] = 20,
) -> None:
    """Draw a run. Needs matplotlib, which the extra 'report' installs.

    curves: a metric over rounds. lambda: a metric against the share of the local model, with the spread over
    clients. reliability: accuracy against confidence. line: the loss between federated and local models. plane:
    the loss around the global model.
    """
    from fedalloy.report.plots.kinds import Options, draw

    draw(kind.value, runs, output, Options(metric, points, clients))
    typer.echo(str(output))
