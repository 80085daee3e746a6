"""``fedalloy advise``: which method to use for a recipe, from a pilot within a time budget."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedalloy.cli.compare import saying_how_to_continue, settings_text
from fedalloy.cli.console import console, number, print_json, print_table
from fedalloy.cli.importing import AllowImports
from fedalloy.cli.progress import watch_jobs
from fedalloy.cli.run import Changes, Json

if TYPE_CHECKING:
    from fedalloy.studies.advise.call import Advice

_FACTS = 2
"""So many results are printed of every method; the file advice.json has all."""


def advise(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml); its own comparison is not used.")],
    changes: Changes = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="The time that the whole advice may take, about.")] = 10.0,
    aim: Annotated[
        Literal["mean", "worst"], typer.Option(help="What counts: the mean over clients, or the worst-served tenth.")
    ] = "mean",
    one_model: Annotated[
        bool, typer.Option("--one-model", help="Leave out methods with a model of its own for every client.")
    ] = False,
    methods: Annotated[
        str | None, typer.Option(help="Methods to try, instead of a choice among all: scaffold,ditto", metavar="A,B")
    ] = None,
    most: Annotated[int, typer.Option(min=2, help="How many methods to try, FedAvg included.")] = 6,
    without: Annotated[
        list[str] | None,
        typer.Option(help="Do not use what is known about this federation; may be repeated.", metavar="FEDERATION"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The folder; default: runs/NAME-advice.")
    ] = None,
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=1, help="Processes; default: one per core.")] = None,
    as_json: Json = False,
    allow_imports: AllowImports = False,
) -> None:
    """Say which method to use, with the evidence, and write the recipe to run next.

    Describes the federation, chooses the most promising methods, tunes all of them with equal budgets on tuning
    seeds and validation parts, and compares the best with FedAvg on other seeds and test parts. The same
    command continues after Ctrl-C.
    """
    from fedalloy.experiment.recipe import load
    from fedalloy.studies.advise.call import advise as ask

    named = [name.strip() for name in methods.split(",")] if methods else []
    folder = output or Path("runs") / f"{recipe.stem}-advice"
    with saying_how_to_continue(as_json), watch_jobs(None, as_json) as watcher:
        found = ask(
            load(recipe, list(changes or [])), folder, minutes=minutes, aim=aim, one_model=one_model, methods=named,
            most=most, without=without or [], processes=jobs, watcher=watcher,
        )  # fmt: skip
    print_json(found.to_json()) if as_json else _present(found)


def _present(found: Advice) -> None:
    told = found.to_json()
    present(told)
    note = f"took {found.record['seconds'] / 60:.1f} minutes; runs in {found.folder}"
    console().print(f"{note}; a page of them: fedalloy report {found.folder} -o report.html", markup=False)


def present(told: Mapping[str, Any]) -> None:
    """Print an answer: the verdict first, then what it rests on."""
    out = console()
    out.print(told["first"], style="bold", markup=False, soft_wrap=True)
    for line in told["lines"]:
        out.print(line, markup=False, soft_wrap=True)
    out.print(f"run it: fedalloy run {told['recipe']}", markup=False, soft_wrap=True)
    _present_federation(told["measures"])
    tried = [one for one in told["candidates"] if not one["refused"]]
    rows = [[one["name"], one["reason"], "; ".join(one["facts"][-_FACTS:]) or "-", _cost(one)] for one in tried]
    print_table(["method", "why it was tried", "our own results", "cost against FedAvg"], rows, "the methods")
    rows = [_trial_row(one["name"], told["pilot"]["tuned"].get(one["name"])) for one in tried]
    print_table(["method", "best setting", "validation score", "trials"], rows, "the pilot", (2, 3))
    rows = [[one["name"], one["refused"]] for one in told["candidates"] if one["refused"]]
    print_table(["method", "why not"], rows, "not tried")


def _present_federation(measures: Mapping[str, Any]) -> None:
    from fedalloy.studies.advise.measuring import Measures

    found = Measures(**{**measures, "missing": tuple(measures["missing"])})
    print_table(["measure", "value"], [list(row) for row in found.lines()], "the federation")


def _cost(one: Mapping[str, Any]) -> str:
    return f"work x {one['work']:g}, upload x {one['upload']:g}"


def _trial_row(name: str, tuned: Mapping[str, Any] | None) -> list[str]:
    if tuned is None:
        return [name, "failed, or no time for it", "", ""]
    scores = [one["score"] for one in tuned["tried"] if one["settings"] == tuned["best"]]
    score = next(one for one in scores if one is not None)
    return [name, settings_text(dict(tuned["best"])), number(score), str(len(tuned["tried"]))]
