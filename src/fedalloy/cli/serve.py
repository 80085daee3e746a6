"""``fedalloy serve``: a live page over a folder of runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    folder: Annotated[Path, typer.Argument(help="The folder that holds runs, at any depth.")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8421,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="FEDALLOY_TOKEN",
            help="Allows stopping runs from the page; 'auto' generates a token and prints it.",
        ),
    ] = None,
) -> None:
    """Show runs live: curves, progress, time left and dropped clients; tick runs to compare them.

    Listens on this machine only (127.0.0.1); from another one, forward the port: ssh -L 8421:127.0.0.1:8421 HOST.
    Every user of this machine can read the page. It cannot change anything, except with a token: then it can stop
    runs. Ctrl-C ends the page, not the runs.
    """
    import contextlib
    import secrets

    from fedalloy.report.live.server import LiveServer

    chosen = secrets.token_urlsafe(12) if token == "auto" else token
    server = LiveServer(folder, port, chosen)
    typer.echo(f"{len(server.store.folders)} runs in {folder}: {server.url}")
    if token == "auto":
        typer.echo(f"token: {chosen}")
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever(poll_interval=0.2)
