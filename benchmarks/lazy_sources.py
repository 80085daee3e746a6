"""Memory of data that are read on demand: a million clients, and a stream of a million rows of a kilobyte.

    python -m benchmarks.lazy_sources [--clients N] [--rows N]

Each source runs in a process of its own: three rounds of 100 clients, 1,000 clients evaluated. Printed are the peak of
the process's memory above its start (after imports), the seconds, and the bytes in temporary files.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

FEATURES = 256
"""Floats of a row: a kilobyte."""
MEGABYTE = 1e6


class Rows(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Rows of a kilobyte, drawn while they are read."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[Any, int]]:
        rng = np.random.default_rng(0)
        for begin in range(0, self.rows, 1000):
            x = rng.standard_normal((min(1000, self.rows - begin), FEATURES), dtype=np.float32)
            yield from ((row, int(row[0] > 0)) for row in x)


def client(number: int) -> tuple[Any, Any]:
    """Twenty rows of a client, drawn from its number."""
    x = np.random.default_rng(number).standard_normal((20, FEATURES), dtype=np.float32)
    return x, (x[:, 0] > 0).astype(np.int64)


def clients(number: int) -> Any:
    import fedalloy

    return fedalloy.task(client, "logistic", clients=number, classes=2)


def stream(rows: int) -> Any:
    import fedalloy

    return fedalloy.task(Rows(rows), "logistic", ids=np.arange(rows) // 20, lazy=True)


def peak() -> float:
    """Megabytes of the largest resident set so far; the kernel counts it, so nothing between two looks is missed."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / MEGABYTE


def measure(make: Callable[[int], Any], size: int, answer: Any) -> None:
    """In its own process: the run's peak of memory above the start."""
    import fedalloy

    small = [(torch.rand(20, FEATURES), torch.arange(20) % 2) for _ in range(4)]
    settings: dict[str, Any] = {"rounds": 3, "engine": "batched"}
    fedalloy.fit("fedavg", fedalloy.task(small, "logistic"), **settings)  # loads everything that a run loads
    resting, begin = peak(), time.perf_counter()
    task = make(size)
    made = time.perf_counter() - begin
    result = fedalloy.fit("fedavg", task, cohort=100, evaluate_clients=1000, **settings)
    evaluated = [len(row["ids"]) for row in result.clients()]
    answer.send({
        "population": task.population, "above_start_mb": round(peak() - resting, 1), "making_s": round(made, 1),
        "all_s": round(time.perf_counter() - begin, 1), "evaluated": evaluated, "status": result.status,
    })  # fmt: skip


def run(make: Callable[[int], Any], size: int) -> dict[str, Any]:
    """Measure in a new process, whose peak is its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(make, size, there))
    process.start()
    there.close()
    found: dict[str, Any] = here.recv()
    process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=1_000_000)
    given = parser.parse_args()
    for name, make, size in (("clients", clients, given.clients), ("stream", stream, given.rows)):
        print(name, json.dumps(run(make, size)))


if __name__ == "__main__":
    main()
