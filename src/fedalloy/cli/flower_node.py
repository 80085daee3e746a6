"""``fedalloy flower doctor`` and ``dry-run``: a node, before it takes part."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedalloy.cli.console import number, print_json, print_table
from fedalloy.cli.flower_site import NodeFolder, StudyFile
from fedalloy.cli.importing import AllowImports
from fedalloy.cli.run import Json


def doctor(
    folder: NodeFolder,
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe of the study, to check it too.", metavar="[RECIPE]")
    ] = None,
    as_json: Json = False,
    allow_imports: AllowImports = False,
) -> None:
    """Check everything that a node needs, before the first round: one line each, with what to do.

    Settings, key, disk; the way to the server: name, proxy, private CA, port, TLS, clock, and whether the server knows
    the key; the data and the policy, with RECIPE against the study. Exit code: 0 ready, 1 something must be repaired.
    """
    from fedalloy.experiment.recipe import load
    from fedalloy.flower.doctor import examine
    from fedalloy.flower.reachability import OK, PROBLEM

    found = examine(folder, load(recipe) if recipe else None)
    wrong = [one for one in found if one.state == PROBLEM]
    if as_json:
        print_json({"ready": not wrong, "checks": [asdict(one) for one in found]})
        raise typer.Exit(1 if wrong else 0)
    for one in found:
        typer.echo(f"{one.state.upper() if one.state != OK else 'ok':<12}{one}")
    typer.echo(f"to repair: {', '.join(one.name for one in wrong)}" if wrong else "this node is ready")
    raise typer.Exit(1 if wrong else 0)


def dry_run(
    folder: NodeFolder,
    recipe: StudyFile,
    rounds: Annotated[int, typer.Option("--rounds", help="How many rounds.")] = 2,
    as_json: Json = False,
    allow_imports: AllowImports = False,
) -> None:
    """Train rounds of a study on this node's own data, without any network; nothing is sent and nothing is kept.

    Orders, policy and approval are those of a federation, with this site alone.
    """
    from fedalloy.experiment.recipe import load
    from fedalloy.flower.dry_run import dry_run as trained
    from fedalloy.flower.layout import NodePlace

    found = trained(NodePlace.read(folder).config, load(recipe), rounds)
    if as_json:
        print_json([asdict(one) for one in found])
        return
    rows = [[str(one.round), number(one.loss), str(one.received), str(one.sent), f"{one.seconds:.1f}"] for one in found]
    print_table(["round", "training loss", "bytes received", "bytes to send", "seconds"], rows, numbers=range(5))
    told = ", ".join(f"{name} {number(value)}" for name, value in found[-1].scores.items())
    typer.echo(f"on this site's own test part: {told or 'no scores'}. Nothing was sent")
