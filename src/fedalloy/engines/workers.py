"""The loop's body in single-threaded processes: the fastest way to train convolutions on a CPU. Plain descent moves
its model in place; a federated and a local model trained at once use the fused kernel, which takes few clients anyhow.

Processes are forked, so they see the data and the model without a copy; models, payloads and client states are passed
through shared memory. A process that dies is replaced and its client is run once more, which gives the same numbers
because every draw is keyed; if it dies again, ``on_crash`` decides.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Any, Literal

import torch
from torch import Tensor

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.applying import Applied, plain, vmapped
from fedalloy.core.contributions import Notes
from fedalloy.core.errors import ClientError, FedalloyError, SpecError
from fedalloy.core.program import Kernel
from fedalloy.core.protocols import Engine, Outcome, Shared, Task
from fedalloy.core.registry import register
from fedalloy.core.screening import unlike
from fedalloy.core.types import Block, Cohort, Context, Contribution, Payload, State, Tree, Work
from fedalloy.engines import fused_interpolated, inplace_sgd
from fedalloy.engines.batched import dense_of
from fedalloy.engines.kinds import interpolated_sgd_of, plain_sgd_of
from fedalloy.engines.loop import Loop, planned, run_one
from fedalloy.engines.profile import phase
from fedalloy.engines.shared_cohort import Columns, SharedCohort, plain_notes, read_notes, sum_columns
from fedalloy.engines.shared_memory import Layout, shared_rows

WorkerReply = tuple[dict[str, float], tuple[Any, ...]]
"""A client's statistics, and what was noted of what it sends."""
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

    def __post_init__(self) -> None:
        if self.processes is not None and self.processes < 1:
            raise SpecError(f"engine 'workers': processes must be 1 or more, or none, got {self.processes}")

    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        if not _possible(shared):
            return Loop()(algorithm, task, shared, states, work, ctx)
        try:
            with phase("compute"):
                crew = self._hire(algorithm, task, shared, states, len(work))
                return crew.run_round(shared, states, work, ctx, self.on_crash)
        except BaseException:
            self.close()  # some still work on this round: their answers could not be told from later ones
            raise

    def limit_threads(self, threads: int) -> None:
        """Use no more cores than this, unless a number of processes was given."""
        self.processes = self.processes or threads

    def close(self) -> None:
        """End the processes; the next call starts new ones."""
        if self._crew is not None:
            self._crew.dismiss()
            self._crew = None

    def _hire(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], clients: int
    ) -> Crew:
        """The running crew if it fits this federation, otherwise a new one."""
        crew = self._crew
        if crew is None or crew.algorithm is not algorithm or crew.task is not task or crew.slots < clients:
            self.close()
            count = self.processes or os.cpu_count() or 1
            self._crew = crew = Crew(algorithm, task, shared, next(iter(states.values())), clients, count)
        return crew


@dataclass
class Member:
    """One process and our end of its pipe; ``slot`` is the client it is working on."""

    process: ForkProcess
    pipe: Connection
    slot: int | None = None


