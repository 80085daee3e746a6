"""Chooses an engine by timing the candidates in the first round, and keeps that choice."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.gathering import Storage
from fedalloy.core.protocols import Engine, Outcome, Shared, Task
from fedalloy.core.registry import register
from fedalloy.core.types import Context, State, Work
from fedalloy.engines.batched import Batched, dense_of
from fedalloy.engines.freed_memory import keep_freed_memory
from fedalloy.engines.kernels import fused_interpolated
from fedalloy.engines.kinds import interpolated_sgd_of, is_fusible
from fedalloy.engines.loop import Loop
from fedalloy.engines.processes import forks
from fedalloy.engines.workers import Workers

CACHE_BYTES = 16 << 20
"""Stacked models larger than this do not fit in the cache, and stacking is no longer faster on a CPU."""
THREADS_PAY_BYTES = 4 << 20
"""With smaller stacked models, several threads wait for each other longer than they compute."""
MUCH_FASTER = 1.5
"""A measured rival replaces the expected engine only if it is faster by this factor: timings are noisy, and the same
seed should get the same engine."""
SECOND_LOOK_SECONDS = 3.0


@dataclass(frozen=True)
class Candidate:
    """An engine by name, with its numbers of torch threads and of processes."""

    name: str
    threads: int
    processes: int = 1

    def make(self) -> Engine:
        """A new engine; only ``workers`` uses ``processes``."""
        engines: dict[str, Any] = {"loop": Loop, "batched": Batched, "workers": Workers}
        if self.name not in engines:
            raise SpecError(f"auto cannot pick '{self.name}': {nearest(self.name, engines)}")
        engine: Engine = engines[self.name](self.processes) if self.name == "workers" else engines[self.name]()
        return engine


@dataclass
class TrialRun:
    """What a candidate did in the first round, and how long it took."""

    candidate: Candidate
    engine: Engine
    outcome: Outcome | None = None
    seconds: float = math.inf


@register("engine", "auto")
@dataclass
class Auto(Engine):
    """Predicts the fastest engine from the model's shape, times it against its rivals in the first round, and keeps
    the winner. ``choice`` records what was picked and is stored with the run; a resumed run keeps it. Another run with
    the same object picks again, unless it was made with a ``choice``.
    """

    free_options: ClassVar[frozenset[str]] = frozenset({"choice"})
    choice: dict[str, Any] = field(default_factory=dict)
    _threads: int = field(default_factory=torch.get_num_threads, repr=False)
    _engine: Engine | None = field(default=None, repr=False)
    _chosen: bool = field(default=False, init=False, repr=False)
    """Whether ``choice`` is that of this run."""
    _fixed: bool = field(default=False, init=False, repr=False)

    def __post_init__(self) -> None:
        self._fixed = self._chosen = bool(self.choice)

    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        if self._engine is None:
            keep_freed_memory()
            if not self._chosen:
                return self._pick(algorithm, task, shared, states, work, ctx)
            kept = Candidate(self.choice["engine"], self.choice["threads"], self._threads)
            self._choose(kept, self._made(kept))
        assert self._engine is not None
        return self._engine(algorithm, task, shared, states, work, ctx)

    def restore(self, choice: Mapping[str, Any]) -> None:
        """Keep what an earlier session of the same run picked."""
        self.close()
        self.choice, self._chosen = dict(choice), True

    def keep_contributions(self, storage: Storage) -> None:
        """Keep them so in whatever engine is picked."""
        self.storage = storage
        if self._engine is not None:
            self._engine.keep_contributions(storage)

    def limit_threads(self, threads: int) -> None:
        """Use no more cores than this."""
        self._threads = threads

    def close(self) -> None:
        """End the engine's processes, and the choice with the run that it was made for."""
        _close(self._engine)
        self._engine, self._chosen = None, self._fixed

    def _made(self, candidate: Candidate) -> Engine:
        engine = candidate.make()
        if self.storage is not None:
            engine.keep_contributions(self.storage)
        return engine

    def _choose(self, candidate: Candidate, engine: Engine) -> None:
        torch.set_num_threads(candidate.threads)
        self._engine = engine

    def _pick(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        """Run the round with every candidate; the expected one wins unless a rival is much faster."""
        candidates = expected(algorithm, task, shared, len(work), self._threads)
        runs = [TrialRun(candidate, self._made(candidate)) for candidate in candidates]
        best = runs[0]
        try:
            for run in runs:
                torch.set_num_threads(run.candidate.threads)
                run.outcome, run.seconds = _timed(run.engine, algorithm, task, shared, states, work, ctx)
                best = run if run.seconds * MUCH_FASTER < best.seconds else best
                for other in runs:  # contributions that nobody needs may fill memory or a disk
                    other.outcome = other.outcome if other is best else None
            self._choose(best.candidate, best.engine)
        finally:
            # A process that was forked meanwhile would keep the contributions of the trials before as long as it lives.
            for run in runs:
                if run.engine is not self._engine or run is not runs[0]:
                    _close(run.engine)
        measured = {f"{run.candidate.name} x{run.candidate.threads}": round(run.seconds, 6) for run in runs}
        self.choice = {"engine": best.candidate.name, "threads": best.candidate.threads, "measured_seconds": measured}
        self._chosen = True
        assert best.outcome is not None
        return best.outcome


def expected(algorithm: Algorithm, task: Task, shared: Shared, clients: int, cores: int) -> list[Candidate]:
    """The candidates for a federation, the most promising first."""
    size = tree.nbytes(shared["params"])
    if _device(shared) != "cpu":
        return [Candidate("batched", torch.get_num_threads())]
    threads = cores if size * clients > THREADS_PAY_BYTES else 1
    pair = interpolated_sgd_of(algorithm) is not None
    if is_fusible(algorithm) and not pair and dense_of(task.objective, shared) is not None:
        # On a busy machine threads wait for each other, so one candidate always uses a single thread.
        alone = [Candidate("batched", 1)] if threads > 1 else []
        large = size * min(clients, 10) > CACHE_BYTES and cores > 1 and forks()
        return [Candidate("batched", threads), *alone, *([Candidate("workers", 1, cores)] if large else [])]
    mixes = pair and dense_of(task.objective, shared) is not None
    if mixes and cores > 1 and forks() and fused_interpolated.clients_in_cache(shared["params"]) < clients:
        return [Candidate("workers", 1, cores), Candidate("batched", 1)]
    small = size * clients <= CACHE_BYTES and not _convolutional(shared)
    if cores == 1 or clients == 1:
        # There is little to gain, so nothing is measured. Comparisons give each run one core, so they get the same
        # engine every time.
        return [Candidate("batched" if small and clients > 1 else "loop", threads)]
    rivals = [Candidate("batched", threads), _one_by_one(threads, cores)]
    return rivals if small else rivals[::-1]


def _one_by_one(threads: int, cores: int) -> Candidate:
    """Clients on their own: in processes where those are forks, as others take seconds to start."""
    return Candidate("workers", 1, cores) if forks() else Candidate("loop", threads)


def _convolutional(shared: Shared) -> bool:
    return any(leaf.dim() > 2 for leaf in shared["params"].values())


def _device(shared: Shared) -> str:
    return next((leaf.device.type for leaf in shared["params"].values()), "cpu")


def _timed(engine: Engine, *call: Any) -> tuple[Outcome, float]:
    """The round's outcome and its time. A short round is run twice and the faster time counts, because the first
    includes starting up."""
    begin = time.perf_counter()
    outcome = engine(*call)
    seconds = time.perf_counter() - begin
    if seconds < SECOND_LOOK_SECONDS:
        del outcome
        begin = time.perf_counter()
        outcome = engine(*call)
        seconds = min(seconds, time.perf_counter() - begin)
    return outcome, seconds


def _close(engine: Engine | None) -> None:
    if engine is not None:
        engine.close()
