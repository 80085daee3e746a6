"""The loop's body in single-threaded processes: the fastest way to train convolutions on a CPU. Plain SGD updates its
model in place. Two models of dense layers, trained at once or one after the other, use the fused kernels.

Processes are forked, so they use the data and the module without a copy; where that is not possible, new ones are
started (:mod:`fedalloy.engines.processes`). Parameters, payloads and client states are passed through shared memory.
A process that dies is replaced and its client is run once more, which gives the same numbers because every draw is
keyed; if it dies again, ``on_crash`` decides.
"""

from __future__ import annotations

import os
import signal
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
from torch import Tensor

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.contributions import Notes
from fedalloy.core.errors import ClientError, FedalloyError, SpecError
from fedalloy.core.gathering import Storage
from fedalloy.core.protocols import Engine, Outcome, Shared, Task
from fedalloy.core.registry import register
from fedalloy.core.screening import unlike
from fedalloy.core.types import Cohort, Context, Contribution, Payload, State, Tree, Work
from fedalloy.engines import processes
from fedalloy.engines.loop import loop_like, planned, run_one
from fedalloy.engines.one_by_one import KernelFor
from fedalloy.engines.out_of_core import shared_with_forks
from fedalloy.engines.profile import phase
from fedalloy.engines.shared_cohort import Columns, SharedCohort, check_current, plain_notes, read_notes, sum_columns
from fedalloy.engines.shared_memory import Layout, shared_rows

WorkerReply = tuple[dict[str, float], tuple[Any, ...]]
"""A client's statistics, and the notes on its payload as ``plain_notes`` returns them."""
TRIES = 2
_PARENT_CHECK_SECONDS = 2.0


class WorkerDied(FedalloyError):
    """A worker process ended without an answer."""


@register("engine", "workers")
@dataclass
class Workers(Engine):
    """``processes`` single-threaded processes (default: one per core). ``on_crash``: after a second crash on the
    same client, ``stop`` the run or ``drop`` that client from the round.
    """

    processes: int | None = None
    on_crash: Literal["stop", "drop"] = "stop"
    _crew: Crew | None = field(default=None, repr=False)
    _threads: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.processes is not None and self.processes < 1:
            raise SpecError(f"engine 'workers': processes must be 1 or more, or none, got {self.processes}")

    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        if not _possible(shared):
            return loop_like(self)(algorithm, task, shared, states, work, ctx)
        try:
            with phase("compute"):
                crew = self._hire(algorithm, task, shared, states, len(work))
                return crew.run_round(shared, states, work, ctx, self.on_crash)
        except BaseException:
            self.close()  # workers may still run clients of this round, and a later round would read their answers
            raise

    def limit_threads(self, threads: int) -> None:
        """Use no more cores than this, unless ``processes`` is set."""
        self._threads = threads

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        if self._crew is not None:
            self._crew.dismiss()
            self._crew = None

    def _hire(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], clients: int
    ) -> Crew:
        """The running crew if it is for this algorithm and task and large enough, otherwise a new one."""
        crew = self._crew
        if crew is None or crew.algorithm is not algorithm or crew.task is not task or crew.slots < clients:
            self.close()
            count = self.processes or self._threads or os.cpu_count() or 1
            one = next(iter(states.values()))
            self._crew = crew = Crew(algorithm, task, shared, one, clients, count, self.storage)
        return crew


@dataclass
class Member:
    """One process and the parent's end of its pipe; ``slot`` is the row of the client it runs, None if it is idle."""

    process: BaseProcess
    pipe: Connection
    slot: int | None = None


