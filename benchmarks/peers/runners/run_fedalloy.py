"""The public ``fedalloy.fit``: engine ``auto``, FedAvg, records in a folder, evaluation off."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from typing import Any

import torch

import fedalloy
from benchmarks.peers.runners.turns import Load, Turns, moved
from benchmarks.workloads import WORKLOADS, Workload, task_from
from fedalloy.core.types import Tree
from fedalloy.tasks.federation import FederatedTask

FOREVER = 10**6


def task_and_initial(load: Load) -> tuple[Workload, FederatedTask, Tree]:
    """The workload as a task, and its initial model."""
    workload = next(one for one in WORKLOADS if one.name == load.name)
    workload = replace(workload, clients=load.clients, cohort=load.cohort)
    x, y = (torch.from_numpy(part) for part in load.data())
    return workload, task_from(workload, x, y), {name: torch.from_numpy(leaf) for name, leaf in load.initial().items()}


class Fedalloy:
    """One ``fit`` to compare the model, then one that never ends."""

    def __init__(self, load: Load, **settings: Any) -> None:
        self.load, self.settings = load, settings
        self.turns = Turns(load, "fedalloy")
        _, self.task, self.initial = task_and_initial(load)

    def fit(self, rounds: int, folder: str, **settings: Any) -> Any:
        algorithm = fedalloy.algorithms.fedavg(lr=self.load.lr, batch_size=self.load.batch)
        return fedalloy.fit(
            algorithm, self.task, rounds=rounds, cohort=self.load.cohort, initial=self.initial, folder=folder,
            evaluate_every=rounds, evaluate_clients=1, **self.settings, **settings,
        )  # fmt: skip

    def run(self) -> None:
        """``check`` is answered by a run of its own, because a watcher does not see the model."""
        self.turns.begin()
        with tempfile.TemporaryDirectory() as folder:
            model = self.fit(self.turns.wanted, f"{folder}/check").model
            self.turns.answer(
                {"moved": moved(self.load.initial(), {name: leaf.numpy() for name, leaf in model.items()})}
            )
            self.turns.wait()
            self.fit(FOREVER, f"{folder}/timed", watcher=lambda event: self.turns.round_done())


if __name__ == "__main__":
    Fedalloy(Load.read(sys.argv[1])).run()
