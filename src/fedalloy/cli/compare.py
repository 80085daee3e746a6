"""``fedalloy compare``: several algorithms times seeds on one recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedalloy.cli.console import console, number, print_json, print_table
from fedalloy.cli.importing import AllowImports
from fedalloy.cli.progress import watch_jobs
from fedalloy.cli.run import Changes, Json, Quick, Track

if TYPE_CHECKING:
    from fedalloy.experiment.recipe import Recipe
    from fedalloy.results.evidence import Evidence
    from fedalloy.results.statistics import Spread
    from fedalloy.results.table import ResultRow
    from fedalloy.studies.compare.comparing import Comparison


def compare(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml).")],
    changes: Changes = None,
    algorithms: Annotated[
        str | None, typer.Option(help="Entries of the recipe or published methods: fedavg,fedprox", metavar="A,B")
    ] = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="A.B=V1,V2", help="Values to tune on run.tuning_seeds; may be repeated."),
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--tune", min=1, metavar="N", help="First tune every algorithm with N trials.")
    ] = None,
    quick: Quick = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The folder; default: runs/NAME.")] = None,
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=1, help="Processes; default: one per core.")] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Say how many runs and seeds this needs; train nothing.")
    ] = False,
    as_json: Json = False,
    track: Track = None,
    allow_imports: AllowImports = False,
) -> None:
    """Run several algorithms with several seeds; print what they decide and one table.

    Every run has its own folder below the output folder. Runs that are finished are reused and interrupted ones
    are resumed, so the same command continues after Ctrl-C.
    """
    wanted = prepare(recipe, changes or [], algorithms, grid or [], quick, trials)
    for note in unreached(wanted, changes or []):
        typer.echo(note, err=True)
    folder = output or Path("runs") / recipe.stem
    if plan:
        _print_plan(wanted, folder, as_json)
        return
    done = _run_all(wanted, folder, jobs, track or [], as_json)
    print_json(done.to_json()) if as_json else _present(done, wanted)
    _exit(done)


def _run_all(recipe: Recipe, folder: Path, jobs: int | None, track: Sequence[str], as_json: bool) -> Comparison:
    """All runs, with their progress; how many a search makes is not known before."""
    from fedalloy.studies.compare.comparing import compare as run_all
    from fedalloy.studies.compare.comparing import count

    with saying_how_to_continue(as_json), watch_jobs(None if recipe.tune else count(recipe), as_json) as watcher:
        return run_all(recipe, folder, processes=jobs, watcher=watcher, track=track)


@contextmanager
def saying_how_to_continue(as_json: bool) -> Iterator[None]:
    """After Ctrl-C, say that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        if not as_json:
            typer.echo("interrupted; nothing is lost: the same command continues from here", err=True)
        raise


def _exit(done: Comparison) -> None:
    """Exit with a code that says whether runs failed or did not finish."""
    from fedalloy.core.errors import FedalloyError

    if open_ones := sum(not run.ended for run in done.outcomes):
        raise FedalloyError(f"{open_ones} runs did not finish; the same command continues with them")
    if any(run.state == "failed" for run in done.outcomes):
        raise typer.Exit(1)


def prepare(
    recipe: Path,
    changes: Sequence[str],
    algorithms: str | None,
    grid: Sequence[str],
    quick: bool,
    trials: int | None = None,
) -> Recipe:
    """The recipe with the options of the command line applied."""
    from fedalloy.experiment.recipe import load
    from fedalloy.experiment.recipe import quick as shortened
    from fedalloy.studies.compare.comparing import select
    from fedalloy.studies.tune.call import with_budget

    wanted = load(recipe, list(changes))
    wanted = wanted.model_copy(update={"grid": {**wanted.grid, **dict(map(read_grid, grid))}})
    wanted = select(wanted, [name.strip() for name in algorithms.split(",")]) if algorithms else wanted
    wanted = shortened(wanted) if quick else wanted
    return with_budget(wanted, {"trials": trials}) if trials else wanted


def unreached(recipe: Recipe, changes: Sequence[str]) -> list[str]:
    """A note for every comparison entry that sets a value the command line changes: the entry's value wins."""
    paths = [change.partition("=")[0].strip() for change in changes]
    return [
        f"note: '{entry.name}' keeps its own {path} = {own!r}; --set does not reach it (edit the recipe)"
        for path in paths
        for entry in recipe.compare
        if (own := _own_value(entry.set, path)) is not None
    ]


def _own_value(changes: Mapping[str, Any], path: str) -> Any:
    """An entry's value for a path, given as a dotted key or as nested tables."""
    head, _, rest = path.partition(".")
    inner = changes.get(head)
    return changes.get(path, _own_value(inner, rest) if isinstance(inner, Mapping) else None)


