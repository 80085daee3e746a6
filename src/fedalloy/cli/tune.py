"""``fedalloy tune``: good settings for every algorithm of a recipe, found with equal budgets."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedalloy.cli.compare import prepare, saying_how_to_continue, settings_text, unreached
from fedalloy.cli.console import console, number, print_json, print_table
from fedalloy.cli.importing import AllowImports
from fedalloy.cli.progress import watch_jobs
from fedalloy.cli.run import Changes, Json, Quick

if TYPE_CHECKING:
    from fedalloy.studies.compare.tuned import Tuned
    from fedalloy.studies.tune.call import Tuning


def tune(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml); its table 'tune' may have budget and ranges.")],
    changes: Changes = None,
    algorithms: Annotated[
        str | None, typer.Option(help="Entries of the recipe or published methods: fedavg,fedprox", metavar="A,B")
    ] = None,
    trials: Annotated[int | None, typer.Option(min=1, help="Settings to try per algorithm (default 20).")] = None,
    budget_rounds: Annotated[int | None, typer.Option(min=1, help="Instead: rounds to spend per algorithm.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Instead: seconds of runs per algorithm.")] = None,
    sampler: Annotated[Literal["tpe", "random"] | None, typer.Option(help="How settings are chosen.")] = None,
    pruner: Annotated[
        Literal["asha", "hyperband", "none"] | None, typer.Option(help="How trials that fall behind are stopped.")
    ] = None,
    quick: Quick = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The folder; default: runs/NAME.")] = None,
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=1, help="Processes; default: one per core.")] = None,
    as_json: Json = False,
    allow_imports: AllowImports = False,
) -> None:
    """Search for good settings of every algorithm, each with the same budget, and write the recipe that runs them.

    Trials run on run.tuning_seeds (default 1000, 1001) and are scored on validation parts: the test parts stay
    unseen. Those that fall behind are stopped early and are charged the rounds they ran. The same command
    continues after Ctrl-C.
    """
    from fedalloy.studies.tune.call import tune as search

    wanted = prepare(recipe, changes or [], algorithms, [], quick)
    for note in unreached(wanted, changes or []):
        typer.echo(note, err=True)
    folder = output or Path("runs") / recipe.stem
    with saying_how_to_continue(as_json), watch_jobs(None, as_json) as watcher:
        found = search(
            wanted, None, folder, trials=trials, budget_rounds=budget_rounds, seconds=seconds, sampler=sampler,
            pruner=pruner, processes=jobs, watcher=watcher,
        )  # fmt: skip
    print_json(found.to_json()) if as_json else _present(found)


def _present(found: Tuning) -> None:
    out = console()
    for one in found.tuned:
        rows = [
            [settings_text(tried.settings), number(tried.score) or tried.state, str(tried.rounds)]
            for tried in one.tried
        ]
        title = f"{one.name}, {one.how}: {settings_text(one.best)}"
        print_table(["setting", "validation score", "rounds"], rows, title, (2,))
        _present_thirds(found, one)
    out.print(f"run it: fedalloy compare {found.file}", markup=False, soft_wrap=True)


def _present_thirds(found: Tuning, one: Tuned) -> None:
    """The best score in each third of every range, by which one sees what matters and whether a range is too short."""
    rows = []
    for path, thirds in found.sensitivity(one.name).items():
        cells = [f"{number(score) or '-'} ({count})" for score, count in thirds.values()]
        rows.append([path, *cells, number(one.importance.get(path), 2) or "too few trials"])
    title = "best score (and trials) in the low, middle and high third of each range; what it explains of the scores"
    if any(tried.early is not None for tried in one.tried):
        title += " (all at the first comparison, after which trials were stopped)"
    print_table(["setting", "low", "middle", "high", "importance"], rows, title, (1, 2, 3, 4))
