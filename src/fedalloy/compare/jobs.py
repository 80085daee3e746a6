"""Many runs, each in its own folder: in this process one after another, or in a few spawned ones side by side."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import threading
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal

from fedalloy.core.errors import CheckpointError, FedalloyError, RunLocked
from fedalloy.records.reading import read_status

_TOLD_EVERY = 0.2
"""Seconds between two messages about the same run."""


@dataclass(frozen=True)
class Job:
    """One run to be made: its one-run recipe and its folder."""

    name: str
    seed: int
    recipe: dict[str, Any]
    folder: Path
    track: tuple[str, ...] = ()


@dataclass(frozen=True)
class News:
    """Something happened to a job: it was found ready, a round was played, it ended, or it broke."""

    job: Job
    kind: Literal["reused", "round", "ended", "broken"]
    round: int = 0
    rounds: int = 0
    score: float | None = None
    text: str = ""


Watcher = Callable[[News], None]


def run_jobs(jobs: Sequence[Job], processes: int, watcher: Watcher) -> dict[Path, str]:
    """Make every run that is not there yet; returns why some broke (an error, not a divergence), by folder.

    Finished and failed runs are kept, interrupted ones resumed. Ctrl-C ends the runs in progress after their
    round, with a checkpoint, and is passed on.
    """
    todo = []
    for job in jobs:
        if is_done(job):
            watcher(News(job, "reused"))
        else:
            todo.append(job)
    broken: dict[Path, str] = {}

    def tell(news: News) -> None:
        if news.kind == "broken":
            broken[news.job.folder] = news.text
        watcher(news)

    processes = min(processes, len(todo))
    if processes > 1:
        side_by_side(todo, processes, tell)
    else:
        for job in todo:
            tell(work(job, tell))
    return broken


def is_done(job: Job) -> bool:
    """Whether a folder holds this very run, complete; another run there is refused, a shorter one is not complete."""
    from fedalloy.recipe.matching import mismatches

    stored = job.folder / "recipe.toml"
    if not stored.exists():
        return False
    found = tomllib.loads(stored.read_text(encoding="utf-8"))
    different = mismatches(found, job.recipe)
    if different:
        raise CheckpointError(
            f"{job.folder} holds another experiment ({', '.join(different)}); choose another folder with -o, or delete "
            "this one"
        )
    return not _is_longer(job, found["run"]["rounds"]) and read_status(job.folder)["state"] in ("finished", "failed")


def _is_longer(job: Job, there: int) -> bool:
    """Whether more rounds are wanted than the folder was asked for; told before anything runs where that cannot be."""
    from fedalloy.recipe import parse
    from fedalloy.recipe.resolving import algorithm_of
    from fedalloy.run.lengthening import check_length

    here = job.recipe["run"]["rounds"]
    if here != there:
        check_length(job.folder, algorithm_of(parse(job.recipe)), there, here)
    return bool(here > there)


def work(job: Job, tell: Callable[[News], None]) -> News:
    """Make one run, in this process."""
    from fedalloy.recipe import parse, resolve
    from fedalloy.run.driver import RoundEvent
    from fedalloy.run.interrupt import Caught, interruption

    told, caught = 0.0, Caught()

    def watch(event: RoundEvent) -> None:
        nonlocal told
        if time.monotonic() - told >= _TOLD_EVERY:
            told = time.monotonic()
            tell(_round_news(job, event))

    job.folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        ending, _ = resolve(parse(job.recipe)).run(
            job.folder, resume=True, watcher=watch, track=job.track, caught=caught
        )
    except (CheckpointError, RunLocked):
        raise
    except FedalloyError as error:
        return News(job, "broken", text=str(error))
    # Asked to stop through its folder, a run stops alone; a signal means all of them, also one in the last round.
    if caught:
        raise interruption(caught)
    return News(job, "ended", ending.progress.round, text=ending.status)


def _round_news(job: Job, event: Any) -> News:
    scores = event.evaluation.summary if event.evaluation else {}
    metric = job.recipe["run"].get("target_metric", "accuracy")
    return News(job, "round", event.progress.round, event.rounds, scores.get(metric, {}).get("mean"))


def side_by_side(jobs: Sequence[Job], processes: int, tell: Watcher) -> None:
    """Hand jobs to spawned workers as they become free; whatever happens, no worker is left behind."""
    waiting, busy = list(jobs)[::-1], {}
    with _workers(processes) as connections:
        for connection in connections:
            busy[connection] = waiting.pop()
            connection.send(busy[connection])
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                news = _receive(ready, busy[ready])
                if news.kind != "round":
                    following = waiting.pop() if waiting else None
                    ready.send(following)
                    busy = (
                        {**busy, ready: following} if following else {c: j for c, j in busy.items() if c is not ready}
                    )
                tell(news)


def serve(connection: Connection) -> None:
    """The life of a worker: one job after another until None arrives or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("fedalloy").addHandler(logging.NullHandler())  # the records keep what it says

    def tell(message: News | BaseException) -> None:
        # A parent that no longer listens must not end the run before its checkpoint.
        with contextlib.suppress(OSError):
            connection.send(message)

    with contextlib.suppress(EOFError, OSError):
        while (job := connection.recv()) is not None:
            tell(_safely(job, tell))


def _safely(job: Job, tell: Watcher) -> News | BaseException:
    """Errors travel as values; one that cannot be expected to unpickle travels as its text."""
    try:
        return work(job, tell)
    except (CheckpointError, RunLocked, KeyboardInterrupt) as error:
        return error
    except Exception:
        return RuntimeError(f"{job.name}, seed {job.seed}:\n{traceback.format_exc()}")


def _receive(connection: Connection, job: Job) -> News:
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        raise FedalloyError(
            f"the process of {job.name}, seed {job.seed} died (killed, or out of memory); the same command goes on "
            "from its last checkpoint, and --jobs 1 needs least memory"
        ) from None
    if isinstance(message, BaseException):
        raise message
    assert isinstance(message, News)
    return message


@contextlib.contextmanager
def _workers(count: int) -> Iterator[list[Connection]]:
    """Spawned processes, one connection each; at the end those still busy are asked to stop after their round."""
    spawn = multiprocessing.get_context("spawn")
    processes: list[BaseProcess] = []
    ours: list[Connection] = []
    # A child inherits that Ctrl-C is ignored: it hears of it from here, also while it is still importing.
    with _handled(signal.SIGINT, signal.SIG_IGN):
        for _ in range(count):
            here, there = spawn.Pipe()
            process = spawn.Process(target=serve, args=(there,), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            ours.append(here)
    try:
        with _handled(signal.SIGTERM, _terminate):
            yield ours
    except BaseException:
        # A busy worker ends its round, an idle one sees that nobody will send it a job any more.
        for started, connection in zip(processes, ours, strict=True):
            connection.close()
            started.terminate()
        raise
    finally:
        for started in processes:
            started.join()


@contextlib.contextmanager
def _handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    """A signal handler for a while, where one may be set at all."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _terminate(number: int, frame: object) -> None:
    from fedalloy.run.interrupt import Terminated

    raise Terminated
