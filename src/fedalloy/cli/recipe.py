"""``fedalloy recipe``: check recipes, and print their schema."""

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
    from fedalloy.experiment.recipe import schema as made

    typer.echo(json.dumps(made(), indent=2))


@app.command()
def check(recipe: Annotated[Path, typer.Argument(help="A recipe (.toml).")], changes: Changes = None) -> None:
    """Check whether a recipe would run, every entry of its comparison included, without running it.

    Loads the data, builds the model, and checks both against the algorithm and the clients. Imports nothing that the
    recipe names: what depends on that code is listed as not checked.
    """
    from fedalloy.experiment.recipe import entry_names, load, without_imports
    from fedalloy.experiment.recipe.checking import check as unchecked
    from fedalloy.studies.compare.comparing import check_grids, check_seeds
    from fedalloy.studies.compare.naming import folders

    with without_imports():
        found = load(recipe, changes)
        check_seeds(found)
        folders(entry_names(found))
        left = unchecked(found)
        check_grids(found)
    typer.echo(f"{recipe}: fine, {max(1, len(found.compare))} x {len(found.run.seeds)} runs")
    for what in left:
        typer.echo(f"not checked: {what}")
