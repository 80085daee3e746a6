"""``fedalloy run``: one experiment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedalloy.cli.console import console, number, print_json, print_table
from fedalloy.cli.importing import AllowImports
from fedalloy.cli.progress import watch_run

if TYPE_CHECKING:
    from fedalloy.experiment.recipe import Experiment
    from fedalloy.results.outcome import RunOutcome

Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=VALUE", help="Change a value of the recipe; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object for machines, and nothing else.")]
Track = Annotated[
    list[str] | None,
    typer.Option(help="Also log to tensorboard, mlflow or wandb (extra 'track'); may be repeated.", metavar="TOOL"),
]
EngineName = Annotated[
    str | None, typer.Option(help="The engine, short for --set engine.kind=NAME: auto, loop, ray, ...", metavar="NAME")
]
Quick = Annotated[bool, typer.Option("--quick", help="A few rounds and seeds only, to see whether it runs.")]
_PHASES = ("plan", "data", "compute", "clients", "combine", "evaluate", "record")


def run(
    recipe: Annotated[Path, typer.Argument(help="A recipe (.toml), or a run folder, whose recipe is used.")],
    changes: Changes = None,
    quick: Quick = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue after an interruption.")] = False,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The run folder; default: runs/NAME.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed; default: the recipe's first.")] = None,
    as_json: Json = False,
    engine: EngineName = None,
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time went.")] = False,
    track: Track = None,
    start_over: Annotated[
        bool, typer.Option("--start-over", help="With --resume: delete what the folder holds and start over.")
    ] = False,
    allow_engine_change: Annotated[
        bool, typer.Option("--allow-engine-change", help="With --resume: continue with another engine or device.")
    ] = False,
    allow_imports: AllowImports = False,
) -> None:
    """Run one experiment and write its records to a folder.

    Ctrl-C ends it after the round in progress, with a checkpoint; --resume continues from there. With a larger
    run.rounds, --resume also extends a finished run.
    """
    from fedalloy.experiment.interrupt import Caught, exit_code
    from fedalloy.experiment.recipe import load, resolve
    from fedalloy.experiment.recipe import quick as shortened

    wanted, caught = load(recipe, [*(changes or []), *([f"engine.kind={engine}"] if engine else [])]), Caught()
    wanted = shortened(wanted) if quick else wanted
    folder = output or default_folder(recipe, resume)
    experiment = stored(resolve(wanted, seed), folder) if resume else resolve(wanted, seed)
    experiment = replace(experiment, config=replace(experiment.config, profile=profile))
    if not as_json:
        _introduce(experiment, folder, wanted.compare, len(wanted.run.seeds) if seed is None else 1)
    with watch_run(experiment.config.target_metric, as_json) as watcher:
        ending, _ = experiment.run(
            folder, resume=resume, watcher=watcher, track=track or [], caught=caught, start_over=start_over,
            allow_engine_change=allow_engine_change,
        )  # fmt: skip
    _finish(folder, profile, as_json)
    if ending.status != "finished":
        raise typer.Exit(exit_code(caught) if ending.status == "stopped" else 1)


def default_folder(recipe: Path, resume: bool) -> Path:
    """runs/NAME, or runs/NAME-2, ... when that is taken; with resume, the latest of them, or the folder given."""
    from fedalloy.experiment.records.reading import is_run

    if resume and is_run(recipe):
        return recipe
    place = recipe if recipe.is_dir() else recipe.parent if recipe.stem == "recipe" else recipe
    name = (place.resolve() if place.name in ("", ".", "..") else place).stem or "run"
    candidates = [Path("runs") / (name if number == 1 else f"{name}-{number}") for number in range(1, 10_000)]
    free = next(position for position, folder in enumerate(candidates) if not folder.exists())
    return candidates[max(0, free - 1) if resume else free]


def stored(wanted: Experiment, folder: Path) -> Experiment:
    """The experiment with the thread count of the run in the folder, so that sums are computed in the same order."""
    from fedalloy.experiment.recipe import read

    threads = read(folder).get("engine", {}).get("threads") if (folder / "recipe.toml").exists() else None
    if threads is None:
        return wanted
    resolved = {**wanted.resolved, "engine": {**wanted.resolved["engine"], "threads": threads}}
    return replace(wanted, config=replace(wanted.config, threads=threads), resolved=resolved)


def seconds(folder: Path) -> dict[str, float]:
    """Seconds per phase, over all rounds. Phases that the engine reports are subtracted from the clients' time."""
    from fedalloy.experiment.records.reading import read_run
    from fedalloy.results.sums import phases

    total = phases(read_run(folder).timings())
    return {phase: total[phase] for phase in _PHASES if phase in total}


def _introduce(experiment: Experiment, folder: Path, compared: list[Any], seeds: int) -> None:
    from fedalloy.experiment.records.reading import name_of

    config = experiment.config
    typer.echo(f"{name_of(experiment.resolved)}, seed {config.seed}, {config.rounds} rounds -> {folder}")
    if compared or seeds > 1:
        typer.echo(f"(one run; 'fedalloy compare' makes all {max(1, len(compared)) * seeds} of this recipe)")


def _finish(folder: Path, profile: bool, as_json: bool) -> None:
    from fedalloy.results.outcome import read_outcome

    outcome = read_outcome(folder)
    if as_json:
        print_json(outcome.to_json() | ({"seconds": seconds(folder)} if profile else {}))
    else:
        _present(outcome, folder, profile)


def _times(unit: float, value: float | None) -> float | None:
    return None if value is None else unit * value


def _present(outcome: RunOutcome, folder: Path, profile: bool) -> None:
    from fedalloy.tasks.metrics.direction import variance_as

    if outcome.scores:
        names = ["mean", "worst_served", "best_served", "gini"]
        variance, unit = variance_as(outcome.metric)
        labels = [f"{outcome.metric} (mean)", "worst 10 %", "best 10 %", "Gini", variance]
        shown = [*map(number, map(outcome.scores.get, names)), number(_times(unit, outcome.scores.get("variance")))]
        print_table([*labels, "rounds to target"], [[*shown, str(outcome.reached or "")]], numbers=range(6))
    if profile:
        spent = seconds(folder)
        whole = sum(spent.values()) or 1.0
        rows = [[phase, number(part, 2), f"{100 * part / whole:.0f} %"] for phase, part in spent.items()]
        print_table(["phase", "seconds", "share"], rows, numbers=(1, 2))
    out = console()
    if outcome.state == "finished":
        reason = f": {outcome.reason}" if outcome.reason else ""
        out.print(f"finished in round {outcome.round}{reason}; records in {folder}", markup=False)
    elif outcome.state == "failed":
        out.print(f"failed in round {outcome.round}: {outcome.reason}; records in {folder}", markup=False, style="red")
    else:
        out.print(f"stopped after round {outcome.round}, everything up to there is safe", markup=False)
        out.print(f"continue with:  fedalloy run {folder} --resume", markup=False)
