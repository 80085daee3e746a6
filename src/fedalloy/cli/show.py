"""``fedalloy show``: a run or a rule in detail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedalloy.cli.console import console, number, print_json, print_table
from fedalloy.cli.run import Json
from fedalloy.core.errors import CheckpointError

if TYPE_CHECKING:
    from fedalloy.cli.docs import RuleText

_LABELS = {
    "mean": "mean", "worst_served": "worst-served 10 %", "best_served": "best-served 10 %",
    "worst": "lowest 10 %", "best": "highest 10 %",
}  # fmt: skip
"""In records, ``worst`` and ``best`` are the lowest and the highest values, for a loss too."""


def show(
    what: Annotated[
        str, typer.Argument(help="A run folder, that of an advice, or the name of a rule.", metavar="RUN|RULE")
    ],
    as_json: Json = False,
) -> None:
    """Show what happened in a run, the answer of an advice, or what a rule does and which arguments it takes."""
    # A name can be too long for a file name, which makes the checks raise OSError.
    is_folder, is_file = (_safely(Path(what).is_dir), _safely(Path(what).is_file))
    if is_folder and (Path(what) / "advice.json").is_file():
        show_advice(Path(what) / "advice.json", as_json)
    elif is_folder:
        show_run(_run_in(Path(what)), as_json)
    elif is_file:
        raise CheckpointError(f"{what} is a file, not a run; name a run folder, or a rule")
    else:
        show_rule(what, as_json)


def _safely(look: Callable[[], bool]) -> bool:
    try:
        return look()
    except OSError:
        return False


def _run_in(folder: Path) -> Path:
    """The folder, if it is a run; if it holds runs further down, an error that names them."""
    from fedalloy.experiment.records.reading import find_runs, is_run

    below = [] if is_run(folder) else find_runs(folder)
    if below:
        some = ", ".join(str(run) for run in below[:3]) + (", ..." if len(below) > 3 else "")
        raise CheckpointError(f"{folder} is not a run, but holds {len(below)}: name one of them ({some})")
    return folder


def show_advice(file: Path, as_json: bool) -> None:
    """Print the answer of ``fedalloy advise``."""
    from fedalloy.cli.advise import present

    told = json.loads(file.read_text(encoding="utf-8"))
    print_json(told) if as_json else present(told)


def show_run(folder: Path, as_json: bool) -> None:
    """Print what a run did and how it ended."""
    from fedalloy.experiment.records import toml
    from fedalloy.experiment.records.reading import read_run
    from fedalloy.results.clients import client_name
    from fedalloy.results.outcome import read_outcome

    outcome, record = read_outcome(folder), read_run(folder)
    if as_json:
        print_json(outcome.to_json() | {"recipe": record.recipe, "environment": record.environment})
        return
    out = console()
    ending = f": {outcome.reason}" if outcome.reason else ""
    out.print(f"{outcome.name}, seed {outcome.seed}: {outcome.state} after round {outcome.round}{ending}", markup=False)
    if outcome.scores:
        rows = [[_LABELS.get(name, name), number(outcome.scores.get(name), 4)] for name in _order(outcome.scores)]
        print_table([outcome.metric, "last"], rows, "over clients", (1,))
    dropped = [
        f"round {row['round']}, {client_name(record.manifest or {}, int(who))}: {why}"
        for row in record.rounds()
        for who, why in row["dropped"].items()
    ]
    refused = [f"round {row['round']}: {row['refusal']}" for row in record.rounds() if row.get("refusal")]
    for said, lines in (("dropped in", dropped), ("no effect in", refused)):
        for line in lines[:10]:
            out.print(f"{said} {line}", markup=False)
        if len(lines) > 10:
            out.print(f"and {len(lines) - 10} more")
    out.print("\n" + toml.dumps(record.recipe), markup=False)


def _order(scores: dict[str, float]) -> list[str]:
    """The scores of ``_LABELS`` first, then the rest."""
    return sorted(scores, key=lambda name: [*_LABELS, name].index(name))


def show_rule(name: str, as_json: bool) -> None:
    """Print every rule of that name: a method and its solver may share one."""
    from fedalloy.cli.docs import find_rules

    found = find_rules(name)
    if as_json:
        print_json([rule.to_json() for rule in found])
        return
    for rule in found:
        _print_rule(rule)


def _print_rule(rule: RuleText) -> None:
    console().print(f"{rule.category} {rule.name}", style="bold", markup=False)
    console().print(rule.text, markup=False)
    if rule.arguments:
        rows = [[one.name, one.default, one.kind] for one in rule.arguments]
        print_table(["argument", "default", "allowed"], rows)
