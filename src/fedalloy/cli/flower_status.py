"""``fedalloy flower status``: what is known about a federation, for people and for monitoring."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedalloy.cli.console import complain, print_json, print_table
from fedalloy.cli.failing import sentence
from fedalloy.cli.run import Json

if TYPE_CHECKING:
    from fedalloy.flower.progress import Participation, Progress
    from fedalloy.flower.status import Known, Overview, Server

_EVERY = 2.0
"""Seconds between two looks."""


def status(
    folder: Annotated[
        Path | None, typer.Argument(help="A federation, a server's folder or a run folder.", metavar="[DIR]")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every two seconds, until Ctrl-C.")] = False,
    as_json: Json = False,
) -> None:
    """Show the server, its nodes (last contact, refusals) and its runs: round, speed, time left, who is missing, why.

    Without DIR: the newest run on a federation under runs/. For a server: its unfinished and paused runs and those that
    broke off beside them, or the newest one. The exit code is for monitoring: 0 all is well, 1 a warning (a node is
    missing, a certificate expires within 60 days, less than 1 GB of disk is free), 2 critical (no server, no node, a
    run that failed or was interrupted).
    """
    while True:
        code = _look(folder, as_json, clear=watch and not as_json)
        if not watch:
            raise typer.Exit(code)
        try:
            time.sleep(_EVERY)
        except KeyboardInterrupt:
            raise typer.Exit(code) from None


def logs(
    folder: Annotated[Path, typer.Argument(help="A run, a server's folder, or a node's folder.", metavar="DIR")],
    site: Annotated[str, typer.Argument(help="Only what concerns this site.", metavar="[SITE]")] = "",
    lines: Annotated[int, typer.Option("-n", "--lines", help="The last so many lines.")] = 40,
) -> None:
    """Show what the server logged about a site, the rounds it missed, and its own log if that is on this machine."""
    from fedalloy.flower.site_logs import site_log

    for line in site_log(folder, site)[-lines:]:
        typer.echo(line)


def missing_rows(folder: Path) -> list[list[str]]:
    """A table of the clients that did not contribute to the last round of a run."""
    from fedalloy.flower.progress import progress

    return [[one.name, _last(one), one.reason] for one in progress(folder).missing]


def _look(folder: Path | None, as_json: bool, clear: bool) -> int:
    """Show what is known now; the exit code. Whatever cannot be read is critical, and JSON for a machine too."""
    from fedalloy.core.errors import FedalloyError
    from fedalloy.flower.status import CRITICAL, look, unknown

    try:
        seen = look(folder or _newest())
    except (FedalloyError, OSError) as error:
        why = sentence(error) or str(error)
        print_json(unknown(why)) if as_json else complain(why)
        return CRITICAL
    if clear:
        typer.clear()
    _show(seen, as_json)
    return seen.code


def _newest() -> Path:
    from fedalloy.core.errors import SpecError

    found = sorted(Path("runs").glob("**/federation.json"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SpecError(
            "there is no run on a federation under runs/; name a folder, or start one: fedalloy flower up RECIPE"
        )
    return found[-1].parent


def _show(seen: Overview, as_json: bool) -> None:
    if as_json:
        print_json(seen.to_json())
        return
    if seen.server:
        _show_server(seen.server, seen.at)
    for run in seen.runs:
        _show_run(run)
    for finding in seen.findings():
        typer.echo(f"{'warning' if finding.level == 1 else 'CRITICAL'}: {finding.text}")


def _show_server(server: Server, now: float) -> None:
    state = "running" if server.open else "running, but nodes cannot reach it: its front does not answer"
    typer.echo(f"server {server.address}: {state if server.answers else 'not running'}")
    versions = ", ".join(f"{package} {found}" for package, found in (server.versions or {}).items())
    typer.echo(f"{versions}; {server.free:.0f} GB of disk are free")
    if server.certificate_ends:
        typer.echo(f"its certificates are valid until {server.certificate_ends:%Y-%m-%d}")
    if server.nodes:
        columns = ["node", "", "since", "last contact", "fedalloy", "refused"]
        print_table(columns, [_node_row(node, now) for node in server.nodes])
    for run in [one for one in server.runs if not one.over] or server.runs[:1]:
        typer.echo(f"run {run.number}: {run.state}{f' since {_clock(run.since)}' if run.since else ''}")


def _node_row(node: Known, now: float) -> list[str]:
    refused = f"{_ago(node.refused, now)}: {node.refusal}" if node.refused else ""
    since = _clock(node.since) if node.since else ""
    return [node.title, node.state, since, _ago(node.last_contact, now), node.version, refused]


def _show_run(run: Progress) -> None:
    total = f" of {run.rounds}" if run.rounds else ""
    typer.echo(f"run {run.folder}: {run.state} after round {run.round}{total}{f': {run.reason}' if run.reason else ''}")
    if run.seconds is not None:
        left = f", {_span(run.left)} left" if run.left is not None else ""
        typer.echo(f"{_span(run.seconds)} a round{left}")
    if run.state == "running" and run.quiet is not None and run.news:
        typer.echo(f"last news, {_span(run.quiet)} ago: {run.news}")
    if run.clients:
        rows = [[one.name, one.state, _last(one), one.reason] for one in run.clients]
        print_table([f"round {run.round}", "", "last contributed to", "why not"], rows)
    if run.troubles:
        rows = [[str(one.round), one.client, one.reason] for one in run.troubles]
        print_table(["round", "client", "why it was dropped"], rows, numbers=(0,))
    elif run.round:
        typer.echo("no client dropped out of a finished round")
    for node, why in run.refused.items():
        typer.echo(f"{node} is refused: {why}")


def _last(one: Participation) -> str:
    if one.last is None:
        return ""
    return f"round {one.last}" if one.last else "no round"


def _clock(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}"


def _ago(seconds: float | None, now: float) -> str:
    return "" if seconds is None else f"{_span(max(0.0, now - seconds))} ago"


def _span(seconds: float) -> str:
    """A length of time.

    >>> [_span(one) for one in (0.24, 61, 7300, 200_000)]
    ['0.2 s', '1 min 1 s', '2 h 1 min', '2 d 7 h']
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    units = (("d", 86_400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1))
    unit, size, smaller, part = next(one for one in units if seconds >= one[1])
    return f"{int(seconds // size)} {unit} {int(seconds % size // part)} {smaller}"
