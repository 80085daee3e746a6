"""``fedalloy recipe``: the form of recipes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedalloy.cli.run import Changes

app = typer.Typer(help="Recipes: check one, or export their schema for an editor.", no_args_is_help=True)


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes; editors use it to complete and check TOML files."""
    from fedalloy.recipe import schema as made

    typer.echo(json.dumps(made(), indent=2))


@app.command()
def check(recipe: Annotated[Path, typer.Argument(help="A recipe (.toml).")], changes: Changes = None) -> None:
    """Check a recipe, every entry of its comparison included, without running it."""
    from fedalloy.compare.comparing import check_grids, check_seeds
    from fedalloy.recipe import entry_names, load, resolve

    found = load(recipe, changes)
    resolve(found)
    for entry in entry_names(found):
        resolve(found, entry=entry)
    check_seeds(found)
    check_grids(found)
    typer.echo(f"{recipe}: fine, {max(1, len(found.compare))} x {len(found.run.seeds)} runs")
