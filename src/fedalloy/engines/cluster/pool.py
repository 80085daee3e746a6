"""The driver's side of the engine ``ray``: hands out blocks, hears reports, and runs lost blocks again.

Which clients form a block, and how blocks are added, depends on cohort and recipe alone. Who runs a block, and how
often, therefore changes no number.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import ClientError, SpecError
from fedalloy.core.protocols import Shared, Task
from fedalloy.core.types import Context, State, Tree, Weights, Work
from fedalloy.engines.cluster.losses import TRIES, Blame, blame, is_to_blame, may_take, reason
from fedalloy.engines.cluster.orders import BlockOrder, PoolWorker, RoundOrders, WorkerShape
from fedalloy.engines.cluster.packing import pack, pack_task, unpack
from fedalloy.engines.cluster.session import ClusterError, load_ray
from fedalloy.engines.cluster.states import StateFiles
from fedalloy.engines.cluster.worker import (
    BlockWorker,
    Columns,
    Rows,
    Settings,
    add_blocks,
    identity_of,
    joined,
    ranges_of,
)
from fedalloy.engines.shared_cohort import split_columns

log = logging.getLogger("fedalloy")
TRIES_TO_SUM = 5
"""How often workers may die while they are asked for one thing."""
STARTS = 6
"""How many workers may be lost one after another before they begin; two more for every worker that is wanted."""
ADDED_HERE = 1 << 18
"""Numbers up to which the driver itself adds the blocks' sums: for so few, messages between workers cost more."""
START_SECONDS = 180.0
TELL_SECONDS = 20.0  # after which a run that waits for workers says so
MUST_AGREE = ("fedalloy", "torch", "data")


