"""Clients on the machines of a Ray cluster, or in processes of this machine: long-lived workers with an inner engine.

The unit of work is a block of clients, fixed by cohort and recipe. Blocks are handed out as workers become free, the
largest first; every block makes its own partial sums, and these are added in the order of blocks. So the numbers of a
run depend neither on how many workers there are nor on which of them was slow or died.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.arguments import build
from fedalloy.core.contributions import Notes
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.protocols import Engine, Outcome, Shared, Task
from fedalloy.core.registry import register
from fedalloy.core.store import Kept
from fedalloy.core.types import Cohort, Context, Contributions, State, Work
from fedalloy.engines.batched import Batched
from fedalloy.engines.cluster.cohort import Places, RayCohort
from fedalloy.engines.cluster.orders import RoundOrders, WorkerShape
from fedalloy.engines.cluster.packing import Packed, unpack
from fedalloy.engines.cluster.pool import WorkerPool
from fedalloy.engines.cluster.session import LOCAL, connect, disconnect
from fedalloy.engines.cluster.states import OwnedStates, StateFiles
from fedalloy.engines.cluster.worker import Settings
from fedalloy.engines.profile import phase

INNER = ("batched", "loop")
BLOCKS = {"loop": 256, "batched": 16}
"""Into how many blocks a cohort is cut at most, unless ``block`` says otherwise: single clients spread better, stacked
ones need company."""


@register("engine", "ray")
@dataclass
class Ray(Engine):
    """Workers on a Ray cluster. ``address``: ``local`` starts Ray on this machine for the run, ``auto`` takes the
    cluster that this machine belongs to, ``host:port`` another one. ``workers`` (default: as many as fit into the
    cluster) take ``cpus_per_worker`` threads and ``gpus_per_worker`` GPUs each; fractions of a GPU are allowed. Each
    runs the ``inner`` engine, ``loop`` or ``batched``, or a table of ``kind`` and its arguments, on blocks of ``block``
    clients. ``states`` is a folder that all machines reach, for the states of clients: needed by algorithms whose
    clients keep one if there are several machines.
    """

    trains_here: ClassVar[bool] = False
    uses_storage: ClassVar[bool] = False  # contributions are in the memory of the workers
    free_options: ClassVar[frozenset[str]] = frozenset({"address", "workers"})
    address: str = LOCAL
    workers: int | None = None
    cpus_per_worker: float = 1
    gpus_per_worker: float = 0
    inner: str | dict[str, Any] = "loop"
    block: int | None = None
    states: str | None = None
    _pool: WorkerPool | None = field(default=None, init=False, repr=False)
    _connected: bool = field(default=False, init=False, repr=False)
    _threads: int | None = field(default=None, init=False, repr=False)
    _owned: OwnedStates | None = field(default=None, init=False, repr=False)
    _sizes: dict[int, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        kind, options = self._inner()
        if kind not in INNER:
            raise SpecError(f"engine 'ray': inner = '{kind}' is not possible: {nearest(kind, INNER)}")
        build(Batched, options, "engine 'ray': inner") if kind == "batched" else _no_options(options)
        for name in ("workers", "block"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise SpecError(f"engine 'ray': {name} must be 1 or more, or none, got {count}")
        if not self.cpus_per_worker > 0 or self.gpus_per_worker < 0:
            raise SpecError(
                "engine 'ray': cpus_per_worker must be above 0 and gpus_per_worker 0 or more, got "
                f"{self.cpus_per_worker} and {self.gpus_per_worker}"
            )
        if self.gpus_per_worker > 1 and self.gpus_per_worker != int(self.gpus_per_worker):
            raise SpecError(f"engine 'ray': gpus_per_worker above 1 must be whole, got {self.gpus_per_worker}")
        if self.states == "":
            raise SpecError("engine 'ray': states is empty: name a folder that all machines reach, or leave it out")
        self.clients_keep_states = self.states is not None

    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        _check_device(shared)
        try:
            with phase("compute"):
                pool = self._workers_for(algorithm, task)
                pool.run_round(shared, self._orders(task, states, work), ctx)
                assert pool.now is not None
                return self._outcome(algorithm, shared, pool, pool.now)
        except BaseException:
            self.close()  # workers may still run blocks of this round
            raise

    def cross_score(self, algorithm: Algorithm, task: Task, shared: Shared, cohort: Contributions) -> Tensor:
        """Measured by the workers that have the models."""
        if isinstance(cohort, RayCohort) and isinstance(cohort.owner, WorkerPool) and not cohort.replaced:
            return cohort.scored(cohort.owner, cohort.ids, algorithm.update)
        return super().cross_score(algorithm, task, shared, cohort)

    def incidents(self) -> dict[str, Any]:
        """The workers that died, and which blocks ran again."""
        if self._pool is None or not self._pool.lost:
            return {}
        told, self._pool.lost = self._pool.lost, []
        return {"lost_workers": told}

    def check_place(self) -> None:
        """Refuse a folder of states that cannot be written."""
        if self.states is not None:
            self._states_of_run().check_place()

    def claim_states(self, run: str) -> None:
        """Take the folder for the states of this run."""
        self._states_of_run().claim(run)

    def check_states(self, kept: Kept) -> None:
        """Refuse a checkpoint whose states are not in the folder."""
        super().check_states(kept)
        if self.states is not None:
            self._states_of_run().check(kept)

    def read_states(self, markers: Mapping[int, State]) -> dict[int, State]:
        """From the folder of states."""
        return self._states_of_run().read(markers)

    def checkpointed(self, round: int, markers: Mapping[int, State]) -> None:
        """Remove the states that no checkpoint names."""
        self._states_of_run().checkpointed(round, markers)

    def limit_threads(self, threads: int) -> None:
        """Use no more cores of this machine than this, unless ``workers`` is set."""
        self._threads = threads

    def close(self) -> None:
        """End the workers and, if this engine started it, Ray; the next call starts new ones."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.stop()
        if self._connected:
            self._connected = False
            disconnect()

    def _inner(self) -> tuple[str, dict[str, Any]]:
        if isinstance(self.inner, str):
            return self.inner, {}
        options = dict(self.inner)
        return str(options.pop("kind", "loop")), options

    def _workers_for(self, algorithm: Algorithm, task: Task) -> WorkerPool:
        """The workers, with this algorithm and task."""
        if self._pool is None:
            count = self.workers or (self._local_workers() if self.address == LOCAL else None)
            cores = None if count is None else math.ceil(count * self.cpus_per_worker)  # Ray counts whole cores
            self._connected = connect(self.address, cores)
            shape = WorkerShape(count or 1, self.cpus_per_worker, self.gpus_per_worker)
            self._pool = WorkerPool(shape, self._settings())
            if self.address == LOCAL:
                self._pool.use_this_machine(self._cores())
            if self.workers is None:
                self._pool.use_whole_cluster()
        if self.states is not None and not self._states_of_run().claimed:
            self.claim_states(f"a run in memory of process {os.getpid()}")
        self._pool.assign(algorithm, task)
        return self._pool

    def _local_workers(self) -> int:
        return WorkerShape(1, self.cpus_per_worker, 0).at_once(self._cores())

    def _cores(self) -> int:
        return self._threads or os.cpu_count() or 1

    def _settings(self) -> Settings:
        kind, options = self._inner()
        threads, device = max(1, int(self.cpus_per_worker)), "cuda" if self.gpus_per_worker else "cpu"
        folder = str(Path(self.states).resolve()) if self.states else None
        places = tuple(str(Path(place).resolve()) for place in sys.path)
        return Settings(kind, options, threads, device, folder, places)

    def _states_of_run(self) -> OwnedStates:
        if self._owned is None:
            assert self.states is not None
            self._owned = OwnedStates(StateFiles(Path(self.states).resolve()))
        return self._owned

    def _orders(
        self, task: Task, states: Mapping[int, State], work: Work
    ) -> list[tuple[Work, dict[int, State], float]]:
        """The blocks of a cohort in the order of ids, each with its states and the amount of its work."""
        order = work.ids.argsort() if not work.ascending else torch.arange(len(work))
        each = self.block or math.ceil(len(work) / BLOCKS[self._inner()[0]])
        parts = [work.rows(rows) for rows in order.split(each)]
        return [(part, {one: states[one] for one in part.clients}, self._size(task, part)) for part in parts]

    def _size(self, task: Task, work: Work) -> float:
        """The examples that a block trains on; for data that are read elsewhere, as reported before."""
        epochs = torch.where(work.epochs < 0, 1, work.epochs).double()
        if task.pools:
            return float((task.data("train", work.ids).size.cpu() * epochs).sum())
        known = torch.tensor([self._sizes.get(client, 0.0) for client in work.clients], dtype=torch.float64)
        return float((known * epochs).sum())

    def _outcome(self, algorithm: Algorithm, shared: Shared, pool: WorkerPool, now: RoundOrders) -> Outcome:
        reports = [now.reports[number] for number in range(len(now.blocks))]
        failures = {client: why for one in reports for client, why in one.failures.items()}
        states: dict[int, State] = {}
        for one in reports:
            states |= unpack(one.states) if isinstance(one.states, Packed) else one.states
        if self.states is not None and algorithm.stateful:
            self._states_of_run().wrote(states)
        came = [(number, one) for number, one in enumerate(reports) if len(one.ids)]
        if not came:
            return Outcome(Cohort(torch.zeros(0, dtype=torch.int64), {}), states, failures)
        ids = torch.cat([one.ids for _, one in came])
        stats = {name: torch.cat([one.stats[name] for _, one in came]) for name in came[0][1].stats}
        self._sizes.update(zip(ids.tolist(), stats["num_examples"].tolist(), strict=True))
        templates = {part: _formed(leaves) for part, leaves in algorithm.templates(shared).items()}
        places = Places(
            {client: number for number, one in came for client in one.ids.tolist()},
            {client: row for _, one in came for row, client in enumerate(one.ids.tolist())},
            {number: len(one.ids) for number, one in came},
        )
        noted = Notes.join([one.notes for _, one in came if one.notes is not None])
        names = {part: part for part in templates}
        return Outcome(RayCohort(ids, stats, noted, pool, now.call, places, templates, names), states, failures)


def _formed(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names, shapes and dtypes without values."""
    return {name: leaf.new_empty(()).expand(leaf.shape) for name, leaf in leaves.items()}


def _no_options(options: Mapping[str, Any]) -> None:
    if options:
        raise SpecError(f"engine 'ray': inner 'loop' has no arguments, got {', '.join(sorted(options))}")


def _check_device(shared: Shared) -> None:
    device = next((leaf.device.type for leaves in shared.values() for leaf in leaves.values()), "cpu")
    if device != "cpu":
        raise SpecError(
            f"engine 'ray': the driver's models stay on the CPU, but engine.device is '{device}': leave it out and set "
            "gpus_per_worker, which puts the workers on GPUs"
        )
