"""Time and memory of aggregating 50 updates of 11.2 M float32 parameters, by every registered weighting.

    python benchmarks/aggregation.py [--clients 50] [--parameters 11200000] [--repeat 3] [--only samples ewwa]

The rule's second round is measured, so that rules with state have one. `seconds` is the time to weigh and combine,
`server step` adds the screening of every contribution and the step of the model, and `notes` is the engine's earlier
work: the norms of every contribution, computed as they are made (here all at once, from memory). Each alternates with
`torch.sum` over the stacked updates; times are medians, and `x sum` is the median of the ratios.
`extra MB` is the peak memory beyond the updates and the state of the previous round, without mapped files; `mapped MB`
is the size of those. A new state in memory counts as extra. Exits with 1 when the server's step by samples takes more
than 1.5 x `torch.sum`, any rule more than 3 GB extra, or a rule could not be measured.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm, server_step
from fedalloy.core.contributions import Notes
from fedalloy.core.elements import combine_elements
from fedalloy.core.keys import Key
from fedalloy.core.protocols import ElementWeighting, Weighting
from fedalloy.core.types import Cohort, Context, State, Tree
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.testing import specimen

LAYERS = 20
MOST_TIMES_SUM = 1.5
MOST_EXTRA_MB = 3000.0
MEGABYTE = 1e6


@dataclass
class Memory:
    """The peak memory of this process while watched, beyond what it held before."""

    start: tuple[float, float] = (0.0, 0.0)
    peak: list[float] = field(default_factory=lambda: [0.0, 0.0])

    @contextmanager
    def watched(self, every: float = 0.005) -> Iterator[None]:
        """Sample the memory of the process from a second thread."""
        give_back()
        self.start, stop = resident(), threading.Event()

        def look() -> None:
            while not stop.wait(every):
                self._note()

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self._note()

    def _note(self) -> None:
        for kind, (now, before) in enumerate(zip(resident(), self.start, strict=True)):
            self.peak[kind] = max(self.peak[kind], now - before)


def give_back() -> None:
    """Return freed memory to the system, so that later allocations are visible."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident() -> tuple[float, float]:
    """Megabytes of the process's own memory, and of files mapped into it."""
    kinds = {"RssAnon": 0, "RssFile": 1, "RssShmem": 1}
    found = [0.0, 0.0]
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in kinds:
            found[kinds[name]] += int(value.split()[0]) * 1024 / MEGABYTE
    return found[0], found[1]


