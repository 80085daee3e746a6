"""The help of the commands: words in square brackets stay, lines are as long as the terminal is wide, and every command
ends with an example."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

EXAMPLES = {
    "run": "fedalloy run recipes/quickstart.toml --quick -o runs/first",
    "compare": "fedalloy compare recipes/demo.toml --quick -o runs/demo",
    "advise": "fedalloy advise recipes/demo.toml --minutes 0.1 --methods fedprox -o runs/advice",
    "tune": "fedalloy tune recipes/demo.toml --algorithms fedavg --trials 2 --quick -o runs/tuning",
    "reproduce": "fedalloy reproduce --list",
    "list": "fedalloy list weightings",
    "show": "fedalloy show fedavg",
    "conform": "fedalloy conform tests/vectors/*.json",
    "report": "fedalloy report runs/demo -o report.html",
    "export": "fedalloy export runs/demo -o results.csv",
    "serve": "fedalloy serve runs",
    "plot": "fedalloy plot curves runs/demo -o curves.png",
    "unseen": "fedalloy unseen runs/with-newcomers --steps 10",
    "newcomers": "fedalloy unseen runs/with-newcomers --steps 10",
    "unfold": "fedalloy unfold recipes/quickstart.toml --set unfold.iterations=5 -o weights.json",
    "doctor": "fedalloy doctor",
    "data list": "fedalloy data list",
    "data where": "fedalloy data where",
    "data check": "fedalloy data check mnist",
    "data describe": "fedalloy data describe digits",
    "data fetch": "fedalloy data fetch mnist",
    "synth export": "fedalloy synth export runs/digits-cvae -o samples",
    "synth quality": "fedalloy synth quality runs/digits-cvae",
    "synth grid": "fedalloy synth grid runs/digits-cvae -o samples.png",
    "recipe schema": "fedalloy recipe schema",
    "recipe check": "fedalloy recipe check recipes/quickstart.toml",
    "flower init": "fedalloy flower init federation --nodes 3",
    "flower up": "fedalloy flower up recipes/quickstart.toml --nodes 3 --quick",
    "flower run": "fedalloy flower run federation/server recipes/quickstart.toml -o runs/first",
    "flower stop": "fedalloy flower stop federation/server",
    "flower pause": "fedalloy flower pause federation/server",
    "flower resume": "fedalloy flower resume federation/server",
    "flower server": "fedalloy flower server federation/server",
    "flower admit": "fedalloy flower admit federation/server",
    "flower node": "fedalloy flower node federation/node-0",
    "flower status": "fedalloy flower status federation/server",
    "flower revoke": "fedalloy flower revoke federation/server node-2",
    "flower rotate": "fedalloy flower rotate federation/server node-2 new-key.pub",
    "flower renew": "fedalloy flower renew federation/server --ca-key ca.key",
    "flower logs": "fedalloy flower logs federation/server",
    "flower backup": "fedalloy flower backup federation/server -o backup.tar",
    "flower restore": "fedalloy flower restore backup.tar restored",
    "flower doctor": "fedalloy flower doctor federation/node-0 recipes/quickstart.toml",
    "flower dry-run": "fedalloy flower dry-run federation/node-0 recipes/quickstart.toml",
    "flower review": "fedalloy flower review recipes/quickstart.toml",
    "flower approve": "fedalloy flower approve federation/node-0 recipes/quickstart.toml",
    "flower withdraw": "fedalloy flower withdraw federation/node-0 quickstart",
    "flower forget": "fedalloy flower forget federation/node-0 quickstart",
    "flower audit": "fedalloy flower audit federation/node-0",
    "node check": "fedalloy node check federation/node-0 recipes/quickstart.toml",
}
"""One example per command."""
_NEWCOMERS = "fedalloy run recipes/quickstart.toml --quick --set partition.newcomers=2 -o runs/with-newcomers"
_SAMPLES = "fedalloy run recipes/digits-cvae.toml --quick -o runs/digits-cvae"
BEFORE = {
    "unseen": _NEWCOMERS, "newcomers": _NEWCOMERS,
    "synth export": _SAMPLES, "synth quality": _SAMPLES, "synth grid": _SAMPLES,
}  # fmt: skip
"""What must have run before, where an example needs a run of a certain kind."""


def teach(group: click.Group, before: str = "") -> None:
    """Make the help of all commands of a group literal, and add their examples."""
    for name, command in group.commands.items():
        path = f"{before}{name}"
        if isinstance(command, click.Group):
            teach(command, f"{path} ")
        elif path in EXAMPLES:
            told = f"Example: {EXAMPLES[path]}{f', after: {BEFORE[path]}' if path in BEFORE else ''}"
            command.epilog = "\n\n".join(filter(None, [told, command.epilog]))
        _literal(command)
    if not before:
        _literal(group)


def _literal(command: click.Command) -> None:
    command.rich_markup_mode = "rich"  # type: ignore[attr-defined]  # the default differs between versions of typer
    command.format_help = partial(_format, command, command.format_help)  # type: ignore[method-assign]


def _format(command: click.Command, plain: Any, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Typer takes words in square brackets for rich's markup, and drops them."""
    children = list(command.commands.values()) if isinstance(command, click.Group) else []
    with _escaped([command, *children, *command.params]):
        plain(ctx, formatter)


@contextmanager
def _escaped(holders: list[Any]) -> Iterator[None]:
    from rich.markup import escape

    kept = [(one, name, getattr(one, name, None)) for one in holders for name in ("help", "short_help", "epilog")]
    told = [(one, name, text) for one, name, text in kept if isinstance(text, str)]
    try:
        for one, name, text in told:
            setattr(one, name, escape(unwrapped(text)))
        yield
    finally:
        for one, name, text in told:
            setattr(one, name, text)


def unwrapped(text: str) -> str:
    """Each paragraph as one line, so that it is broken where the terminal ends; indented lines stay as they are.

    >>> unwrapped("Ends a run.\\n\\nIt may\\nbe resumed:\\n  fedalloy run")
    'Ends a run.\\n\\nIt may be resumed:\\n  fedalloy run'
    """
    return re.sub(r"(?<=[^\n\f])\n(?=[^\s\b])", " ", text)
