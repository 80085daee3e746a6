"""``fedalloy reproduce``: a published experiment, measured again."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedalloy.cli.console import console, print_json, print_table
from fedalloy.cli.progress import watch_jobs
from fedalloy.cli.run import Changes, Json

if TYPE_CHECKING:
    from fedalloy.studies.compare.jobs import Watcher
    from fedalloy.studies.reproduce.cost import Cost
    from fedalloy.studies.reproduce.declaring import PaperExperiment
    from fedalloy.studies.reproduce.measuring import Wish
    from fedalloy.studies.reproduce.results import Results

_NAME = typer.Argument(
    help="An experiment (--list shows all), or a file that declares one; with --pages the folder, default docs/results."
)


def reproduce(
    name: Annotated[str | None, _NAME] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Show all experiments, their verdicts and what they cost.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="At most 3 rounds and 2 seeds: only shows that it runs, no results.")
    ] = False,
    changes: Changes = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this case; may be repeated.")] = None,
    methods: Annotated[str | None, typer.Option(help="Only these methods.", metavar="A,B")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page; default: docs/results/NAME.md.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Where the runs are kept.")] = Path("runs") / "reproduce",
    jobs: Annotated[int | None, typer.Option("-j", "--jobs", min=1, help="Processes; default: one per core.")] = None,
    gathered: Annotated[
        list[str] | None,
        typer.Option("--gather", metavar="CASE=FOLDER", help="Run nothing: use the runs in a folder for a case."),
    ] = None,
    pages: Annotated[
        bool, typer.Option("--pages", help="Run nothing: write all pages of a folder of results again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a published experiment (all its recipes and seeds) and write its page: published numbers beside ours.

    Runs that are finished are reused and interrupted ones are resumed, so the same command continues after Ctrl-C.
    A .json file beside the page holds every measurement. With --quick, and with --set for anything but engine and
    seeds, the runs are preliminary and their page is written into the folder of the runs.
    """
    from fedalloy.core.errors import SpecError

    if listed:
        _list(as_json)
    elif pages:
        _pages(name)
    elif name is None:
        raise SpecError("which experiment? 'fedalloy reproduce --list' shows all")
    elif gathered:
        _gather(name, gathered, output, as_json)
    else:
        _reproduce(name, _wish(changes, case, methods, quick), output, runs, jobs, as_json)


def _wish(changes: list[str] | None, cases: list[str] | None, methods: str | None, quick: bool) -> Wish:
    from fedalloy.studies.reproduce.measuring import Wish

    return Wish(tuple(changes or ()), tuple(cases or ()), _names(methods), quick)


def _reproduce(name: str, wish: Wish, output: Path | None, runs: Path, jobs: int | None, as_json: bool) -> None:
    from fedalloy.studies.reproduce.cost import estimate
    from fedalloy.studies.reproduce.declaring import load_experiment
    from fedalloy.studies.reproduce.measuring import chosen, measure

    experiment = load_experiment(name)
    near = Path(name).parent if name.endswith(".toml") else None
    cost = estimate(chosen(experiment, wish, near))
    if not as_json:
        typer.echo(f"{experiment.title}: {cost.runs} runs, about {cost.text} on one core", err=True)

    def watch(case: str, count: int) -> AbstractContextManager[Watcher]:
        if not as_json:
            typer.echo(f"{case}: {count} runs", err=True)
        return watch_jobs(count, as_json)

    results = measure(experiment, wish, runs, watch, processes=jobs, near=near)
    page = output or _page(experiment, wish, runs)
    _finish(experiment, _write(experiment, results, page), page, as_json)


def _gather(name: str, gathered: list[str], output: Path | None, as_json: bool) -> None:
    from fedalloy.core.errors import SpecError
    from fedalloy.studies.reproduce.declaring import load_experiment
    from fedalloy.studies.reproduce.index import RESULTS
    from fedalloy.studies.reproduce.measuring import gather

    pairs = [text.partition("=") for text in gathered]
    if not all(case and folder for case, _, folder in pairs):
        raise SpecError("--gather: write CASE=FOLDER, for example environment-2=runs/s0/environment-2/runs")
    experiment = load_experiment(name)
    results = gather(experiment, {case: Path(folder) for case, _, folder in pairs})
    page = output or RESULTS / f"{experiment.name}.md"
    _finish(experiment, _write(experiment, results, page), page, as_json)


