"""The driver: sample -> engine -> server_step -> record -> checkpoint, from the first round or the last checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fedalloy.core.algorithm import Algorithm, ServerState
from fedalloy.core.errors import CheckpointError, Diverged, SpecError, is_passing, nearest
from fedalloy.core.protocols import ClientStore, Task
from fedalloy.core.types import State, Tree
from fedalloy.experiment.callbacks import Hooks, RunStart, Wishes
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.evaluate import Evaluation
from fedalloy.experiment.health import check_health
from fedalloy.experiment.identity import identify, without_defaults
from fedalloy.experiment.interrupt import Caught, StopFlag, stop_when_asked
from fedalloy.experiment.lengthening import LAST, check_last, due, kept, reopen_last, tidy_snapshots
from fedalloy.experiment.machinery import Threads, closing, peak_memory, profiled
from fedalloy.experiment.observing import Seen, keep_snapshot, observe
from fedalloy.experiment.opening import Agreement, ClaimedRun, Consent, agree, open_folder
from fedalloy.experiment.placement import on_device, told_about_float64
from fedalloy.experiment.recorder import FolderRecorder, MemoryRecorder, Recorder, Row
from fedalloy.experiment.records.folder import RunFolder, RunState
from fedalloy.experiment.records.reading import name_of
from fedalloy.experiment.round import Federation, RoundResult, Stopwatch, known_sizes, run_round
from fedalloy.experiment.sizes import KnownSizes
from fedalloy.experiment.starting import assemble, begin
from fedalloy.experiment.storing import check_states, contributions_limit, make_store
from fedalloy.experiment.tracking import Tracker, as_callbacks
from fedalloy.experiment.trained import Trained


@dataclass
class RunProgress:
    """The driver's own state from round to round; part of every checkpoint."""

    round: int = 0
    best: float | None = None
    stale: int = 0
    reached: int | None = None
    barren: int = 0
    failed: str | None = None
    simulated_seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    counted: int = 0
    ended: str | None = None

    @staticmethod
    def read(kept: Mapping[str, Any]) -> RunProgress:
        """From a checkpoint; earlier versions did not store in how many rounds a client contributed."""
        return RunProgress(**{"counted": kept["round"] - kept["barren"], **kept})


@dataclass(frozen=True)
class RoundEvent:
    """Passed to the callbacks of a run after every round."""

    row: Row
    progress: RunProgress
    rounds: int
    evaluation: Evaluation | None
    seconds: dict[str, float]
    wishes: Wishes = field(default_factory=Wishes, repr=False)

    def score(self, metric: str | None = None) -> tuple[str, float]:
        """A metric (default: the first that is scored) and its mean over clients, NaN where it was not scored."""
        summary = self.evaluation.summary if self.evaluation else {}
        if metric is not None and summary and metric not in summary:
            raise SpecError(f"the run is not scored by '{metric}': {nearest(metric, summary)}")
        name = metric or next(iter(summary), "")
        return name, summary.get(name, {}).get("mean", math.nan)

    def finish(self, reason: str) -> None:
        """End the run after this round, as finished."""
        self.progress.ended = reason

    def stop(self, reason: str) -> None:
        """End the run after this round, as stopped: it can be resumed."""
        self.wishes.stop = reason

    def save(self) -> None:
        """Write a checkpoint after this round."""
        self.wishes.save = True


@dataclass(frozen=True)
class Ending:
    """The state of a run when the driver returns."""

    status: RunState
    reason: str
    state: ServerState = field(repr=False)
    progress: RunProgress
    trained: Trained = field(repr=False)


@dataclass
class Session:
    """One session of a run: the federation, the recorder and the progress."""

    fed: Federation
    state: ServerState
    store: ClientStore
    recorder: Recorder
    sizes: KnownSizes
    progress: RunProgress = field(default_factory=RunProgress)
    last: State | None = None
    hooks: Hooks = field(default_factory=Hooks)
    wishes: Wishes = field(default_factory=Wishes)
    profile: dict[str, float] | None = None


