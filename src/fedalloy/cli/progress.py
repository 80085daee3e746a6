"""Progress of runs: a live line in a terminal, plain lines elsewhere, nothing with ``--json``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from fedalloy.cli.console import console

if TYPE_CHECKING:
    from fedalloy.experiment.driver import RoundEvent
    from fedalloy.studies.compare.jobs import JobNews

_LINE_EVERY = 5.0
"""Seconds between two plain lines."""


@contextmanager
def watch_run(metric: str, silent: bool) -> Iterator[Callable[[RoundEvent], None]]:
    """A callback that shows the progress of one run."""
    out = console(stderr=True)
    if silent:
        yield lambda event: None
    elif out.is_terminal:
        with live_run(metric) as watcher:
            yield watcher
    else:
        yield plain_run(metric)


def plain_run(metric: str) -> Callable[[RoundEvent], None]:
    """A line every few seconds, and one for the last round."""
    begun, told, first = time.monotonic(), 0.0, 0

    def tell(event: RoundEvent) -> None:
        nonlocal told, first
        first = first or event.progress.round
        now, done = time.monotonic(), event.progress.round
        if event.evaluation is None or (now - told < _LINE_EVERY and done < event.rounds):
            return
        told = now
        speed = (done - first + 1) / max(now - begun, 1e-9)
        typer.echo(f"round {done}/{event.rounds}  {scores(event, metric)}  {speed:.1f} rounds/s")

    return tell


@contextmanager
def live_run(metric: str) -> Iterator[Callable[[RoundEvent], None]]:
    """A bar with round, speed, scores and the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = ("{task.fields[speed]}", "{task.fields[scores]}")
    bar = Progress(
        TextColumn("round"), MofNCompleteColumn(), BarColumn(bar_width=24), *map(TextColumn, columns),
        TimeRemainingColumn(), console=console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        task = bar.add_task("run", total=None, speed="", scores="")
        shown = ""

        def tell(event: RoundEvent) -> None:
            nonlocal shown
            shown = scores(event, metric) if event.evaluation else shown
            pace = bar.tasks[0].speed
            speed = f"{pace:.1f} rounds/s" if pace else ""
            bar.update(task, completed=event.progress.round, total=event.rounds, speed=speed, scores=shown)

        yield tell


def scores(event: RoundEvent, metric: str) -> str:
    """Mean and worst clients of an evaluation, as text."""
    summary = event.evaluation.summary if event.evaluation else {}
    found = summary.get(metric) or next(iter(summary.values()), {})
    name = metric if metric in summary else next(iter(summary), metric)
    worst = f"  worst 10 % {found['worst_served']:.3f}" if "worst_served" in found else ""
    return f"{name} {found.get('mean', float('nan')):.3f}{worst}"


@contextmanager
def watch_jobs(total: int | None, silent: bool) -> Iterator[Callable[[JobNews], None]]:
    """A callback that shows how many runs are done and the progress of the running ones."""
    out = console(stderr=True)
    if silent:
        yield lambda news: None
    elif out.is_terminal:
        with live_jobs(total) as watcher:
            yield watcher
    else:
        yield plain_jobs()


def plain_jobs() -> Callable[[JobNews], None]:
    """One line per run."""
    begun = time.monotonic()

    def tell(news: JobNews) -> None:
        if news.kind != "round":
            said = {"reused": "already there", "broken": f"{news.state}: {news.text}"}.get(news.kind, news.text)
            line = f"{time.monotonic() - begun:6.1f} s  {news.job.name}, seed {news.job.seed}: {said}"
            typer.echo(line, err=True)

    return tell


@contextmanager
def live_jobs(total: int | None) -> Iterator[Callable[[JobNews], None]]:
    """One bar for all runs and one for each that is running."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    bar = Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"), TimeElapsedColumn(), console=console(stderr=True), transient=True,
    )  # fmt: skip
    with bar:
        overall = bar.add_task("runs", total=total, score="")
        running: dict[tuple[str, int, str], TaskID] = {}

        def tell(news: JobNews) -> None:
            place = (news.job.name, news.job.seed, str(news.job.folder))
            if news.kind == "round":
                if place not in running:
                    running[place] = bar.add_task(f"{news.job.name}, seed {news.job.seed}", total=news.rounds, score="")
                bar.update(running[place], completed=news.round)
                if news.score is not None:
                    bar.update(running[place], score=f"{news.score:.3f}")
                return
            bar.advance(overall)
            if place in running:
                bar.remove_task(running.pop(place))

        yield tell