def _page(experiment: PaperExperiment, wish: Wish, runs: Path) -> Path:
    from fedalloy.studies.reproduce.index import RESULTS
    from fedalloy.studies.reproduce.results import changes

    preliminary = wish.quick or "run.rounds" in wish.settings or changes(wish.settings)
    folder = wish.folder(experiment, runs) if preliminary else RESULTS
    return folder / f"{experiment.name}.md"


def _write(experiment: PaperExperiment, results: Results, page: Path) -> Results:
    """Write page and measurements; those of other cases and methods that are there already are kept."""
    from fedalloy.experiment.records import atomic
    from fedalloy.studies.reproduce.index import INDEX, RESULTS, write_pages
    from fedalloy.studies.reproduce.page import write_page
    from fedalloy.studies.reproduce.results import merged, read_results, write_results

    file = page.with_suffix(".json")
    together = merged(read_results(file), results) if file.is_file() else results
    write_results(together, file)
    atomic.write_text(page, write_page(experiment, together))
    if page.parent == RESULTS or (page.parent / INDEX).is_file():
        write_pages(page.parent)
    return together


def _finish(experiment: PaperExperiment, results: Results, page: Path, as_json: bool) -> None:
    from fedalloy.studies.reproduce.judging import judge

    judged = judge(experiment, results)
    if as_json:
        claims = [
            {"claim": j.claim.text, "case": j.case, "verdict": j.verdict, "measured": j.measured, "seeds": j.seeds,
             "remarks": list(j.remarks), "control": j.control or None}
            for j in judged
        ]  # fmt: skip
        print_json({"experiment": experiment.name, "quick": results.quick, "page": str(page), "claims": claims})
        return
    rows = [[j.words, j.claim.text, j.case, j.measured, "; ".join(j.remarks)] for j in judged]
    if rows:
        print_table(["verdict", "claim", "case", "measured", "remarks"], rows, experiment.title)
    if results.quick:
        typer.echo("--quick only shows that the experiment runs: omit it for results")
    console().print(f"page: {page}", markup=False)


def _list(as_json: bool) -> None:
    from fedalloy.studies.reproduce.declaring import experiment_names, load_experiment
    from fedalloy.studies.reproduce.index import as_text

    found = {name: load_experiment(name) for name in experiment_names()}
    verdicts = {name: _verdicts(one) for name, one in found.items()}
    if as_json:
        costs = {name: _cost(one, quick=False) for name, one in found.items()}
        print_json(
            {
                name: {"title": one.title, "verdicts": verdicts[name], "cost": vars(cost) if cost else None}
                for (name, one), cost in zip(found.items(), costs.values(), strict=True)
            }
        )
        return
    rows = []
    for name, one in found.items():
        full, short = _cost(one, quick=False), _cost(one, quick=True)
        costs_text = [str(full.runs), full.text, short.text] if full and short else ["", "", ""]
        rows.append([name, one.title, as_text(verdicts[name]), *costs_text])
    print_table(["name", "what it is", "verdicts", "runs", "one core", "--quick"], rows, numbers=(3, 4, 5))


def _verdicts(experiment: PaperExperiment) -> Counter[str]:
    """How often each verdict was reached by the results in this checkout; all claims are not run elsewhere."""
    from fedalloy.studies.reproduce.index import RESULTS, Judged, count
    from fedalloy.studies.reproduce.results import read_results

    file = RESULTS / f"{experiment.name}.json"
    judged = Judged.of(experiment, read_results(file) if file.is_file() else None)
    return count([(judged, judged.judgements)])


def _cost(experiment: PaperExperiment, quick: bool) -> Cost | None:
    """None for an experiment that another program measures."""
    from fedalloy.studies.reproduce.cost import estimate
    from fedalloy.studies.reproduce.measuring import Wish, chosen

    return estimate(chosen(experiment, Wish(quick=quick))) if experiment.cases else None


def _pages(named: str | None) -> None:
    from fedalloy.core.errors import SpecError
    from fedalloy.studies.reproduce.index import RESULTS, write_pages

    folder = Path(named) if named else RESULTS
    if not list(folder.glob("*.json")):
        where = f"{folder} holds no results" if folder.is_dir() else f"there is no folder {folder} here"
        raise SpecError(f"--pages: {where}; work in a checkout of fedalloy, or name the folder: --pages FOLDER")
    changed = write_pages(folder)
    typer.echo("\n".join(map(str, changed)) if changed else "all pages match their results")


def _names(text: str | None) -> tuple[str, ...]:
    return tuple(one.strip() for one in text.split(",")) if text else ()
