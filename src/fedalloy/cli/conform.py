"""``fedalloy conform``: replay files of golden vectors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedalloy.cli.console import print_json, print_table
from fedalloy.cli.run import Json

if TYPE_CHECKING:
    from fedalloy.testing.vectors.replay import Report


def conform(
    files: Annotated[list[Path], typer.Argument(help="Files of golden vectors.", metavar="FILE...")],
    as_json: Json = False,
) -> None:
    """Replay golden vectors in float64. Every expected field is pass, fail or not built, with the largest error.

    Exits with 0 when all pass, 1 on any mismatch, 3 when all others pass but some are not built.
    """
    from fedalloy.testing.vectors.replay import exit_code, replay

    reports = [replay(file) for file in files]
    if as_json:
        print_json({"files": [_plain(report) for report in reports], "exit_code": exit_code(reports)})
    else:
        for report in reports:
            rows = [[one.name, one.status, "" if one.error is None else f"{one.error:.2e}"] for one in report.fields]
            print_table(["field", "status", "largest error"], rows, f"{report.path.name} ({report.group})", (2,))
        _total(reports)
    raise typer.Exit(exit_code(reports))


def _plain(report: Report) -> dict[str, Any]:
    fields = [
        {"name": one.name, "status": one.status, "error": one.error, "tolerance": one.tolerance}
        for one in report.fields
    ]
    return {"file": str(report.path), "group": report.group, "fields": fields, "exit_code": report.exit_code}


def _total(reports: list[Report]) -> None:
    states = [one.status for report in reports for one in report.fields]
    said = ", ".join(f"{states.count(state)} {state}" for state in ("pass", "fail", "not built"))
    typer.echo(f"{len(states)} fields: {said}")