class WorkerPool:
    """The workers of one engine, for one algorithm and task at a time."""

    def __init__(self, shape: WorkerShape, settings: Settings) -> None:
        self.ray = load_ray()
        self.shape, self.settings = shape, settings
        self.members: list[PoolWorker] = []
        self.algorithm: Algorithm | None = None
        self.task: Task | None = None
        self.calls = 0
        self.now: RoundOrders | None = None
        self.lost: list[dict[str, Any]] = []
        self.machines: set[str] = set()
        self._starting: dict[Any, PoolWorker] = {}
        self._running: dict[Any, tuple[PoolWorker, int]] = {}
        self._own_identity: dict[str, str] = {}
        self._task_reference: Any = None
        self._failed_starts, self._why, self._awaited = 0, "", 0

    # ------------------------------------------------------------------------------------------ workers

    def assign(self, algorithm: Algorithm, task: Task) -> None:
        """Give the workers another algorithm or task; starts them the first time."""
        if self.algorithm is algorithm and self.task is task:
            return
        files = StateFiles(Path(self.settings.states)) if self.settings.states else None
        self._own_identity, self.now = identity_of(task, files), None
        self._task_reference = self.ray.put(pack_task(algorithm, task))
        here = [*self.members, *self._starting.values()]
        self.members, self._starting = [], {}
        self.algorithm, self.task = algorithm, task
        for member in here or [self._new() for _ in range(self.shape.count)]:
            self._start(member)
        self._await_first()

    def use_this_machine(self, cores: int) -> None:
        """Refuse workers for which there will never be room; those that share its cores are not waited for."""
        if not self._capacity():
            raise SpecError(f"engine 'ray': no worker fits into this machine; {self._needs()}")
        self._awaited = self.shape.at_once(cores)
        if self.shape.count > self._awaited:
            log.warning("engine 'ray': %s", self.shape.too_many(cores))

    def use_whole_cluster(self) -> None:
        """As many workers as the cluster has room for now."""
        self.shape = replace(self.shape, count=max(1, self._capacity()))

    def stop(self) -> None:
        """End all workers."""
        for member in [*self.members, *self._starting.values()]:
            self._end(member)
        self.members, self._starting, self._running, self.now, self._task_reference = [], {}, {}, None, None
        self.calls += 1  # contributions of earlier rounds are gone

    def _new(self) -> PoolWorker:
        shape = self.shape
        remote = self.ray.remote(num_cpus=shape.cpus, num_gpus=shape.gpus, max_restarts=0)(BlockWorker)
        return PoolWorker(remote.options(scheduling_strategy="SPREAD").remote())

    def _start(self, member: PoolWorker) -> None:
        self._starting[member.actor.prepare.remote([self._task_reference], self.settings)] = member

    def _end(self, member: PoolWorker) -> None:
        self.ray.kill(member.actor, no_restart=True)

    def _await_first(self) -> None:
        """Wait for all workers that the cluster has room for now, at least one; the others may join later."""
        end = time.monotonic() + START_SECONDS
        wanted = max(1, min(self._capacity(), self.shape.count, self._awaited or self.shape.count))
        while self._starting and len(self.members) < wanted and (left := end - time.monotonic()) > 0:
            ready, _ = self.ray.wait(list(self._starting), num_returns=1, timeout=min(left, TELL_SECONDS))
            for reference in ready:
                self._handle_new(reference)
            if not ready:
                told = len(self.members), wanted, end - time.monotonic()
                log.warning("engine 'ray': %d of %d workers have started; %.0f s are left", *told)
        if not self.members:
            raise ClusterError(f"engine 'ray': no worker started within {START_SECONDS:g} s; {self._needs()}")
        if self._starting and not self._awaited:
            log.warning("engine 'ray': %d of %d workers wait; %s", len(self._starting), self.shape.count, self._needs())

    def _capacity(self) -> int:
        there = self.ray.cluster_resources()
        wanted = {"CPU": self.shape.cpus, "GPU": self.shape.gpus}
        return min((int(there.get(name, 0) / each + 1e-9) for name, each in wanted.items() if each), default=1)

    def _needs(self) -> str:
        there = self.ray.cluster_resources()
        return (
            f"{self.shape.count} workers take {self.shape.cpus:g} CPUs and {self.shape.gpus:g} GPUs each, the cluster "
            f"has {there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"
        )

    def _accept(self, member: PoolWorker, told: Mapping[str, str]) -> None:
        """Add a worker; one that has another fedalloy, torch or other data is refused, and one that does not reach the
        clients' states."""
        member.name, member.node = f"process {told['process']} on {told['machine']}", told["node"]
        mine = self._own_identity
        for name in MUST_AGREE:
            if told[name] != mine[name]:
                raise SpecError(
                    f"engine 'ray': the worker in {member.name} has other {name}: {told[name]} there, {mine[name]} "
                    "here; install the same versions and give every machine the same files"
                )
        if told["states"] != mine["states"]:
            raise SpecError(
                f"engine 'ray': the worker in {member.name} does not reach states = '{self.settings.states}': give a "
                "folder on a file system that all machines have mounted at the same place"
            )
        assert self.algorithm is not None
        if self.algorithm.stateful and self.settings.states is None and told["node"] != mine["node"]:
            raise SpecError(
                "engine 'ray': clients of this algorithm keep states, and there are several machines: set states to a "
                "folder that all of them reach"
            )
        self.members.append(member)
        self.machines.add(member.node)

    # ------------------------------------------------------------------------------------------ rounds

    def run_round(self, shared: Shared, orders: Sequence[tuple[Work, dict[int, State], float]], ctx: Context) -> None:
        """Run all blocks; their reports are in ``now``."""
        self.calls += 1
        blocks = [BlockOrder(work, pack(states), size) for work, states, size in orders]
        self.now = RoundOrders(self.calls, self.ray.put(pack(shared)), ctx, blocks)
        self._run_blocks(range(len(blocks)))

    def ask(self, method: str, wanted: Mapping[int, Any], *more: Any) -> dict[int, Any]:
        """The answers of whoever holds the blocks, by block; lost blocks are run again first."""
        found: dict[int, Any] = {}
        left = TRIES_TO_SUM
        while missing := [number for number in wanted if number not in found]:
            if (left := left - 1) < 0:
                raise self._gave_up(f"were asked '{method}'")
            shares = self._by_holder(missing, wanted)
            sent = [(member, getattr(member.actor, method).remote(some, *more)) for member, some in shares]
            for member, reference in sent:
                found |= self._answer(reference, member) or {}
        return {number: found[number] for number in wanted}

    def sum(
        self, part: str, wanted: Mapping[int, tuple[Rows, Weights]], template: Tree, rounded: Mapping[str, torch.dtype]
    ) -> Tree:
        """A part's weighted sum over all blocks: every worker sums its blocks, then each adds one range of columns over
        all blocks; the driver receives one model."""
        found: list[Tree] = []
        for within in ranges_of(template, wanted):
            for _ in range(TRIES_TO_SUM):
                pieces = self._summed(part, wanted, within, rounded)
                if pieces is not None:
                    break
            else:
                raise self._gave_up(f"summed '{part}'")
            found += pieces
        return joined(found, template)

    def _summed(self, part: str, wanted: Mapping[int, Any], within: Columns, rounded: Any) -> list[Tree] | None:
        """The sums of some columns, in pieces; None if a worker died."""
        widths, shares = {name: end - begin for name, (begin, end) in within.items()}, self._by_holder(wanted, wanted)
        alone = sum(widths.values()) * len(wanted) <= ADDED_HERE
        cuts = [one for one in split_columns(widths, 1 if alone else len(shares)) if one]
        sent = [
            (member, member.actor.partials.options(num_returns=len(cuts)).remote(part, some, within, cuts))
            for member, some in shares
        ]
        if alone:
            got = [self._answer(ref, member) for member, ref in sent]
            return None if None in got else [add_blocks([unpack(one) for one in got], rounded)]
        return self._added([(member, refs if len(cuts) > 1 else [refs]) for member, refs in sent], rounded)

    def _added(self, sent: list[tuple[PoolWorker, list[Any]]], rounded: Any) -> list[Tree] | None:
        """The sums of every piece, each added by one worker; None if a worker died."""
        places = range(len(sent[0][1]))
        adders = [self.members[place % len(self.members)] for place in places] if self.members else []
        adding = [
            (one, one.actor.add.remote(rounded, *(refs[at] for _, refs in sent))) for at, one in enumerate(adders)
        ]
        got = [self._answer_or_error(ref) for _, ref in adding]
        if got and not any(isinstance(one, Exception) for one in got):
            return [unpack(one) for one in got]
        # A piece that could not be made fails all calls that read it: its worker is lost, not those that add.
        pieces = [self._answer(refs[0], member) for member, refs in sent]
        if None not in pieces:
            for member, ref in adding:
                self._answer(ref, member)
        return None

    def _answer_or_error(self, reference: Any) -> Any:
        try:
            return self.ray.get(reference)
        except Exception as error:
            return error

    def _gave_up(self, what: str) -> ClusterError:
        return ClusterError(f"engine 'ray': workers died {TRIES_TO_SUM} times while they {what} ({self._why})")

    def put(self, value: Any) -> list[Any]:
        """A reference to a value that all workers read."""
        return [self.ray.put(pack(value))]

    def shared_reference(self) -> list[Any]:
        """What the clients of this round received."""
        assert self.now is not None
        return [self.now.shared]

    def _by_holder(self, numbers: Iterable[int], wanted: Mapping[int, Any]) -> list[tuple[PoolWorker, dict[int, Any]]]:
        assert self.now is not None
        self._run_blocks([number for number in numbers if number not in self.now.holder])
        shares: dict[PoolWorker, dict[int, Any]] = {}
        for number in numbers:
            shares.setdefault(self.now.holder[number], {})[number] = wanted[number]
        return list(shares.items())

    def _answer(self, reference: Any, member: PoolWorker) -> Any:
        """A worker's answer; None if it died."""
        try:
            return self.ray.get(reference)
        except Exception as error:
            found, self._why = self._blame(error, member), reason(error)
            if found is Blame.NOBODY:
                raise
            if found is Blame.WORKER:
                self._replace_dead(member, error, deque())
            return None

    def _run_blocks(self, numbers: Iterable[int]) -> None:
        assert self.now is not None
        blocks = self.now.blocks
        queue = deque(sorted(numbers, key=lambda number: -blocks[number].size))
        while queue or self._running:
            self._hand_out(queue)
            self._handle_next([*self._running, *self._starting], None if self._running else START_SECONDS, queue)
            if not self.members and not self._starting:
                raise ClusterError(f"engine 'ray': all workers died; {self._needs()}")

    def _hand_out(self, queue: deque[int]) -> None:
        """Give blocks to workers that have few: two each while there are many, so that none waits for a message."""
        now = self.now
        assert now is not None
        for depth in (1, 2):
            for member in self.members:
                ahead = depth == 1 or len(queue) > 2 * len(self.members)
                fitting = queue and ahead and len(member.given) < depth
                number = self._next_for(member, queue) if fitting else None
                if number is not None:
                    queue.remove(number)
                    one = now.blocks[number]
                    order = now.call, [now.shared], number, one.work, one.states, now.ctx
                    self._running[member.actor.run.remote(*order)] = member, number
                    member.given.append(number)

    def _next_for(self, member: PoolWorker, queue: deque[int]) -> int | None:
        assert self.now is not None
        nodes, deaths = {one.node for one in self.members}, self.now.deaths
        return next((number for number in queue if may_take(member.node, deaths.get(number, ()), nodes)), None)

    def _handle_next(self, references: list[Any], seconds: float | None, queue: deque[int]) -> None:
        ready, _ = self.ray.wait(references, num_returns=1, timeout=seconds)
        if not ready and not self.members:
            raise ClusterError(f"engine 'ray': no worker is left and none started; {self._needs()}")
        for reference in ready:
            if reference in self._starting:
                self._handle_new(reference)
            elif reference in self._running:
                self._handle_report(reference, queue)

    def _handle_new(self, reference: Any) -> None:
        member = self._starting.pop(reference)
        try:
            told = self.ray.get(reference)
        except Exception as error:
            if self._blame(error, member) is Blame.NOBODY:
                raise self._unusable(error) from error
            self._start_again(member, error)
            return
        self._failed_starts = 0
        self._accept(member, told)

    def _start_again(self, member: PoolWorker, error: Exception) -> None:
        """Start another worker for one that was lost before it began; later and later, because Ray may not yet know of
        a machine that it is lost."""
        self._failed_starts += 1
        self.lost.append({"worker": "one that had not started", "why": reason(error), "blocks": []})
        if self._failed_starts > STARTS + 2 * self.shape.count:
            raise ClusterError(f"engine 'ray': workers die as soon as they start ({reason(error)})") from error
        time.sleep(min(2.0, 0.05 * 2 ** (self._failed_starts - 1)))
        self._end(member)
        self._start(self._new())

    def _blame(self, error: Exception, member: PoolWorker) -> Blame:
        return blame(self.ray, error, lambda: self._reads(member))

    def _reads(self, member: PoolWorker) -> bool:
        """Whether a worker that reported an error still reads the object store of its machine."""
        reference = member.actor.reads.remote(self.put(None))
        try:
            return bool(self.ray.get(reference))
        except Exception:  # of whatever kind: the worker was asked for nothing else
            return False

    def _unusable(self, error: Exception) -> Exception:
        """What is raised if a worker could not begin."""
        text = f"engine 'ray': a worker cannot load the task ({reason(error)}): install the modules that it uses on "
        told = SpecError(f"{text}every machine, and give every machine the same files")
        return told if isinstance(error, self.ray.exceptions.RayTaskError) else error

    def _handle_report(self, reference: Any, queue: deque[int]) -> None:
        member, number = self._running.pop(reference)
        assert self.now is not None
        try:
            report = self.ray.get(reference)
        except Exception as error:  # a worker reports what a block does wrong; any other error is one of its machine
            report = error
        if isinstance(report, ClientError) and self._reads(member):
            raise report
        if isinstance(report, Exception):
            self._replace_dead(member, report, queue)
            self._count_death(number, member.node, report)
            return
        member.given.remove(number)
        self.now.reports[number], self.now.holder[number] = report, member

    def _replace_dead(self, member: PoolWorker, error: BaseException, queue: deque[int]) -> None:
        """A worker died: its blocks, also those it had finished, must run again, and a new one is asked for."""
        if member not in self.members:
            return
        assert self.now is not None
        self.members.remove(member)
        held = [number for number, holder in self.now.holder.items() if holder is member]
        for number in held:
            del self.now.holder[number]
        self._running = {ref: (one, number) for ref, (one, number) in self._running.items() if one is not member}
        again = sorted({*held, *member.given})
        queue.extendleft(reversed(again))
        self.lost.append({"worker": member.name, "why": reason(error), "blocks": again})
        log.warning("engine 'ray': the worker in %s died; %d blocks run again", member.name, len(again))
        self._end(member)
        self._start(self._new())

    def _count_death(self, number: int, node: str, error: BaseException) -> None:
        now = self.now
        assert now is not None
        deaths = now.deaths.setdefault(number, [])
        deaths.append(node)
        if is_to_blame(deaths, self.machines, TRIES):
            clients = now.blocks[number].work.ids.tolist()
            cause = ClusterError(f"its worker died {len(deaths)} times with the clients {clients} ({reason(error)})")
            raise ClientError("worker", cause, client=clients[0], round=now.ctx.round) from None
