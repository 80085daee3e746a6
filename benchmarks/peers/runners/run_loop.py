"""The hand-written loop of :mod:`benchmarks.workloads`."""

from __future__ import annotations

import sys

import torch

from benchmarks.peers.runners.run_fedalloy import task_and_initial
from benchmarks.peers.runners.turns import Load, Turns
from benchmarks.workloads import Sequential


def main() -> None:
    load = Load.read(sys.argv[1])
    turns = Turns(load, "torch", torch.set_num_threads)
    workload, task, initial = task_and_initial(load)
    loop = Sequential(workload, task, initial)
    turns.begin()
    while True:
        loop.round()
        turns.round_done(lambda: dict(zip(initial, loop.server, strict=True)))


if __name__ == "__main__":
    main()
