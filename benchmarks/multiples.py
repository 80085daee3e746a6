"""What other methods cost beside FedAvg: the same clients, the same epochs, one table.

    python -m benchmarks.multiples [--rounds 3] [--repeats 5] [--only ditto,apfl] [--engine batched]

The workload is W2 of ``make bench`` (MLP 784-200-200-10, 10 of 100 clients x 600 examples). Times are processor time on
one thread, so that other processes on the machine count little; the runs are short and alternate, each repeat begins
with another method, and a multiple is the median over repeats of the ratio to FedAvg in the same repeat. The first
round, which fills caches, and the last, which evaluates, are not counted. The counted floor is a multiple too: how many
passes over the examples a method's definition asks for, in units of FedAvg's, where a forward pass is one and a
backward pass two. Engines with processes of their own cannot be measured in this way.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import pairwise
from typing import Any

import torch

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


def once(name: str, task: FederatedTask, rounds: int, engine: str) -> float:
    """Seconds of processor time a round."""
    load, stamps = WORKLOADS[1], []
    method = getattr(algorithms, name)(lr=LR, batch_size=load.batch, **SETTINGS.get(name, {}))
    with tempfile.TemporaryDirectory() as folder:
        fit(
            method, task, rounds=rounds + 2, cohort=load.clients if method.weighting.needs_everyone else load.cohort,
            folder=f"{folder}/run", evaluate_every=rounds + 2, evaluate_clients=1, checkpoint_every=1e9, engine=engine,
            watcher=lambda _: stamps.append(time.process_time()),
        )  # fmt: skip
    return statistics.median(after - before for before, after in pairwise(stamps[:-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", default=",".join(FLOORS))
    parser.add_argument("--engine", choices=["batched", "loop"], default="batched")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = list(dict.fromkeys(["fedavg", *options.only.split(",")]))
    task = task_of(WORKLOADS[1])
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for repeat in range(options.repeats):
        place = repeat % len(names)
        for name in names[place:] + names[:place]:
            seconds[name].append(once(name, task, options.rounds, options.engine))
    print(f"{'':12} {'ms a round':>11} {'x FedAvg':>9} {'quartiles':>11} {'counted':>8} {'x counted':>10}")
    for name, found in seconds.items():
        ratios = [own / base for own, base in zip(found, seconds["fedavg"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        floor, spread = FLOORS[name] / STEP, f"{low:.2f}-{high:.2f}"
        multiples = f"{middle:9.2f} {spread:>11} {floor:8.2f} {middle / floor:10.2f}"
        print(f"{name:12} {1e3 * statistics.median(found):11.1f} {multiples}")


if __name__ == "__main__":
    main()
