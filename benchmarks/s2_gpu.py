"""EWWA-FL on a GPU: MNIST with LeNet, three non-iid clients, five methods, as many rounds as fit into some minutes.

    python -m benchmarks.s2_gpu --minutes 8 --out runs/s2-gpu

Needs only torch, numpy and safetensors (`fedalloy.fit`). The methods take turns of ``--turn`` rounds, so that all of
them have run the same number when the time is over; every method's run has its own folder below ``--out``, and the
same command continues from there. Afterwards (or with ``--minutes 0``) ``curves.json`` there has test accuracy by
round and method, and ``s2-mnist.json`` the same runs in the form that `fedalloy reproduce --pages` makes a page of:
copy it to ``docs/results``. The settings are those of ``recipes/s2/mnist-lenet.toml``; a test compares them.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedalloy import algorithms
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import FedalloyError
from fedalloy.experiment.driver import RoundEvent
from fedalloy.experiment.fit import fit
from fedalloy.experiment.records.reading import is_run, read_run
from fedalloy.experiment.records.stop import ask_to_stop
from fedalloy.studies.reproduce.results import Measured, Results, write_results
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.federation import FederatedTask

MOMENTUM: dict[str, Any] = {
    "lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4, "epochs": 1, "batch_size": 64,
    "milestones": (0.3333333333, 0.6666666667),
}  # fmt: skip
PLAIN: dict[str, Any] = {**MOMENTUM, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
AMS: dict[str, Any] = {"server_lr": 0.001, "option": "plus", "vhat0": 1e-3, "bias_correction": True}


def methods() -> dict[str, Algorithm]:
    return {
        "fedavg": algorithms.fedavg(**MOMENTUM),
        "fedams": algorithms.fedams(**AMS, **PLAIN),
        "fedcams": algorithms.fedcams(ratio=0.015625, **AMS, **PLAIN),
        "fedadam": algorithms.fedadam(server_lr=0.001, bias_correction=True, **PLAIN),
        "ewwa_adam": algorithms.ewwa(kind="adam", **MOMENTUM),
    }


@dataclass(frozen=True)
class Plan:
    """What is run: where, on what, how long, and how often it is scored."""

    out: Path
    device: str
    rounds: int
    every: int
    turn: int
    seeds: tuple[int, ...]
    names: tuple[str, ...]


class Turn:
    """Watches a run and ends it when its turn or the time is over."""

    def __init__(self, until: int, deadline: float, place: Path) -> None:
        self.until, self.deadline, self.place = until, deadline, place

    def __call__(self, event: RoundEvent) -> None:
        if event.progress.round >= self.until or time.monotonic() > self.deadline:
            ask_to_stop(self.place)  # the driver ends after this round, with a checkpoint


def federation(seed: int, dataset: Any = None) -> FederatedTask:
    data = dataset if dataset is not None else {"kind": "mnist", "flat": False}
    return make_task(data, "lenet", {"kind": "shards", "per_client": 2}, 3, test_fraction=0.0, seed=seed)


def folder_of(plan: Plan, name: str, seed: int) -> Path:
    return plan.out / name / f"seed-{seed}"


def played(folder: Path) -> int:
    return read_run(folder).last_round if is_run(folder) else 0


def over(folder: Path) -> bool:
    return is_run(folder) and read_run(folder).status.get("state") in ("finished", "failed")


def take_turns(plan: Plan, deadline: float, dataset: Any = None) -> None:
    """Every method runs ``turn`` rounds, then the next; a method that failed is skipped."""
    known = methods()
    for seed in plan.seeds:
        task = federation(seed, dataset)
        for until in [*range(plan.turn, plan.rounds, plan.turn), plan.rounds]:
            for name in plan.names:
                place = folder_of(plan, name, seed)
                if time.monotonic() > deadline:
                    return
                if not over(place) and played(place) < until:
                    run_round(plan, known[name], task, seed, place, Turn(until, deadline, place))


def run_round(plan: Plan, algorithm: Algorithm, task: FederatedTask, seed: int, place: Path, watcher: Turn) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        result = fit(
            algorithm, task, rounds=plan.rounds, seed=seed, folder=place, resume=is_run(place), watcher=watcher,
            device=plan.device, evaluate_every=plan.every, target_on="global", checkpoint_every=60.0,
        )  # fmt: skip
        print(f"{place.parent.name}, seed {seed}: round {result.ending.progress.round}, {result.status}", flush=True)
    except FedalloyError as error:
        print(f"{place.parent.name}, seed {seed} failed: {error}", flush=True)


def curve(folder: Path) -> dict[str, Any]:
    """Test accuracy and loss by round, from the run's own records."""
    rows = [row for row in read_run(folder).rounds() if row.get("global")]
    scores = {name: [row["global"][name] for row in rows] for name in ("accuracy", "loss")}
    return {"rounds": [row["round"] for row in rows], **scores}


