"""The time of a round of SuPerFed-MM: MNIST, 50 clients of two digits, 5 a round, 10 epochs, batch 10, TwoNN.

    PYTHONPATH=src python -m benchmarks.superfed [--rounds 5] [--engine auto] [--turns] [--public JSON] [--json FILE]

One ``fit`` with records in a folder; both models are trained from the first round on. The first round, which picks the
engine, and the last, which evaluates, are not counted. The times are compared with a computed floor: the arithmetic of
one forward and backward pass per step at the rate of a large matrix product, and the bytes of both models, both
velocities and the received model, each read and (but the last) written once per step, at the rate of adding two vectors
of that size in cache; both measured here on one core and divided by the cores. ``--turns`` waits for a line on standard
input before every counted round, so that another program can have its turn in between; ``--public`` takes the seconds a
round of other code, ``{"name": [1.0, 2.0], ...}``, and adds them and the ratios of the medians to the table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fedalloy.algorithms import superfed_mm
from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.experiment.driver import RoundEvent
from fedalloy.experiment.fit import fit
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.federation import FederatedTask

CLIENTS, COHORT, EPOCHS, BATCH = 50, 5, 10, 10
LOCAL: dict[str, Any] = {
    "lr": 0.01, "decay": 0.999, "momentum": 0.9, "weight_decay": 1e-4, "epochs": EPOCHS, "batch_size": BATCH,
}  # fmt: skip
MOVED = 9
"""Models that every step reads or writes: f, l, two velocities in and out, the received model in."""


def federation() -> FederatedTask:
    return make_task("mnist", "twonn", {"kind": "shards", "per_client": 2, "deal": "stride"}, CLIENTS)


class Clock:
    """Called after every round: records its seconds, and waits for its turn if there are others."""

    def __init__(self, turns: bool) -> None:
        self.turns, self.since = turns, 0.0
        self.seconds: list[float] = []

    def __call__(self, event: RoundEvent) -> None:
        now = time.perf_counter()
        if 1 < event.row["round"] < event.rounds:
            self.seconds.append(now - self.since)
            print(json.dumps({"round": event.row["round"], "round_s": self.seconds[-1]}), flush=True)
        if self.turns and event.row["round"] < event.rounds - 1:
            sys.stdin.readline()
        self.since = time.perf_counter()


def rounds(count: int, engine: str, turns: bool) -> tuple[list[float], dict[str, Any]]:
    """Seconds of every counted round, and which engine ran them."""
    clock = Clock(turns)
    algorithm = superfed_mm(mu=0.01, nu=1.0, start=0, **LOCAL)
    with tempfile.TemporaryDirectory() as folder:
        fit(
            algorithm, federation(), rounds=count + 2, cohort=COHORT, folder=f"{folder}/run", engine=engine,
            evaluate_every=count + 2, evaluate_clients=1, checkpoint_every=1e9, watcher=clock,
        )  # fmt: skip
        first = (Path(folder) / "run" / "timings.jsonl").read_text().splitlines()[0]
    return clock.seconds, json.loads(first).get("engine", {"engine": engine})


def floor(cores: int) -> dict[str, float]:
    """A lower bound, in seconds per round."""
    task = federation()
    params, _ = task.objective.init(Key.of(0))
    sizes = task.data("train", torch.arange(COHORT)).size
    steps = int((-(-sizes // BATCH) * EPOCHS).sum())
    weights = [leaf.numel() for leaf in params.values()]
    flops = 2 * BATCH * (3 * sum(weights) - weights[0]) * steps
    moved = MOVED * tree.nbytes(params) * steps
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rate, bandwidth = _product_rate(), _cache_bandwidth(sum(weights))
    torch.set_num_threads(threads)
    arithmetic, memory = flops / rate / cores, moved / bandwidth / cores
    return {
        "steps": steps, "parameters": sum(weights), "gflop": flops / 1e9, "gflop_per_s_per_core": rate / 1e9,
        "gbyte": moved / 1e9, "gbyte_per_s_per_core": bandwidth / 1e9, "arithmetic_s": arithmetic, "memory_s": memory,
        "floor_s": max(arithmetic, memory),
    }  # fmt: skip


def _product_rate() -> float:
    one, other, out = (torch.randn(768, 768) for _ in range(3))
    return 2 * 768**3 / _best(lambda: torch.mm(one, other, out=out))


def _cache_bandwidth(size: int) -> float:
    """Bytes a second of ``a += b`` over as many vectors of a model's size as a step moves."""
    vectors = [torch.randn(size) for _ in range(7)]

    def sweep() -> None:
        for one, other in pairwise(vectors):
            one.add_(other)

    return 3 * 4 * size * (len(vectors) - 1) / _best(sweep)


def _best(work: Callable[[], object], repeats: int = 60) -> float:
    """The fastest of many runs, which is least affected by other processes."""
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def table(ours: list[float], public: dict[str, list[float]], low: dict[str, float]) -> str:
    middle = statistics.median(ours)
    lines = [f"{'':28} {'median s':>9} {'least':>8} {'most':>8} {'rounds':>6} {'x fedalloy':>10}"]
    for name, seconds in {"fedalloy": ours, **public}.items():
        half = statistics.median(seconds)
        spread = f"{min(seconds):8.2f} {max(seconds):8.2f} {len(seconds):6}"
        lines.append(f"{name:28} {half:9.2f} {spread} {half / middle:10.2f}")
    floors = f"arithmetic {low['arithmetic_s']:.2f}, memory {low['memory_s']:.2f}"
    lines.append(
        f"{'counted floor':28} {low['floor_s']:9.2f}   ({floors}; fedalloy takes {middle / low['floor_s']:.1f} x)"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine", default="auto")
    parser.add_argument("--turns", action="store_true", help="wait for a line on standard input before every round")
    parser.add_argument("--public", type=json.loads, default={}, help="seconds a round of other code, by name")
    parser.add_argument("--json", type=Path, help="write everything measured to a file")
    options = parser.parse_args()
    seconds, engine = rounds(options.rounds, options.engine, options.turns)
    low = floor(os.cpu_count() or 1)
    print(f"\n{os.cpu_count()} cores, torch {torch.__version__}, engine {json.dumps(engine)}\n")
    print(table(seconds, options.public, low))
    if options.json:
        found = {"fedalloy_s": seconds, "engine": engine, "public_s": options.public, "floor": low}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