class Crew:
    """A fixed number of processes for one algorithm and task, and the memory that they share with the parent."""

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        shared: Shared,
        state: State,
        slots: int,
        processes: int,
        storage: Storage | None = None,
    ) -> None:
        self.algorithm, self.task, self.slots = algorithm, task, slots
        self.kernel = KernelFor.of(algorithm, task.objective, shared)
        templates = algorithm.templates(shared)
        payload = Layout.of(templates)
        self.file = shared_with_forks(storage, slots, templates)
        self.layouts = {"shared": Layout.of(shared), "payload": payload, "state": Layout.of(state)}
        self.shared = shared_rows(1, self.layouts["shared"])
        self.payload = shared_rows(slots, payload) if self.file is None else self.file.rows.bytes
        self.sums = shared_rows(1, self.layouts["payload"])
        self.calls = 0
        self.states = shared_rows(slots, self.layouts["state"])
        # The first gradient imports modules, which takes about a second: do it once, before forking.
        torch.func.grad(torch.sum)(torch.zeros(1))
        self.members = [self._start() for _ in range(min(processes, slots))]
        self._end = weakref.finalize(self, _dismiss, self.members)

    def run_round(
        self, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context, on_crash: str
    ) -> Outcome:
        """One round: clients with the most work first, each given to the next free worker."""
        self.calls += 1
        ids = work.ids.tolist()
        self.layouts["shared"].write(self.shared[0], shared)
        for slot, client in enumerate(ids):
            self.layouts["state"].write(self.states[slot], states[client])
        with phase("data"):
            sizes = self.task.data("train", work.ids).size.cpu() * work.epochs.abs()
        queue = deque(sizes.argsort(descending=True, stable=True).tolist())
        answers: dict[int, Any] = {}
        crashes: dict[int, int] = {}
        while len(answers) < len(ids):
            self._hand_out(queue, work, ctx)
            for member in self._ready():
                self._hear(member, answers, crashes, queue, work, ctx, on_crash)
        return self._gather(ids, answers)

    def dismiss(self) -> None:
        """End all processes."""
        self._end()

    def _start(self) -> Member:
        return Member(*processes.start(_serve, self))

    def __getstate__(self) -> dict[str, Any]:
        """For a new process: everything but the other processes."""
        return {name: value for name, value in vars(self).items() if name not in ("members", "_end")}

    def _hand_out(self, queue: deque[int], work: Work, ctx: Context) -> None:
        for member in list(self.members):
            if member.slot is None and queue:
                slot = queue.popleft()
                # Plain numbers: sending tensors through a pipe would open files and start a thread.
                order = slot, int(work.ids[slot]), int(work.epochs[slot]), bool(work.active[slot]), ctx
                try:
                    member.pipe.send(order)
                except OSError:  # it was killed while it was idle
                    member = self._replace(member)
                    member.pipe.send(order)
                member.slot = slot

    def _ready(self) -> list[Member]:
        ready = wait([member.pipe for member in self.members if member.slot is not None])
        return [member for member in self.members if member.pipe in ready]

    def _hear(
        self,
        member: Member,
        answers: dict[int, Any],
        crashes: dict[int, int],
        queue: deque[int],
        work: Work,
        ctx: Context,
        on_crash: str,
    ) -> None:
        """Receive a member's answer, or replace the member if it died."""
        slot = member.slot
        assert slot is not None
        try:
            answer = member.pipe.recv()
        except (EOFError, OSError):
            self._replace(member)
            crashes[slot] = crashes.get(slot, 0) + 1
            code = member.process.exitcode
            hint = processes.why_died(code)
            reason = WorkerDied(f"its worker process died {crashes[slot]} times (exit code {code}){hint}")
            reason.passing = code in processes.KILLED  # e.g. out of memory
            if crashes[slot] < TRIES:
                queue.appendleft(slot)
            elif on_crash == "drop":
                answers[slot] = str(reason)
            else:
                raise ClientError("worker", reason, client=int(work.ids[slot]), round=ctx.round) from None
            return
        if isinstance(answer, ClientError):
            raise answer
        member.slot, answers[slot] = None, answer

    def _replace(self, member: Member) -> Member:
        member.pipe.close()
        member.process.join()
        place = self.members.index(member)
        self.members[place] = self._start()
        return self.members[place]

    def _gather(self, ids: list[int], answers: dict[int, Any]) -> Outcome:
        """The round's outcome from the shared rows; an answer that is a string is the reason of a client's failure."""
        good = [slot for slot in range(len(ids)) if isinstance(answers[slot], tuple)]
        failures = {ids[slot]: answers[slot] for slot in range(len(ids)) if slot not in good}
        told, notes = [answers[slot][0] for slot in good], [read_notes(answers[slot][1]) for slot in good]
        names = told[0].keys() if good else ()
        stats = {name: torch.tensor([one[name] for one in told], dtype=torch.float64) for name in names}
        states = {}
        if self.algorithm.stateful:
            states = {ids[slot]: self._state(slot, copy=True) for slot in good}
        noted = Notes.join(notes) if good else None
        present = torch.tensor([ids[slot] for slot in good], dtype=torch.int64)
        if not good:
            return Outcome(Cohort(present, {}), states, failures)
        assert noted is not None
        if self.file is not None:
            check = partial(check_current, self, self.calls)
            found = self.file.cohort(present, torch.tensor(good), stats, noted)
            return Outcome(replace(found, check=check), states, failures)
        payload: Payload = {part: {} for part in self.algorithm.parts(self._shared())}
        payload |= _stacked(self.payload, self.layouts["payload"], good)
        if not _in_front(good):  # then ``payload`` is a copy of the rows
            return Outcome(Cohort(present, payload, stats, noted=noted), states, failures)
        cohort = SharedCohort(
            present,
            payload,
            stats,
            None,
            noted,
            owner=self,
            made=self.calls,
            workers=len(self.members),
            original=payload,
        )
        return Outcome(cohort, states, failures)

    def sum_there(self, part: str, weights: list[float], columns: Sequence[Columns]) -> Tree | None:
        """A part's leaves, each process summing its columns; None if the crew is closed or a process died."""
        if not self._end.alive:  # already closed: a worker started now would never be stopped
            return None
        try:
            for member, share in zip(self.members, columns, strict=True):
                member.pipe.send((part, weights, share))
            for member in self.members:
                member.pipe.recv()
        except BaseException as error:
            for member in list(self.members):  # the remaining workers have answers that will not be read
                member.process.terminate()
                self._replace(member)
            if isinstance(error, EOFError | OSError):
                return None
            raise
        leaves: Tree = self.layouts["payload"].read(self.sums[0])[part]
        return {name: leaf.clone() for name, leaf in leaves.items()}

    def _shared(self) -> Shared:
        return self.layouts["shared"].read(self.shared[0])

    def _state(self, slot: int, copy: bool = False) -> State:
        row = self.states[slot].clone() if copy else self.states[slot]
        return self.layouts["state"].read(row)

    def run(self, slot: int, work: Work, ctx: Context) -> WorkerReply | str:
        """In the worker: run one client's program and write its payload and state into its rows. If the payload is not
        what the solver declares, return the reason."""
        shared, state = self._shared(), self._state(slot, copy=True)
        found = self._contribution(shared, state, work, ctx)
        reason = unlike(found.payload, self.algorithm.templates(shared))
        if reason:
            return reason
        self.layouts["payload"].write(self.payload[slot], found.payload)
        self.layouts["state"].write(self.states[slot], found.state)
        lying = self.layouts["payload"].read(self.payload[slot])
        return found.stats, plain_notes(Notes.alone(lying, exact=self.algorithm.exact_norms))

    def _contribution(self, shared: Shared, state: State, work: Work, ctx: Context) -> Contribution:
        data = self.task.data("train", work.ids)
        with torch.no_grad():
            (block,) = planned(self.algorithm, work, data, shared, ctx)
            return run_one(self.algorithm, self.task, shared, state, block, ctx, *self.kernel(data))