def gather(plan: Plan, command: str) -> dict[str, Any]:
    """Write the results: the curves, and one line per run; runs are compared at the last round that all have run."""
    found = {
        (name, seed): folder_of(plan, name, seed)
        for name in plan.names
        for seed in plan.seeds
        if is_run(folder_of(plan, name, seed))
    }
    curves = {f"{name}, seed {seed}": curve(place) for (name, seed), place in found.items()}
    known = [read_run(place) for place in found.values()]
    common = min((run.last_round for run in known if run.status.get("state") != "failed"), default=0)
    runs = [_measured(name, seed, place, common) for (name, seed), place in found.items()]
    settings = {"run.rounds": common, "run.planned_rounds": plan.rounds}
    machine = str(known[0].environment.get("device_name", "")) if known else ""
    write_results(
        Results("s2-mnist", command, tuple(runs), settings, machine=f"{machine}, torch {torch.__version__}"),
        plan.out / "s2-mnist.json",
    )
    (plan.out / "curves.json").write_text(json.dumps(curves) + "\n")
    return curves


def _measured(name: str, seed: int, place: Path, common: int) -> Measured:
    """A run up to the last round that all have run; it counts as finished up to there."""
    run, told = read_run(place), curve(place)
    failed = run.status.get("state") == "failed"
    kept = [100 * a for r, a in zip(told["rounds"], told["accuracy"], strict=True) if r <= common and a is not None]
    scores = {"best_global": max(kept), "global": kept[-1]} if kept and not failed else {}
    spent = sum(
        float(value)
        for row in run.timings()
        for key, value in row.items()
        if key not in ("round", "engine", "profile") and row["round"] <= common
    )
    state = "failed" if failed else "finished"
    reason = str(run.status.get("reason", "")) if failed else ""
    return Measured("non-iid", name, seed, state, run.last_round if failed else common, scores, reason, spent)


def main(arguments: list[str] | None = None, dataset: Any = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0, help="time limit, counted from the start of the program")
    parser.add_argument("--out", type=Path, default=Path("runs") / "s2-gpu")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--every", type=int, default=5, help="rounds between two scores")
    parser.add_argument("--turn", type=int, default=25, help="rounds of one method before the next has its turn")
    parser.add_argument("--seeds", type=lambda text: tuple(map(int, text.split(","))), default=(0,))
    parser.add_argument("--methods", type=lambda text: tuple(text.split(",")), default=tuple(methods()))
    options = parser.parse_args(arguments)
    plan = Plan(
        options.out, options.device, options.rounds, options.every, options.turn, options.seeds, options.methods
    )
    started = time.monotonic()
    take_turns(plan, started + 60 * options.minutes, dataset)
    command = f"python -m benchmarks.s2_gpu --minutes {options.minutes:g} --device {options.device}"
    curves = gather(plan, command)
    for name, told in curves.items():
        print(f"{name}: round {max(told['rounds'], default=0)}, best {max(told['accuracy'], default=0):.4f}")
    return curves


if __name__ == "__main__":
    main()
