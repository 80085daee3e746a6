"""``fedalloy flower backup`` and ``restore``: everything that a server has, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedalloy.cli.flower_members import ServerFolder

BackupFile = Annotated[Path, typer.Argument(help="A file of 'fedalloy flower backup'.", metavar="FILE")]


def backup(
    folder: ServerFolder,
    output: Annotated[Path, typer.Option("-o", "--output", help="The backup, a new .tar file.", metavar="FILE")],
) -> None:
    """Back up a server, also while it works: settings, certificates, node keys, Flower's database, all its runs.

    The file holds private keys: its owner alone can read it. Keep it as safe as the server.
    """
    from fedalloy.flower.backup import back_up

    runs = back_up(folder, output)
    typer.echo(f"wrote {output} ({output.stat().st_size / 1e6:.1f} MB): the server and {len(runs)} runs")


def restore(
    file: BackupFile,
    folder: Annotated[Path, typer.Argument(help="A new folder; gets server/ and runs/.", metavar="DIR")],
) -> None:
    """Restore a backup to a new folder, on this machine or another one, and say how its studies continue.

    A restored server and the one it is a copy of must not run at the same time.
    """
    from fedalloy.flower import backup as backups
    from fedalloy.flower.submission import WANTED, state_of

    about = backups.restore(file, folder)
    typer.echo(f"restored {len(about['files'])} files to {folder}, written by fedalloy {about['versions']['fedalloy']}")
    typer.echo(f"start the server:  fedalloy flower server {folder / 'server'}")
    for name in about["runs"]:
        run = folder / name
        if state_of(run) != "finished" and (run / WANTED).exists():
            typer.echo(f"continue {run.name}:  fedalloy flower run {folder / 'server'} {run / WANTED} -o {run}")