def _serve(crew: Crew, pipe: Connection, parents_end: Connection | None) -> None:
    """A worker's main loop: uses one thread, ignores Ctrl-C, ends when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    if parents_end is not None:
        parents_end.close()
    parent = os.getppid()
    with suppress(EOFError, BrokenPipeError):  # the parent closed its end
        while os.getppid() == parent:
            if pipe.poll(_PARENT_CHECK_SECONDS):
                pipe.send(_done(crew, pipe.recv()))


def _done(crew: Crew, order: tuple[Any, ...]) -> WorkerReply | str | ClientError | None:
    """Do what the parent ordered: run a client, or sum some columns of all clients' payloads."""
    if isinstance(order[0], int):
        return _answer(crew, *order)
    part, weights, columns = order
    sum_columns(crew.payload, crew.sums[0], crew.layouts["payload"], part, weights, columns)
    return None


def _answer(
    crew: Crew, slot: int, client: int, epochs: int, active: bool, ctx: Context
) -> WorkerReply | str | ClientError:
    work = Work(torch.tensor([client]), torch.tensor([epochs]), torch.tensor([active]))
    try:
        return crew.run(slot, work, ctx)
    except ClientError as error:
        return portable(error)
    except Exception as error:  # e.g. reading the data, or a state that does not fit: the process continues
        return portable(ClientError("worker", error, client=client, round=ctx.round))


_PORTABLE = (OSError, FileNotFoundError, PermissionError, TimeoutError, MemoryError, EOFError)
"""Errors of Python itself that mean the same in another process."""


def portable(error: ClientError) -> ClientError:
    """The same error with a cause that can be pickled; the original may not be. A full disk stays one: such a run is
    interrupted and has not failed.

    >>> portable(ClientError("worker", OSError(28, "No space left on device"))).cause.errno
    28
    >>> portable(ClientError("worker", RuntimeError("odd shapes"))).cause
    RuntimeError('odd shapes')
    """
    kind = type(error.cause)
    told = str(error.cause) if kind is RuntimeError else f"{kind.__name__}: {error.cause}"
    cause = error.cause if kind in _PORTABLE else RuntimeError(told)
    return ClientError(error.stage, cause, client=error.client, round=error.round)


def _stacked(rows: Tensor, layout: Layout, good: list[int]) -> Payload:
    """Views of the first rows if these are the ones wanted, otherwise a copy of the wanted rows."""
    taken = rows[: len(good)] if _in_front(good) else rows[torch.tensor(good, dtype=torch.int64)]
    payload: Payload = {}
    for slot in layout.slots:
        part, name = slot.path
        leaf = taken[:, slot.begin : slot.begin + slot.size].view(slot.dtype)
        payload.setdefault(part, {})[name] = leaf.reshape(len(good), *slot.shape)
    return payload


def _in_front(slots: list[int]) -> bool:
    """Whether these are the first rows, in order and without gaps."""
    return slots == list(range(len(slots)))


def _possible(shared: Shared) -> bool:
    """Whether all leaves are on the CPU: a forked process cannot use CUDA if its parent has."""
    return all(leaf.device.type == "cpu" for leaves in shared.values() for leaf in leaves.values())


def _dismiss(members: list[Member]) -> None:
    for member in members:
        member.pipe.close()
        member.process.terminate()
    for member in members:
        member.process.join()