def read_grid(text: str) -> tuple[str, list[Any]]:
    """``a.b=v1,v2`` as a path and its values.

    >>> read_grid("algorithm.lr=0.1,0.5"), read_grid("weighting.kind=samples,uniform")
    (('algorithm.lr', [0.1, 0.5]), ('weighting.kind', ['samples', 'uniform']))
    """
    from fedalloy.core.errors import SpecError
    from fedalloy.experiment.recipe import literal

    path, equals, values = text.partition("=")
    if not equals or not path.strip() or not values.strip():
        raise SpecError(f"--grid '{text}': write a.b=v1,v2, for example algorithm.lr=0.05,0.1")
    together = literal(f"[{values}]")
    return path.strip(), together if isinstance(together, list) else [literal(one.strip()) for one in values.split(",")]


def _print_plan(recipe: Recipe, folder: Path, as_json: bool) -> None:
    from fedalloy.studies.compare.planning import plan

    made = plan(recipe, folder)
    if as_json:
        print_json(made.to_json())
    else:
        typer.echo("\n".join(made.lines()))


def _present(done: Comparison, recipe: Recipe) -> None:
    from fedalloy.experiment.recipe.resolving import scored
    from fedalloy.results.gains import lines

    out = console()
    out.print(done.conclusion, style="bold", markup=False)
    for tuned in done.tuned:
        rows = [[settings_text(one.settings), number(one.score) or one.state or "failed"] for one in tuned.tried]
        how = f"with {tuned.how}" if tuned.how else f"on seeds {', '.join(map(str, recipe.run.tuning_seeds))}"
        print_table(["setting", "mean"], rows, f"{tuned.name}, tuned {how}: {settings_text(tuned.best)}", (1,))
    seeds = ", ".join(map(str, recipe.run.seeds))
    metric = str(scored(recipe).run.target_metric)
    table = [_cells(row, metric, done.rows[0].name) for row in done.rows]
    columns = [name for name in table[0] if any(cells[name] for cells in table)]
    body = [[cells[name] for name in columns] for cells in table]
    print_table(columns, body, f"{metric} after {recipe.run.rounds} rounds, seeds {seeds}", range(1, len(columns)))
    for line in (*done.notes, *lines(done.gains)):
        out.print(line, markup=False, soft_wrap=True)
    for note in _notes(done.folder):
        out.print(f"note: {note}", markup=False)
    for row in done.rows:
        for run in (*row.failed, *row.unfinished):
            said = f"{row.name}, seed {run.seed} {run.state.upper()} in round {run.round}: {run.reason}"
            out.print(said, style="red", markup=False)
    out.print(f"runs in {done.folder}; a page of them: fedalloy report {done.folder} -o report.html", markup=False)


def _notes(folder: Path) -> list[str]:
    """The runs' notes about their data, without repetitions."""
    from fedalloy.experiment.records.reading import find_runs, read_run

    said = (note for run in find_runs(folder) for note in read_run(run).environment.get("notices", []))
    return list(dict.fromkeys(map(str, said)))


def _cells(row: ResultRow, metric: str, first: str) -> dict[str, str]:
    """A row of the table by column; columns that are empty in all rows are not shown."""
    shown = {"mean": row.mean, "worst 10 %": row.worst_served, "Gini": row.gini}
    return {
        "algorithm": row.name,
        **{name: _text(value, row) for name, value in shown.items()},
        f"{metric} vs {first}": _difference(row.difference, 3),
        "p": _p(row.difference),
        "rounds to target": row.target_text,
        f"rounds vs {first}": _difference(row.rounds_difference, 1),
        "seeds": row.coverage,
    }


def _difference(found: Evidence | None, digits: int) -> str:
    """The difference, its interval, and the verdict where there is one."""
    if found is None:
        return ""
    return f"{found.text(digits)} {found.word}" if found.decided else found.text(digits)


def _p(found: Evidence | None) -> str:
    """The p that decides; from six seeds on that of the exact test stands beside it."""
    if found is None or math.isnan(found.p) or found.outcome == "not finished":
        return ""
    exact = f" ({found.exact_test} test {found.exact:.2g})" if found.exact is not None else ""
    return f"{found.p:.2g}{exact}"


def _text(spread: Spread | None, row: ResultRow) -> str:
    """A number; empty where finished runs have none, such as the worst served under a metric without a direction."""
    return spread.text() if spread else "" if row.seeds else (row.failed or row.unfinished)[0].state


def settings_text(settings: dict[str, Any]) -> str:
    """Settings in one line."""
    return ", ".join(f"{path} = {json.dumps(value)}" for path, value in settings.items())
