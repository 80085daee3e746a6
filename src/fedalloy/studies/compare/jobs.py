"""Many runs, each in its own folder: one after another in this process, or in parallel in spawned processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from fedalloy.core.errors import CheckpointError, DataError, FedalloyError, SpecError, is_passing
from fedalloy.experiment.records.reading import read_status
from fedalloy.results.outcome import watched, watched_by
from fedalloy.studies.compare.held import HeldTasks
from fedalloy.studies.compare.notes import Note, each_once, pass_on

if TYPE_CHECKING:
    from fedalloy.core.protocols import Task
    from fedalloy.experiment.recipe import Experiment
    from fedalloy.tasks.federation import FederatedTask

_TOLD_EVERY = 0.2
"""Seconds between two messages about the same run."""


_LONGEST_END = 5.0
"""Seconds to wait for the exit code of a process."""


@dataclass(frozen=True)
class Job:
    """One run to do: its one-run recipe and its folder; ``task`` makes the data that are not in the recipe. With
    ``until`` it stops after that round, and can be continued."""

    name: str
    seed: int
    recipe: dict[str, Any]
    folder: Path
    track: tuple[str, ...] = ()
    task: Callable[[], Task] | None = field(default=None, compare=False)
    until: int | None = None

    @property
    def experiment(self) -> Experiment:
        """The run, ready."""
        from fedalloy.experiment.recipe import parse, resolve

        made = resolve(parse(self.recipe))
        return made if self.task is None else replace(made, task=cast("Callable[[], FederatedTask]", self.task))


@dataclass(frozen=True)
class JobNews:
    """Something happened to a job: it was found finished, a round ended, it ended, or it broke (see ``state``)."""

    job: Job
    kind: Literal["reused", "round", "ended", "broken"]
    round: int = 0
    rounds: int = 0
    score: float | None = None
    text: str = ""
    state: Literal["", "failed", "interrupted"] = ""


Watcher = Callable[[JobNews], None]
Broken = dict[Path, JobNews]
"""The runs that ended by an error, by folder."""


def leave_if_starting() -> None:
    """End a worker process that reaches a call of ``compare`` while it imports the script; the parent then explains
    what to do (:meth:`_Crew.check_start`)."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise SystemExit(1)


def run_jobs(jobs: Sequence[Job], processes: int, watcher: Watcher) -> Broken:
    """Do every run that is missing; returns those that broke (by an error, not a divergence).

    Finished and failed runs are kept, interrupted ones resumed. A run that breaks does not stop the others.
    Ctrl-C ends the runs in progress after their round, with a checkpoint, and is passed on.
    """
    done = {job.folder: is_done(job) for job in jobs}  # all first, to refuse at once a folder that holds another run
    todo = [job for job in jobs if not done[job.folder]]
    reused = [job for job in jobs if done[job.folder]]
    # If all runs are finished, the data need not be available to show the table.
    with contextlib.nullcontext() if todo else contextlib.suppress(DataError):
        check_data(reused)
    for job in reused:
        watcher(JobNews(job, "reused"))
    broken: Broken = {}

    def tell(news: JobNews) -> None:
        if news.kind == "broken":
            broken[news.job.folder] = news
        watcher(news)

    side_by_side(todo, min(processes, len(todo)), tell)
    return broken


def is_done(job: Job) -> bool:
    """Whether a folder holds exactly this run, complete; another run is refused, a shorter one is not complete."""
    from fedalloy.experiment.recipe.matching import mismatches
    from fedalloy.experiment.records.folder import RunFolder

    stored = job.folder / "recipe.toml"
    if not stored.exists():
        return False
    found = RunFolder.open(job.folder).recipe()
    different = mismatches(found, job.recipe)
    if different and not _is_same_task(job, found):
        raise CheckpointError(
            f"{job.folder} holds another experiment ({', '.join(different)}); choose another folder, or delete this one"
        )
    return not _is_longer(job, found.get("run", {}).get("rounds", 0)) and read_status(job.folder)["state"] in (
        "finished",
        "failed",
    )


def _is_same_task(job: Job, found: dict[str, Any]) -> bool:
    """Whether two recipes differ only because one names the data and the other got the same ones from Python."""
    from fedalloy.experiment.identity import is_task_of
    from fedalloy.experiment.recipe.matching import FREE, mismatches
    from fedalloy.experiment.records.folder import RunFolder
    from fedalloy.experiment.records.reading import GIVEN

    names = [recipe.get("task", {}).get("dataset") for recipe in (found, job.recipe)]
    if GIVEN not in names or mismatches(found, job.recipe, (*FREE, "task", "partition", "noise")):
        return False
    identity = RunFolder.open(job.folder).identity()
    return identity is not None and is_task_of(identity, job.experiment.task())