@torch.inference_mode(False)  # where nothing can be trained
def run(
    algorithm: Algorithm,
    task: Task,
    config: RunConfig,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    recipe: Mapping[str, Any] | None = None,
    watcher: Callable[[RoundEvent], None] | None = None,
    initial: Tree | None = None,
    track: Sequence[str | Tracker] = (),
    callbacks: Sequence[Any] = (),
    caught: Caught | None = None,
    start_over: bool = False,
    allow_engine_change: bool = False,
) -> tuple[Ending, Recorder]:
    """Run to the end, to the target, or until it is stopped; a run with a folder can be resumed.

    A folder is only resumed with the experiment that it holds (:mod:`fedalloy.experiment.identity`). More rounds are
    allowed, and with ``allow_engine_change`` another engine or device, which the folder then records.
    ``start_over`` starts over where no checkpoint can be used, and loses what was done.
    ``callbacks`` are called while it runs (:mod:`fedalloy.experiment.callbacks`); ``watcher`` is a function that is
    called after every round, ``track`` names trackers (:mod:`fedalloy.results.track`). Signals that arrive during the
    run are put into ``caught`` for the caller to act on (:func:`fedalloy.experiment.interrupt.put_off`).
    """
    _check_resuming(resume, folder, start_over=start_over, allow_engine_change=allow_engine_change)
    hooks = Hooks(as_callbacks(track, callbacks, watcher, folder))
    fed = assemble(algorithm, task, config)
    state = begin(fed, initial)
    fed.engine.check_place()
    claim, opened = None, None
    if folder is not None:
        claim = _claim(algorithm, task, config, state, recipe or {})
        opened = open_folder(folder, resume, claim, fed.task, config, fed.notices)
    fed.engine.keep_contributions(contributions_limit(fed, opened))
    with Threads(config), opened.lock() if opened else nullcontext():
        recorder: Recorder = FolderRecorder(opened) if opened else MemoryRecorder()
        session = Session(fed, state, make_store(fed, state, opened), recorder, known_sizes(fed), hooks=hooks)
        if opened and claim:
            _restore(session, opened, agree(opened, claim, Consent(start_over, allow_engine_change)), start_over)
        place = opened.path if opened else None
        without = told_about_float64(config.device)
        with stop_when_asked(place, caught) as flag, closing(fed.engine), profiled(config) as profile, without:
            session.profile = profile
            return _run_rounds(session, flag, _start(session, recipe or {}, place)), recorder


def _check_resuming(resume: bool, folder: object, **given: bool) -> None:
    """Refuse to resume nothing, and what is only about resuming in a run that does not: it would be ignored."""
    if resume and folder is None:
        raise CheckpointError("resuming needs the folder of the run")
    for name, wanted in given.items():
        if wanted and not resume:
            option = name.replace("_", "-")
            raise SpecError(f"{name} (--{option}) is about a run that is resumed: give resume=True (--resume) too")


def _start(session: Session, recipe: Mapping[str, Any], folder: Path | None) -> RunStart:
    return RunStart(name_of(recipe), recipe, folder, session.progress.round, session.fed.config.rounds)


def _claim(
    algorithm: Algorithm, task: Task, config: RunConfig, state: ServerState, recipe: Mapping[str, Any]
) -> ClaimedRun:
    named = identify(algorithm, task, config, state)
    return ClaimedRun(algorithm, named, without_defaults(named, algorithm, task, config), recipe)


