"""``fedalloy unfold``: learn a table of weights before a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedalloy.cli.console import complain, console, number, print_json, print_table
from fedalloy.cli.importing import AllowImports
from fedalloy.cli.run import Changes, Json

if TYPE_CHECKING:
    from fedalloy.methods.weightings.weight_table import WeightTable
    from fedalloy.studies.unfolding.learning import OuterEvent

_LINE_EVERY = 10.0


def unfold(
    sources: Annotated[
        list[Path], typer.Argument(help="A recipe (.toml); or learned tables (.json), to average.", metavar="RECIPE")
    ],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The table; default: the path in the recipe.")
    ] = None,
    entry: Annotated[str | None, typer.Option(help="Only this entry of the recipe's comparison.")] = None,
    changes: Changes = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(help="Seed of the learning; tables of several are averaged, if the recipe names one."),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Learn tables again that exist already.")] = False,
    as_json: Json = False,
    allow_imports: AllowImports = False,
) -> None:
    """Learn every client's aggregation weight in every round, before the run.

    All rounds of the recipe's algorithm are simulated on the clients' own training data; the table of weights
    (rounds x clients) takes a gradient step on the summed loss of all rounds, and this is repeated
    (recipe table [unfold]: iterations, lr, gradient, level, smoothness, patience, ...).

    If entries of the recipe's comparison use tables, all are learned and written where the recipe reads them; a name
    with {seed} in it means one table per seed of the recipe, or per --seed:

      fedalloy unfold recipes/s0/environment-1.toml --seed 0

      fedalloy compare recipes/s0/environment-1.toml -o runs/s0/environment-1 --set run.seeds=[0]

    Any other recipe: fedalloy unfold RECIPE -o weights.json, then run it with [weighting] kind = "unfolded",
    table = "weights.json". Pictures: fedalloy plot weights weights.json; rows and variance draw the rest.

    Ctrl-C ends after the iteration in progress; the same command continues from there.
    """
    if all(source.suffix == ".json" for source in sources):
        _average(sources, output, as_json)
        return
    if len(sources) > 1:
        raise typer.BadParameter("give one recipe, or tables only", param_hint="RECIPE")
    for wanted in _wanted(sources[0], changes, entry, output, seed):
        _learn(wanted, again, as_json)


def _average(tables: list[Path], output: Path | None, as_json: bool) -> None:
    """Write the mean of learned tables."""
    from fedalloy.experiment.weight_files import load_table
    from fedalloy.methods.weightings.weight_table import average

    if output is None:
        raise typer.BadParameter("name the file for the mean of the tables", param_hint="-o")
    _finish(average([load_table(table) for table in tables]), output, as_json)


def _wanted(recipe: Path, changes: list[str] | None, entry: str | None, output: Path | None, seeds: Any) -> list[Any]:
    """The jobs of every table: one per seed; several seeds of one file are averaged."""
    from fedalloy.experiment.recipe import load
    from fedalloy.studies.unfolding.recipes import jobs, seeds_of

    loaded = load(recipe, changes)
    groups = zip(*[jobs(loaded, entry, output, one) for one in seeds or seeds_of(loaded)], strict=True)
    return [part for group in groups for part in _by_file(group)]


def _by_file(group: Sequence[Any]) -> list[list[Any]]:
    files = dict.fromkeys(job.output for job in group)
    return [[job for job in group if job.output == file] for file in files]


def _learn(group: list[Any], again: bool, as_json: bool) -> None:
    from dataclasses import replace

    from fedalloy.experiment.weight_files import load_table, save_table
    from fedalloy.methods.weightings.weight_table import average

    place = group[0].output
    if place.exists() and not again:
        load_table(place)  # raises if the file is not a table: do not overwrite it
        typer.echo(f"{place} is learned already (--again learns it again)", err=True)
        return
    tables = []
    for job in group:
        if len(group) > 1:
            job = replace(job, output=place.with_name(f"{place.stem}-seed{job.table.seed}{place.suffix}"))
        tables.append(_one(job, again, as_json))
    if len(group) > 1:
        save_table(average(tables), place)
    _finish(tables[0] if len(tables) == 1 else average(tables), place, as_json, save=False)


def _one(job: Any, again: bool, as_json: bool) -> WeightTable:
    from fedalloy.experiment.interrupt import Caught, exit_code
    from fedalloy.experiment.weight_files import load_table
    from fedalloy.studies.unfolding.call import Stopped

    caught = Caught()
    if job.output.exists() and not again:
        return load_table(job.output)
    if not as_json:
        rounds, iterations = job.experiment.config.rounds, job.table.iterations
        typer.echo(f"{job.name}, seed {job.table.seed}: {rounds} rounds, {iterations} iterations -> {job.output}")
    try:
        with _watching(as_json) as watcher:
            table: WeightTable = job.learn(resume=True, watcher=watcher, caught=caught)
    except Stopped as stopped:
        complain(f"{stopped} with the same command")
        raise typer.Exit(exit_code(caught)) from None
    return table


def _finish(table: WeightTable, output: Path, as_json: bool, save: bool = True) -> None:
    from fedalloy.experiment.weight_files import save_table

    if save:
        save_table(table, output)
    if as_json:
        print_json({"output": str(output), **table.to_json()})
        return
    from fedalloy.studies.unfolding.recipes import summary

    rows = [[str(row["round"]), *(number(weight) for weight in row["weights"])] for row in summary(table)]
    mean = " (mean over layers)" if table.layers else ""
    print_table(["round", *(f"client {k}" for k in range(table.clients))], rows, f"weights{mean}", range(99))
    root = table.rounds**-0.5
    typer.echo(f"variance over rounds {table.variance:.3g}, 1/sqrt(rounds) {root:.3g}; written to {output}")


@contextmanager
def _watching(silent: bool) -> Iterator[Callable[[OuterEvent], None] | None]:
    """A live line in a terminal, plain lines elsewhere, nothing with ``--json``."""
    out = console(stderr=True)
    if silent:
        yield None
    elif out.is_terminal:
        with _live() as watcher:
            yield watcher
    else:
        yield _plain()


def _plain() -> Callable[[OuterEvent], None]:
    told = 0.0

    def tell(event: OuterEvent) -> None:
        nonlocal told
        if time.monotonic() - told >= _LINE_EVERY or event.iteration == event.iterations:
            told = time.monotonic()
            typer.echo(f"iteration {event.iteration}/{event.iterations}  {_words(event)}")

    return tell


@contextmanager
def _live() -> Iterator[Callable[[OuterEvent], None]]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("iteration"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[words]}"),
        TimeRemainingColumn(), console=console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("unfold", total=None, words="")
        yield lambda event: bar.update(task, total=event.iterations, completed=event.iteration, words=_words(event))


def _words(event: OuterEvent) -> str:
    valid = "" if event.valid_loss is None else f"  validation {event.valid_loss:.4f}"
    return f"summed loss {event.loss:.2f}{valid}  {event.seconds:.2f} s"