def check_data(jobs: Sequence[Job]) -> None:
    """Refuse finished runs whose data have changed since, although their recipes have not (files that were replaced, a
    function that was edited): the remaining runs would use other data. One run is checked for all those with the same
    data tables, whose files are the same."""
    from fedalloy.experiment.identity import other_data
    from fedalloy.experiment.records.folder import RunFolder

    looked: list[Any] = []
    for job in jobs:
        tables = [job.recipe.get(name) for name in ("task", "partition")]
        found = RunFolder.open(job.folder).identity()
        if found is None or tables in looked:
            continue
        looked.append(tables)
        different = other_data(found, job.experiment.task())
        if different:
            raise CheckpointError(
                f"{job.folder} holds a run on other data ({', '.join(different)}): the data have changed since; choose "
                "another folder, or restore the earlier data"
            )


def _is_longer(job: Job, there: int) -> bool:
    """Whether more rounds are wanted than the folder has; if that is impossible, refused before anything runs."""
    from fedalloy.experiment.lengthening import check_length
    from fedalloy.experiment.recipe import parse
    from fedalloy.experiment.recipe.resolving import algorithm_of

    here = job.recipe["run"]["rounds"]
    if here != there:
        check_length(job.folder, algorithm_of(parse(job.recipe)), there, here)
    return bool(here > there)


def work(job: Job, tell: Callable[[JobNews], None], held: HeldTasks | None = None) -> JobNews:
    """Do one run, in this process."""
    from fedalloy.experiment.driver import RoundEvent
    from fedalloy.experiment.interrupt import Caught, interruption

    told, caught = 0.0, Caught()

    def watch(event: RoundEvent) -> None:
        nonlocal told
        if time.monotonic() - told >= _TOLD_EVERY:
            told = time.monotonic()
            tell(_round_news(job, event))
        if job.until is not None and event.progress.round >= job.until:
            event.stop(f"paused after round {job.until}")

    try:
        job.folder.parent.mkdir(parents=True, exist_ok=True)
        experiment = job.experiment if job.task or held is None else held.within(job.experiment)
        ending, _ = experiment.run(job.folder, resume=True, watcher=watch, track=job.track, caught=caught)
    except Exception as error:
        if caught:  # broke while being asked to stop: the signal is meant for all runs
            raise interruption(caught) from error
        return _broken(job, error)
    # A request through its folder stops one run; a signal stops all of them, even if it arrives in the last round.
    if caught:
        raise interruption(caught)
    return JobNews(job, "ended", ending.progress.round, text=ending.status)


