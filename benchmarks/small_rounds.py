"""Rounds of small models: the hand-written loop, fedalloy and the least that such a round costs, in turns.

    python -m benchmarks.small_rounds [--only W1,W4] [--rounds 300] [--parts] [--json FILE]

Times are processor time of the only thread, in microseconds a round, so that other processes on the machine count
little. The *limit* are the same local steps on stacked models with a hand-written backward and nothing else: a random
cohort, but no shuffling, masks, statistics, screening or records. fedalloy is the public ``fit`` with engine ``auto``
and records in a folder. ``--parts`` prints where fedalloy's round goes instead, by wrapping the functions listed in
``PARTS``; what a part calls from another part is counted there, so that the parts add up to the round.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.workloads import LR, WORKLOADS, Sequential, Workload, task_of
from fedalloy.algorithms import fedavg
from fedalloy.core.keys import Key
from fedalloy.core.types import Tree
from fedalloy.experiment.driver import RoundEvent
from fedalloy.experiment.fit import fit
from fedalloy.tasks.federation import FederatedTask

SMALL = ("W1", "W4")
PARTS: dict[str, tuple[str, ...]] = {
    "choosing clients": ("fedalloy.experiment.round:_assign",),
    "plan and draws of the block": ("fedalloy.engines.batched:prepare",),
    "local steps": ("fedalloy.engines.kernels.fused:train",),
    "rest of the engine": ("fedalloy.engines.batched:Batched.__call__",),
    "server": ("fedalloy.experiment.round:server_step", "fedalloy.experiment.round:recounted"),
    "records": ("fedalloy.experiment.recorder:FolderRecorder.append",),
    "rest": ("fedalloy.experiment.driver:_one_round",),
}
"""The functions of each part, as ``module:name``."""


class Limit:
    """The local steps of logistic regression on stacked models."""

    def __init__(self, load: Workload, task: FederatedTask, initial: Tree) -> None:
        self.load = load
        self.weight, self.bias = (initial[name].clone() for name in ("weight", "bias"))
        self.x = task.train.x.reshape(load.clients, load.examples, -1)
        self.y = task.train.y.reshape(load.clients, load.examples)
        self.generator = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def round(self) -> None:
        """One cohort from the received model to the mean of its models."""
        load = self.load
        ids = torch.randint(load.clients, (load.cohort,), generator=self.generator)
        x, y = self.x[ids], self.y[ids]
        weight, bias = self.weight.repeat(load.cohort, 1, 1), self.bias.repeat(load.cohort, 1)
        for rows, labels in zip(x.split(load.batch, 1), y.split(load.batch, 1), strict=True):
            self._step(weight, bias, rows, labels.unsqueeze(1))
        self.weight, self.bias = weight.mean(0), bias.mean(0)

    def _step(self, weight: Tensor, bias: Tensor, x: Tensor, y: Tensor) -> None:
        scale = LR / self.load.batch
        out = torch.baddbmm(bias.unsqueeze(2), weight, x.transpose(1, 2)).softmax(1).scatter_add_(
            1, y, torch.full((1, 1, 1), -1.0).expand(y.shape)
        )  # fmt: skip
        weight.baddbmm_(out, x, alpha=-scale)
        bias.sub_(out.sum(2), alpha=scale)


class Turns:
    """Called after every round of a run; lets the others run in between, and notes everybody's processor time."""

    def __init__(self, others: dict[str, Callable[[], None]]) -> None:
        self.others = others
        self.taken: dict[str, list[float]] = {"fedalloy": [], **{name: [] for name in others}}
        self._since = 0.0

    def __call__(self, event: RoundEvent) -> None:
        """The first rounds pick the engine and fill caches, and the last one evaluates: they are left out."""
        now = time.thread_time()
        if 5 < event.row["round"] < event.rounds:
            self.taken["fedalloy"].append(1e6 * (now - self._since))
            if len(self.taken["fedalloy"]) % 10 == 0:
                for name, round in self.others.items():
                    self.taken[name] += [_microseconds(round) for _ in range(10)]
        self._since = time.thread_time()


def _microseconds(work: Callable[[], None]) -> float:
    begin = time.thread_time()
    work()
    return 1e6 * (time.thread_time() - begin)


class Clock:
    """Processor time by part; a part does not include the parts that it calls."""

    def __init__(self) -> None:
        self.spent = dict.fromkeys(PARTS, 0.0)
        self._inside: list[float] = []

    def wrap(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            begin = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                whole = time.thread_time() - begin
                self.spent[part] += whole - self._inside.pop()
                if self._inside:
                    self._inside[-1] += whole

        return timed

    def install(self) -> None:
        """Wrap every function of ``PARTS`` where it is used."""
        for part, places in PARTS.items():
            for place in places:
                module, _, name = place.partition(":")
                owner, (*path, last) = importlib.import_module(module), name.split(".")
                for one in path:
                    owner = getattr(owner, one)
                setattr(owner, last, self.wrap(part, getattr(owner, last)))


def run(load: Workload, rounds: int, watcher: Callable[[RoundEvent], None], task: FederatedTask, first: Tree) -> None:
    """One ``fit``, as in ``make bench``."""
    with tempfile.TemporaryDirectory() as folder:
        fit(
            fedavg(lr=LR, batch_size=load.batch), task, rounds=rounds, cohort=load.cohort, initial=first,
            folder=f"{folder}/run", evaluate_every=rounds, evaluate_clients=1, checkpoint_every=1e9, watcher=watcher,
        )  # fmt: skip


def race(load: Workload, rounds: int) -> dict[str, Any]:
    """Medians and quartiles of the three, and fedalloy beside the loop."""
    task = task_of(load)
    initial = task.objective.init(Key.of(0).fold("model"))[0]
    turns = Turns({"loop": Sequential(load, task, initial).round, "limit": Limit(load, task, initial).round})
    run(load, rounds, turns, task, initial)
    found = {name: statistics.quantiles(taken, n=4, method="inclusive") for name, taken in turns.taken.items()}
    ours = found["fedalloy"][1]
    return {**found, "x loop": found["loop"][1] / ours, "x limit": ours / found["limit"][1]}


def parts(load: Workload, rounds: int, clock: Clock) -> dict[str, float]:
    """Microseconds a round by part."""
    task = task_of(load)
    initial = task.objective.init(Key.of(0).fold("model"))[0]
    snapshots: dict[int, dict[str, float]] = {}

    def watch(event: RoundEvent) -> None:
        if event.row["round"] in (20, rounds - 1):
            snapshots[event.row["round"]] = dict(clock.spent)

    run(load, rounds, watch, task, initial)
    before, after = snapshots[20], snapshots[rounds - 1]
    spent = {part: 1e6 * (after[part] - before[part]) / (rounds - 21) for part in PARTS}
    return {**spent, "round": sum(spent.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SMALL))
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--parts", action="store_true", help="where fedalloy's round goes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock()
    if options.parts:
        clock.install()
    told = {}
    for load in WORKLOADS:
        if load.name in options.only.split(","):
            found = parts(load, options.rounds, clock) if options.parts else race(load, options.rounds)
            told[load.name] = found
            print(load.name, load.what)
            for name, value in found.items():
                print(f"  {name:28} {_shown(value)}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(told, indent=1) + "\n")


def _shown(value: float | list[float]) -> str:
    if isinstance(value, list):
        return f"{value[1]:9.0f}  ({value[0]:.0f}-{value[2]:.0f})"
    return f"{value:9.2f}" if value < 100 else f"{value:9.0f}"


if __name__ == "__main__":
    main()
