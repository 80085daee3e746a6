"""``fedalloy node``: a node of a federation, checked before it connects."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedalloy.cli.console import number, print_json, print_table
from fedalloy.cli.importing import AllowImports
from fedalloy.cli.run import Json

app = typer.Typer(
    help="A node of a federation: check its data before it connects (needs the extra 'flower').", no_args_is_help=True
)


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="The node's folder (node.toml is in it).", metavar="DIR")],
    recipe: Annotated[Path, typer.Argument(help="The federation's recipe (.toml).", metavar="RECIPE")],
    seed: Annotated[int | None, typer.Option(help="The seed; default: the recipe's first.")] = None,
    as_json: Json = False,
    allow_imports: AllowImports = False,
) -> None:
    """Read a node's data, run one step of the federation's model on a batch, and show what would be sent.

    Nothing is sent and nothing is stored. The node's policy applies, as to an order of the server.
    """
    from fedalloy.core.inputs import listed
    from fedalloy.experiment.recipe import load
    from fedalloy.flower.layout import NodePlace
    from fedalloy.flower.node.checking import check_node

    found = check_node(NodePlace.read(folder).config, load(recipe), seed)
    if as_json:
        print_json(found.to_json())
        return
    parts = ", ".join(f"{part} {count}" for part, count in found.examples.items())
    typer.echo(f"client {found.client}, data {found.source}: {parts}; features {listed(found.shape)}")
    if found.filled:
        typer.echo(f"{found.filled} missing values are filled from the node's own training part")
    typer.echo(f"one step on a batch of {found.batch}: loss {number(found.loss)}")
    rows = [[part, name, str(list(shape)), str(size)] for part, name, shape, size in found.tensors]
    print_table(["would be sent", "tensor", "shape", "bytes"], rows, numbers=(3,))
    told = ", ".join(f"{name} = {number(value)}" for name, value in found.statistics.items())
    typer.echo(f"{found.bytes} bytes in a round, and the numbers: {told or 'none'}. Examples are never sent")
