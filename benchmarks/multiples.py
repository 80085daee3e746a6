"""What other methods cost beside FedAvg: the same clients, the same epochs, one table.

    python -m benchmarks.multiples [--rounds 6] [--repeats 3] [--only ditto,apfl] [--engine auto]

The workload is W2 of ``make bench`` (MLP 784-200-200-10, 10 of 100 clients x 600 examples). The runs alternate; the
first round, which chooses the engine, and the last, which evaluates, are not counted. The counted floor is a multiple
too: how many passes over the examples a method's definition asks for, in units of FedAvg's, where a forward pass is
one and a backward pass two.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

from benchmarks.workloads import LR, WORKLOADS, task_of
from fedalloy import algorithms
from fedalloy.experiment.fit import fit
from fedalloy.tasks.federation import FederatedTask

STEP = 3.0
FLOORS = {
    "fedavg": STEP,
    "aaggff_d": STEP + 1,  # the loss of the received model on all training examples
    "ditto": 2 * STEP,  # the shared model, then the personal one, here for one epoch each
    "apfl": 2 * STEP,  # the shared model, and the mixture of both
    "superfed_mm": STEP,  # one gradient at the mixture serves both models
}
"""Passes over a client's examples and epoch, by method."""
SETTINGS: dict[str, dict[str, Any]] = {"ditto": {"personal_epochs": 1}, "superfed_mm": {"start": 0.0}}


def once(name: str, task: FederatedTask, rounds: int, engine: str) -> list[float]:
    """Seconds of every counted round."""
    load, stamps = WORKLOADS[1], []
    method = getattr(algorithms, name)(lr=LR, batch_size=load.batch, **SETTINGS.get(name, {}))
    with tempfile.TemporaryDirectory() as folder:
        fit(
            method, task, rounds=rounds + 2, cohort=load.clients if method.weighting.needs_everyone else load.cohort,
            folder=f"{folder}/run", evaluate_every=rounds + 2, evaluate_clients=1, checkpoint_every=1e9, engine=engine,
            watcher=lambda _: stamps.append(time.perf_counter()),
        )  # fmt: skip
    return [after - before for before, after in pairwise(stamps[:-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(FLOORS))
    parser.add_argument("--engine", default="auto")
    options = parser.parse_args()
    names = list(dict.fromkeys(["fedavg", *options.only.split(",")]))
    task = task_of(WORKLOADS[1])
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.repeats):
        for name in names:
            seconds[name] += once(name, task, options.rounds, options.engine)
    base = statistics.median(seconds["fedavg"])
    print(f"{'':12} {'ms a round':>11} {'quartiles':>17} {'x FedAvg':>9} {'counted':>8} {'x counted':>10}")
    for name, found in seconds.items():
        low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
        floor = FLOORS[name] / STEP
        spread = f"{1e3 * low:.1f}-{1e3 * high:.1f}"
        multiples = f"{middle / base:9.2f} {floor:8.2f} {middle / base / floor:10.2f}"
        print(f"{name:12} {1e3 * middle:11.1f} {spread:>17} {multiples}")


if __name__ == "__main__":
    main()