def _restore(session: Session, folder: RunFolder, agreed: Agreement, start_over: bool) -> None:
    """Go back to the last checkpoint and cut the records to it; everything is checked before anything is changed."""
    config, solver, store = session.fed.config, session.fed.algorithm.solver, session.store
    saved = None if start_over else folder.latest(accept=lambda found: check_states(session.fed, store, found.clients))
    if saved is not None:
        check_last(folder.path, saved, config, solver, agreed.there)
    longer = saved is not None and LAST in saved.extra and config.rounds > saved.round
    if saved is not None and not longer:  # lengthening may find an incomplete last round
        folder.check_records(saved)
    if saved is not None and longer:
        folder.check_tables(saved.round - 1, saved.extra[LAST]["clients"].numpy().tobytes())
    agreed.record_agreement(folder, saved.round if saved else 0)
    if saved is not None and longer:
        progress = reopen_last(folder, saved)
    else:
        progress = saved.extra["progress"] if saved else {}
        folder.rewind(saved)
    store.restore(saved.round if saved else 0, saved.clients if saved else {})
    tidy_snapshots(folder, config, saved.round if saved else 0)
    if saved is None:
        return
    session.state = on_device(saved.server, config.device)
    session.progress = RunProgress.read(progress)
    if config.rounds > agreed.there:  # a run that a callback ended goes on when it is made longer
        session.progress.ended = None
    session.sizes.restore(saved.extra.get("sizes"))
    session.last = None if longer else saved.extra.get(LAST)
    if saved.extra.get("engine"):
        session.fed.engine.restore(saved.extra["engine"])
    if longer:
        _save(session)


def _run_rounds(session: Session, flag: StopFlag, start: RunStart) -> Ending:
    """Run rounds until the run ends, then write a checkpoint; an exception becomes the status and is raised again."""
    config, saved_at = session.fed.config, time.monotonic()
    session.recorder.status("running", session.progress.round)
    status, reason = _verdict(session, flag)
    try:
        session.hooks.call("on_run_begin", start)
        while status == "running":
            _one_healthy_round(session)
            status, reason = _verdict(session, flag)
            due_now = session.wishes.save or time.monotonic() - saved_at >= config.checkpoint_every
            if status == "running" and due_now:
                _save(session)
                saved_at = time.monotonic()
        _save(session)
    except BaseException as error:
        state: RunState = "interrupted" if is_passing(error) else "failed"
        reason = str(error) or type(error).__name__
        session.recorder.status(state, session.progress.round, reason)
        session.hooks.call("on_run_end", state, reason)
        raise
    session.recorder.status(status, session.progress.round, reason)
    session.hooks.call("on_run_end", status, reason)
    trained = Trained(session.fed, session.state, session.store, session.progress.round)
    return Ending(status, reason, session.state, session.progress, trained)


def _one_healthy_round(session: Session) -> None:
    """One round; if it diverged, the run fails with the reason."""
    try:
        _one_round(session)
    except Diverged as error:
        session.progress.failed = str(error)


def _one_round(session: Session) -> None:
    progress, fed, watch = session.progress, session.fed, Stopwatch()
    round, solver = progress.round + 1, fed.algorithm.solver
    result = run_round(fed, session.state, session.store, round, watch, session.sizes)
    session.state = result.step.state
    now = otherwise = due(fed.config, solver, round, last=False)
    if round == fed.config.rounds:
        now = due(fed.config, solver, round, last=True)
    notes = fed.engine.notes() if now != otherwise else {}
    with watch.time("evaluate"):
        seen = observe(Trained(fed, session.state, session.store, round), now, notes)
    if now != otherwise:
        session.last = _unless_last(session, result, seen.limited(otherwise, notes))
    result.row.update(seen.row)
    _advance(progress, fed.config, result, seen.evaluation)
    with watch.time("record"):
        for one in seen.clients:
            session.recorder.append("clients", {"round": round, **one})
        if now.snapshot:
            keep_snapshot(fed, session.state, session.recorder, round)
        session.recorder.append("rounds", result.row)
    session.recorder.append("timings", {"round": round, **watch.seconds, **peak_memory(), **_engine_notes(session)})
    session.hooks.round_ended(
        RoundEvent(result.row, progress, fed.config.rounds, seen.evaluation, watch.seconds, session.wishes)
    )
    check_health(result, seen.evaluation, progress.barren, solver.target)