class Crew:
    """A fixed number of processes for one algorithm and task, and the memory they share with us."""

    def __init__(
        self, algorithm: Algorithm, task: Task, shared: Shared, state: State, slots: int, processes: int
    ) -> None:
        self.algorithm, self.task, self.slots = algorithm, task, slots
        mixes = interpolated_sgd_of(algorithm) is not None and not shared["buffers"]
        self.layers = dense_of(task.objective, shared) if mixes else None
        payload = Layout.of(algorithm.templates(shared))
        self.layouts = {"shared": Layout.of(shared), "payload": payload, "state": Layout.of(state)}
        self.shared = shared_rows(1, self.layouts["shared"])
        self.payload = shared_rows(slots, self.layouts["payload"])
        self.sums = shared_rows(1, self.layouts["payload"])
        self.calls = 0
        self.states = shared_rows(slots, self.layouts["state"])
        # What the first gradient imports (a second's worth) is imported once, before the processes part.
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
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(self, theirs, ours), daemon=True)
        with warnings.catch_warnings():
            # Forking beside a progress display's thread is safe here: the child touches nothing of it.
            warnings.simplefilter("ignore", DeprecationWarning)
            process.start()
        theirs.close()
        return Member(process, ours)

    def _hand_out(self, queue: deque[int], work: Work, ctx: Context) -> None:
        for member in list(self.members):
            if member.slot is None and queue:
                slot = queue.popleft()
                # Plain numbers: tensors in a pipe would open files and start a thread to pass them.
                order = slot, int(work.ids[slot]), int(work.epochs[slot]), bool(work.active[slot]), ctx
                try:
                    member.pipe.send(order)
                except OSError:  # it was killed while it had nothing to do
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
        """Take a member's answer, or replace it when it died."""
        slot = member.slot
        assert slot is not None
        try:
            answer = member.pipe.recv()
        except (EOFError, OSError):
            self._replace(member)
            crashes[slot] = crashes.get(slot, 0) + 1
            reason = WorkerDied(f"its worker process died {crashes[slot]} times (exit code {member.process.exitcode})")
            reason.passing = member.process.exitcode in (-signal.SIGKILL, -signal.SIGTERM)  # as where memory ends
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
        """The cohort from the shared rows; a text instead of statistics says why a client does not count."""
        good = [slot for slot in range(len(ids)) if isinstance(answers[slot], tuple)]
        failures = {ids[slot]: answers[slot] for slot in range(len(ids)) if slot not in good}
        payload: Payload = {part: {} for part in self.algorithm.parts(self._shared())}
        payload |= _stacked(self.payload, self.layouts["payload"], good)
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
        if not _in_front(good):  # then the rows were copied
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
        """A part's leaves summed by the processes, each its own columns; None when one of them is gone."""
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
        """In the worker: one client's program, its results put into its rows."""
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

    def kernel(self, data: Block) -> tuple[Kernel | None, Applied]:
        """What takes the local steps, and on trees of which form: in place where they are plain descent, fused where
        they are that on two models; None: the plain kernel."""
        if self.layers is not None and isinstance(data.x, Tensor):
            return partial(fused_interpolated.train, self.layers), vmapped
        return inplace_sgd.train if plain_sgd_of(self.algorithm) is not None else None, plain


def _serve(crew: Crew, pipe: Connection, parents_end: Connection) -> None:
    """A worker's main loop: one thread, ignores terminal signals, ends when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    parents_end.close()
    parent = os.getppid()
    with suppress(EOFError, BrokenPipeError):  # the parent closed its end
        while os.getppid() == parent:
            if pipe.poll(_PARENT_CHECK_SECONDS):
                pipe.send(_done(crew, pipe.recv()))


def _done(crew: Crew, order: tuple[Any, ...]) -> WorkerReply | str | ClientError | None:
    """A worker's job: run a client, or sum some columns of what all clients sent."""
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
        return _portable(error)
    except Exception as error:  # the data, or a state that does not fit: not the end of this process
        return _portable(ClientError("worker", error, client=client, round=ctx.round))


def _portable(error: ClientError) -> ClientError:
    """The same error with a cause that can be pickled, whatever the original was."""
    cause = RuntimeError(f"{type(error.cause).__name__}: {error.cause}")
    return ClientError(error.stage, cause, client=error.client, round=error.round)


def _stacked(rows: Tensor, layout: Layout, good: list[int]) -> Payload:
    """Views of the shared rows; if some clients are missing, one copy of the other rows."""
    taken = rows[: len(good)] if _in_front(good) else rows[torch.tensor(good, dtype=torch.int64)]
    payload: Payload = {}
    for slot in layout.slots:
        part, name = slot.path
        leaf = taken[:, slot.begin : slot.begin + slot.size].view(slot.dtype)
        payload.setdefault(part, {})[name] = leaf.reshape(len(good), *slot.shape)
    return payload


def _in_front(slots: list[int]) -> bool:
    """Whether these are the first rows, none missing."""
    return slots == list(range(len(slots)))


def _possible(shared: Shared) -> bool:
    """Forked processes cannot use a GPU that the parent has touched."""
    on_cpu = all(leaf.device.type == "cpu" for leaves in shared.values() for leaf in leaves.values())
    return on_cpu and "fork" in multiprocessing.get_all_start_methods()


def _dismiss(members: list[Member]) -> None:
    for member in members:
        member.pipe.close()
        member.process.terminate()
    for member in members:
        member.process.join()
