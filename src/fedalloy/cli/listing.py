"""``fedalloy list``: all rules."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from fedalloy.cli.console import print_json, print_table
from fedalloy.cli.run import Json


class Category(StrEnum):
    """Categories, in the plural."""

    solvers = "solvers"
    weightings = "weightings"
    servers = "servers"
    wires = "wires"
    algorithms = "algorithms"
    datasets = "datasets"
    partitions = "partitions"
    models = "models"
    losses = "losses"
    metrics = "metrics"
    engines = "engines"
    trackers = "trackers"

    @property
    def category(self) -> str:
        """The name in the registry."""
        return self.value.removesuffix("es" if self.value == "losses" else "s")


def list_rules(
    category: Annotated[Category | None, typer.Argument(help="One kind of rule; default: all.")] = None,
    as_json: Json = False,
) -> None:
    """List the rules, built in and from plugins, with one line each."""
    from fedalloy.cli.docs import summary
    from fedalloy.core import registry

    found = {
        chosen: {name: summary(rule) for name, rule in sorted(registry.everything(chosen.category).items())}
        for chosen in ([category] if category else Category)
    }
    if as_json:
        print_json({chosen.value: rules for chosen, rules in found.items()})
        return
    for chosen, rules in found.items():
        rows = [[", ".join([name, *registry.aliases_of(chosen.category, name)]), line] for name, line in rules.items()]
        print_table(["name", "what it is"], rows, chosen.value)