def _unless_last(session: Session, result: RoundResult, seen: Seen) -> State:
    """The last round as it would have been if others followed."""
    progress, config = replace(session.progress), session.fed.config
    _advance(progress, config, result, seen.evaluation)
    try:
        check_health(result, seen.evaluation, progress.barren, session.fed.algorithm.solver.target)
    except Diverged as error:
        progress.failed = str(error)
    clients = [session.recorder.client_line({"round": progress.round, **one}) for one in seen.clients]
    return kept(asdict(progress), {**result.row, **seen.row}, clients)


def _engine_notes(session: Session) -> dict[str, Any]:
    """The engine's notes: which engine was chosen (once), and its phases when they are collected."""
    notes: dict[str, Any] = session.fed.engine.incidents()
    if session.progress.round == 1 and session.fed.engine.choice:
        notes["engine"] = session.fed.engine.choice
    if session.profile is not None:
        notes["profile"] = dict(session.profile)
        session.profile.clear()
    return notes


def _advance(progress: RunProgress, config: RunConfig, result: RoundResult, evaluation: Evaluation | None) -> None:
    row = result.row
    progress.round = row["round"]
    progress.simulated_seconds += row["simulated_seconds"]
    progress.bytes_up += row["bytes_up"]
    progress.bytes_down += row["bytes_down"]
    if row["ids"]:
        progress.barren = 0
    elif row["dropped"] and not row["refusal"]:  # refused contributions may mean divergence, absent clients do not
        progress.barren += 1
    active = set(row["ids"]) - set(row["idle"]) if row["idle"] else row["ids"]  # idle clients changed nothing
    progress.counted += bool(active)
    if evaluation is None:
        return
    score = _watched(evaluation, config)
    improved = not math.isnan(score) and (progress.best is None or config.better(score, progress.best))
    progress.best = score if improved else progress.best
    progress.stale = 0 if improved else progress.stale + 1
    if config.met_by(score) and progress.reached is None:
        progress.reached = progress.round


def _watched(evaluation: Evaluation, config: RunConfig) -> float:
    """The score that target and patience use."""
    if config.target_on == "global":
        return evaluation.overall.get(config.target_metric, math.nan)
    return evaluation.summary.get(config.target_metric, {}).get("mean", math.nan)


def _verdict(session: Session, flag: StopFlag) -> tuple[RunState, str]:
    """Whether the run continues or ends, and the reason."""
    progress = session.progress
    if progress.failed:
        return "failed", progress.failed
    end = _end(progress, session.fed.config)
    if end is not None and not progress.counted:
        return "failed", (
            f"no client contributed in any of {progress.round} rounds: all were unreachable, late, idle or dropped, "
            "or too few for the rule; see the columns 'absent', 'idle', 'dropped' and 'refusal' of rounds.jsonl"
        )
    if end is not None:
        return "finished", end
    reason = str(flag.reason) if flag else session.wishes.stop
    return ("running", "") if reason is None else ("stopped", reason)


def _end(progress: RunProgress, config: RunConfig) -> str | None:
    """The reason why a run has ended, empty after the last round; None if it has not."""
    if progress.round >= config.rounds:
        return ""
    if progress.ended is not None:
        return progress.ended
    if config.stop_at_target and progress.reached is not None:
        return f"target reached in round {progress.reached}"
    if config.patience is not None and progress.stale >= config.patience:
        return f"no better {config.target_metric} in {progress.stale} evaluations"
    return None


def _save(session: Session) -> None:
    choice = session.fed.engine.choice
    engine = {name: choice[name] for name in ("engine", "threads") if name in choice}
    extra = {"progress": asdict(session.progress), "engine": engine, "sizes": session.sizes.to_state()}
    extra |= {LAST: session.last} if session.last else {}
    session.recorder.checkpoint(session.progress.round, session.state, session.store, extra)
    if session.fed.engine.clients_keep_states and session.fed.engine.data_at_hand:
        session.fed.engine.checkpointed(session.progress.round, session.store.commit(session.progress.round))
    session.wishes.save = False
    if isinstance(session.recorder, FolderRecorder):
        session.hooks.call("on_checkpoint", session.progress.round)