def updates(clients: int, parameters: int) -> tuple[Tensor, Tree]:
    """One row of normal numbers per client, and the layers of a model as views of it."""
    matrix = torch.empty(clients, parameters)
    for client, row in enumerate(matrix):
        row.normal_(generator=Key.of(client).generator())
    width = -(-parameters // LAYERS)
    leaves = {f"layer{i}.weight": part for i, part in enumerate(matrix.split(width, dim=1))}
    return matrix, leaves


def statistics(rule: Weighting, clients: int) -> dict[str, Tensor]:
    """Random statistics: counts are whole numbers, everything else is in (0.1, 0.9)."""
    drawn = {name: 0.1 + 0.8 * Key.of(1).fold(name).uniform(clients, dtype=torch.float64) for name in rule.requires}
    counts = {"num_examples", "num_steps", "step_norm", "effective_steps"}
    return {name: (100 * values).ceil() if name in counts else values for name, values in drawn.items()}


def cohort_for(rule: Weighting, leaves: Tree) -> Cohort:
    """The updates with everything else that the rule needs."""
    clients = len(next(iter(leaves.values())))
    cross = Key.of(2).uniform(clients, clients, dtype=torch.float64) if "cross_score" in rule.requires else None
    return Cohort(torch.arange(clients), {"delta": leaves}, statistics(rule, clients), cross)


def combine(rule: Weighting, cohort: Cohort, state: State, ctx: Context) -> tuple[Tree, State]:
    """Only the server's work for a rule."""
    if isinstance(rule, ElementWeighting):
        round = rule.open(cohort, state, ctx)
        _, combined = combine_elements(round, cohort, "delta", ("delta",))
        return combined["delta"], round.close()[0]
    weights, new, _ = rule.weigh(cohort, state, ctx)
    return cohort.combine("delta", weights), new


def timed(work: Callable[[], Any]) -> float:
    """The seconds of one run; its result is dropped."""
    begin = time.perf_counter()
    result = work()
    seconds = time.perf_counter() - begin
    del result
    return seconds


def in_turn(works: list[Callable[[], Any]], repeat: int, least_seconds: float = 3.0) -> list[list[float]]:
    """The times of each, run alternately, so that all have the same load on the machine."""
    found: list[list[float]] = [[] for _ in works]
    begin = time.perf_counter()
    while (done := len(found[0])) < repeat or (done < 10 * repeat and time.perf_counter() - begin < least_seconds):
        for times, work in zip(found, works, strict=True):
            times.append(timed(work))
    return found


@dataclass(frozen=True)
class Line:
    """One rule in the table."""

    name: str
    yardstick: list[float]
    seconds: list[float]
    server: list[float]
    notes: list[float]
    extra: float
    mapped: float

    def ratio(self, times: list[float]) -> float:
        """The median ratio of these times to those of ``torch.sum`` just before."""
        return median(mine / sum for mine, sum in zip(times, self.yardstick, strict=True))

    def __str__(self) -> str:
        times = (f"{median(one):.3f} | {self.ratio(one):.2f}" for one in (self.seconds, self.server, self.notes))
        return f"| {self.name} | {' | '.join(times)} | {self.extra:.0f} | {self.mapped:.0f} |"


def measure(name: str, rule: Weighting, matrix: Tensor, leaves: Tree, repeat: int) -> Line:
    """The rule's second round: memory watched once, then timed alternately with ``torch.sum`` and the whole server
    step."""
    cohort = cohort_for(rule, leaves)
    first, second = (Context(round, len(cohort), Key.of(3).fold(round), local_lr=0.1) for round in (1, 2))
    algorithm, memory = Algorithm(Sgd(), rule, ServerSgd()), Memory()
    state = combine(rule, cohort, rule.init(len(cohort)), first)[1]
    with memory.watched():
        timed(lambda: combine(rule, cohort, state, second))
    params = {leaf: torch.zeros(value.shape[1:]) for leaf, value in leaves.items()}
    started = {**algorithm.init(params, len(cohort)), "weighting": state}
    works: list[Callable[[], Any]] = [
        lambda: matrix.sum(0),
        lambda: combine(rule, cohort, state, second),
        lambda: server_step(algorithm, started, cohort, second),
        lambda: Notes.of({"delta": leaves}, exact="norms" in algorithm.asks),
    ]
    yardstick, seconds, server, notes = in_turn(works, repeat)
    return Line(name, yardstick, seconds, server, notes, *memory.peak)


def broken_promises(line: Line) -> list[str]:
    """The limits that a line of the table exceeds."""
    times = line.ratio(line.server)
    slow = line.name == "samples" and times > MOST_TIMES_SUM
    late = [f"the server's step by samples takes {times:.2f} x torch.sum, more than {MOST_TIMES_SUM}"] if slow else []
    large = line.extra > MOST_EXTRA_MB
    return late + ([f"{line.name} needs {line.extra:.0f} MB, more than {MOST_EXTRA_MB:.0f}"] if large else [])


def arguments() -> argparse.Namespace:
    """The command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--parameters", type=int, default=11_200_000)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="weightings to measure; default: all")
    return parser.parse_args()


def main() -> int:
    """Print the table line by line; returns 1 if a limit is exceeded."""
    chosen = arguments()
    matrix, leaves = updates(chosen.clients, chosen.parameters)
    size = f"{matrix.nbytes / MEGABYTE:,.0f} MB"
    machine = f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    print(f"{chosen.clients} updates of {chosen.parameters:,} float32 parameters ({size}), {machine}\n")
    print(
        "| weighting | seconds | x sum | server step | x sum | notes | x sum | extra MB | mapped MB |\n"
        + "|---" * 9
        + "|"
    )
    (yardstick,) = in_turn([lambda: matrix.sum(0)], chosen.repeat)
    held = 4 * chosen.parameters / MEGABYTE
    print(f"| `torch.sum` over clients | {median(yardstick):.3f} | 1 | | | | | {held:.0f} | 0 |", flush=True)
    broken = []
    for name in chosen.only or registry.names("weighting"):
        try:
            line = measure(name, specimen("weighting", name), matrix, leaves, chosen.repeat)
        except Exception as error:
            print(f"| {name} | skipped: {type(error).__name__}: {error} | | | | | | | |", flush=True)
            broken.append(f"{name} was skipped")
            continue
        print(line, flush=True)
        broken += broken_promises(line)
    print("\n" + ("; ".join(broken) or "All limits are kept."))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
