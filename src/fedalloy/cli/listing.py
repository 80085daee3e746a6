"""``fedalloy list``: every rule there is."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fedalloy.cli.console import print_json, print_table
from fedalloy.cli.run import Json


class Room(StrEnum):
    """Rooms as people say them."""

    solvers = "solvers"
    weightings = "weightings"
    servers = "servers"
    wires = "wires"
    algorithms = "algorithms"
    datasets = "datasets"
    partitions = "partitions"
    models = "models"
    metrics = "metrics"
    engines = "engines"
    trackers = "trackers"


def list_rules(
    room: Annotated[Room | None, typer.Argument(help="One kind of rule; default: all.")] = None, as_json: Json = False
) -> None:
    """List rules, built in and plugged in, with one line each."""
    from fedalloy.cli.docs import summary
    from fedalloy.core import registry

    found = {
        kind.value: {name: summary(rule) for name, rule in sorted(registry.everything(kind.value[:-1]).items())}
        for kind in ([room] if room else Room)
    }
    if as_json:
        print_json(found)
        return
    for kind, rules in found.items():
        print_table(["name", "what it is"], [[name, line] for name, line in rules.items()], kind)