def _broken(job: Job, error: Exception) -> JobNews:
    """The news of a broken run; for errors other than ours or the operating system's, the folder gets the traceback."""
    outside = is_passing(error) or isinstance(error, CheckpointError)
    known = isinstance(error, FedalloyError | OSError)
    if not known:
        with contextlib.suppress(OSError):
            (job.folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
    text = str(error) if known else f"{type(error).__name__}: {error} (see error.txt in its folder)"
    return JobNews(job, "broken", text=text, state="interrupted" if outside else "failed")


def _round_news(job: Job, event: Any) -> JobNews:
    seen = {"evaluation": event.evaluation.summary, "global": event.evaluation.overall} if event.evaluation else {}
    scores = watched(seen, *watched_by(job.recipe)) or {}
    return JobNews(job, "round", event.progress.round, event.rounds, scores.get("mean"))


def side_by_side(jobs: Sequence[Job], processes: int, tell: Watcher) -> None:
    """Do some jobs; with several ``processes``, spawned workers get them as they become free."""
    waiting = list(jobs)[::-1]
    work_through(lambda: waiting.pop() if waiting else None, processes, tell)


def work_through(feed: Callable[[], Job | None], processes: int, tell: Watcher) -> None:
    """Do the jobs that ``feed`` gives, until it gives none and none is running; it is asked again after every one. No
    worker is left running, however this ends."""
    with each_once():
        if processes > 1:
            _share_out(feed, processes, tell)
            return
        held = HeldTasks()
        while (job := feed()) is not None:
            tell(work(job, tell, held))


def _share_out(feed: Callable[[], Job | None], processes: int, tell: Watcher) -> None:
    with _crew(processes) as crew:
        free, busy = list(crew.connections)[::-1], dict[Connection, Job]()
        while _hand_out(crew, feed, free, busy):
            for ready in cast("list[Connection]", wait(list(busy))):  # Windows has a type of its own
                news = _receive(ready)
                if isinstance(news, Note):
                    news.say()
                    continue
                if news is None:
                    crew.check_start(ready)
                    ready.close()  # a new process is started in its place when there is another job
                if news is None or news.kind != "round":
                    job = busy.pop(ready)
                    free.append(ready)
                    news = news or _died(job)
                tell(news)


def _hand_out(crew: _Crew, feed: Callable[[], Job | None], free: list[Connection], busy: dict[Connection, Job]) -> bool:
    """Give jobs to free workers as long as there are both; returns whether any worker is busy."""
    while free and (job := feed()) is not None:
        busy[crew.hand(free.pop(), job)] = job
    return bool(busy)


def serve(connection: Connection) -> None:
    """The loop of a worker: one job after another until None arrives or the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def tell(message: JobNews | Note | BaseException) -> None:
        # A parent that is gone must not end the run before its checkpoint.
        with contextlib.suppress(OSError):
            connection.send(message)

    pass_on(tell)
    held = HeldTasks()
    with contextlib.suppress(EOFError, OSError):
        while (job := connection.recv()) is not None:
            tell(_safely(job, tell, held))


def _safely(job: Job, tell: Watcher, held: HeldTasks) -> JobNews | BaseException:
    """Do a job; a signal is returned as a value."""
    try:
        return work(job, tell, held)
    except KeyboardInterrupt as error:
        return error


def _receive(connection: Connection) -> JobNews | Note | None:
    """The next message of a worker; None when it died."""
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        return None
    if isinstance(message, BaseException):
        raise message
    assert isinstance(message, JobNews | Note)
    return message


def _died(job: Job) -> JobNews:
    text = (
        "its process died (killed, or out of memory); the same command continues from its last checkpoint, and "
        "--jobs 1 needs least memory"
    )
    return JobNews(job, "broken", text=text, state="interrupted")


class _Crew:
    """Spawned processes, one connection each."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.connections: list[Connection] = []

    def start(self) -> Connection:
        """Start one more."""
        spawn = multiprocessing.get_context("spawn")
        here, there = spawn.Pipe()
        process = spawn.Process(target=serve, args=(there,), daemon=True)
        # Children inherit that Ctrl-C is ignored, also while still importing: the parent passes it on.
        with _handled(signal.SIGINT, signal.SIG_IGN):
            process.start()
        there.close()
        self.processes.append(process)
        self.connections.append(here)
        return here

    def check_start(self, dead: Connection) -> None:
        """Raise if a worker failed: jobs return their errors, so it could not start, and neither could another."""
        process = self.processes[self.connections.index(dead)]
        process.join(_LONGEST_END)
        if process.exitcode == 1:
            raise SpecError(
                "the processes of the comparison cannot start, because they import the script that started it, and it "
                "starts another one or cannot be imported: put the call of fedalloy.compare under "
                '`if __name__ == "__main__":` in a file, or give processes=1'
            )

    def hand(self, connection: Connection, job: Job) -> Connection:
        """Give a worker its next job; a dead worker is replaced."""
        try:
            connection.send(job)
        except OSError:
            connection.close()
            connection = self.start()
            connection.send(job)
        return connection

    def dismiss(self) -> None:
        """End all workers: there are no jobs left."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send(None)


@contextlib.contextmanager
def _crew(count: int) -> Iterator[_Crew]:
    """Some workers; at the end those still busy are asked to stop after their round."""
    crew = _Crew()
    for _ in range(count):
        crew.start()
    try:
        with _handled(signal.SIGTERM, _terminate):
            yield crew
        crew.dismiss()
    except BaseException:
        # A busy worker ends its round, an idle one sees the closed connection.
        for started, connection in zip(crew.processes, crew.connections, strict=True):
            connection.close()
            started.terminate()
        raise
    finally:
        for started in crew.processes:
            started.join()


@contextlib.contextmanager
def _handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    """A temporary signal handler, in threads where one can be set."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def _terminate(number: int, frame: object) -> None:
    from fedalloy.experiment.interrupt import Terminated

    raise Terminated
