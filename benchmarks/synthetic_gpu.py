"""Data instead of models on one GPU: FedEvg, FedCGAN or FedCVAE for as long as there is time, resumable.

    PYTHONPATH=src python -m benchmarks.synthetic_gpu fedevg --data FOLDER --folder RUN --seconds 170 --out RESULTS

``FOLDER`` holds the data's ``.npz`` files. ``RUN`` is the run's folder: called again with it and the same settings, the
run continues where it stopped. ``RESULTS`` gets ``METHOD.json`` (the curve, seconds, bytes) and ``METHOD.npz`` (``x``
and ``y`` of the last samples, and ``rounds`` and ``history`` of those kept during the run). Needs torch, numpy and
safetensors. ``--rounds`` is the length of the schedule, not of this call; ``--iterations`` limits FedEvg's local steps.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedalloy.algorithms import named
from fedalloy.core.algorithm import Algorithm
from fedalloy.experiment.driver import RoundEvent
from fedalloy.experiment.fit import RunResult, fit
from fedalloy.experiment.records import snapshots
from fedalloy.experiment.records.stop import ask_to_stop
from fedalloy.methods.classifier import ClassifierTraining
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.federation import FederatedTask

MODELS = {"fedevg": "resnet10", "fedcgan": "acgan", "fedcvae": "cvae"}
IMAGES = {"mnist": {"flat": False}, "pneumoniamnist": {"flat": False}, "cifar10": {}}


class Clock:
    """Watches the rounds, prints what they reached, and asks the run to stop when the time is up."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.began, self.seconds = folder, time.perf_counter(), seconds
        self.stamps = [self.began]

    def __call__(self, event: RoundEvent) -> None:
        """After every round: a request in its folder lets the driver save and return."""
        self.stamps.append(time.perf_counter())
        if event.evaluation is not None:
            said = " ".join(f"{name} {value:.4f}" for name, value in event.evaluation.overall.items())
            print(f"round {event.row['round']:4d} {self.passed:7.1f} s  {said}", flush=True)
        if self.passed > self.seconds and event.row["round"] < event.rounds:
            ask_to_stop(self.folder)

    @property
    def passed(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.began


def method(args: argparse.Namespace) -> Algorithm:
    """The algorithm with the settings of the experiments."""
    local: dict[str, Any] = {"epochs": args.epochs, "batch_size": args.batch}
    if args.method == "fedevg":
        local |= {"per_class": args.per_class, "iterations": args.iterations, "schedule": args.schedule}
    if args.lr is not None:
        local["lr"] = args.lr
    return named(args.method, **local)


def task_for(args: argparse.Namespace) -> FederatedTask:
    """Images split by Dirichlet shares; the model of the method, and ResNet-10 as the classifier."""
    size = {} if args.side is None else {"side": args.side}
    norm = {} if args.method == "fedevg" else {"norm": args.norm}
    model: str | dict[str, str] = args.model or {"kind": MODELS[args.method], **norm}
    return make_task(
        {"kind": args.dataset, **IMAGES.get(args.dataset, {"flat": False}), **size},
        model,
        {"kind": "dirichlet", "alpha": args.alpha},
        args.clients,
        seed=args.seed,
        classifier=args.classifier,
    )


def run_round(args: argparse.Namespace) -> tuple[RunResult, Clock]:
    """One session of the run."""
    clock = Clock(Path(args.folder), args.seconds)
    options = {"precision": args.precision, "block": args.block} if args.engine == "batched" else {}
    result = fit(
        method(args),
        task_for(args),
        rounds=args.rounds,
        cohort=args.cohort,
        seed=args.seed,
        folder=args.folder,
        resume=True,
        watcher=clock,
        evaluate_every=args.evaluate_every,
        snapshot_every=args.evaluate_every,
        classifier=ClassifierTraining(epochs=args.classifier_epochs, per_class=args.per_class),
        engine=args.engine,
        engine_options=options,
        device=args.device,
    )
    return result, clock


def curve(result: RunResult, clock: Clock, args: argparse.Namespace) -> dict[str, Any]:
    """The results of the run so far, over all its sessions."""
    rows = list(result.rounds())
    scored = [row for row in rows if "global" in row]
    sums = {name: sum(row.get(name, 0) for row in rows) for name in ("bytes_up", "bytes_down", "bytes_model")}
    laps = np.diff(clock.stamps)
    return {
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "status": result.status,
        "rounds": len(rows),
        "curve": [{"round": row["round"], **row["global"]} for row in scored],
        "clients": [{"round": row["round"], **row["evaluation"].get("accuracy", {})} for row in scored],
        "train_loss": [row["train_loss"] for row in rows],
        "bytes": sums,
        "median_seconds_per_round": float(np.median(laps)) if len(laps) else None,
        "seconds_of_this_sitting": clock.passed,
        "device": torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu",
    }


def save(result: RunResult, found: dict[str, Any], args: argparse.Namespace) -> None:
    """The curve as JSON, the current and earlier samples as arrays."""
    args.out.mkdir(parents=True, exist_ok=True)
    x, y = result.synthetic(args.per_class)
    kept = snapshots.rounds(args.folder)
    history = [snapshots.load(args.folder, round)[0].numpy() for round in kept]
    arrays: dict[str, Any] = {"x": x.cpu().numpy(), "y": y.cpu().numpy(), "rounds": np.array(kept, dtype=np.int64)}
    np.savez_compressed(args.out / f"{args.method}.npz", **arrays, history=np.array(history, dtype=np.float32))
    (args.out / f"{args.method}.json").write_text(json.dumps(found, indent=1) + "\n")


def parse(given: list[str] | None = None) -> argparse.Namespace:
    """The settings of the experiments on MNIST with 10 clients, unless overridden."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=sorted(MODELS))
    parser.add_argument("--data", type=Path, help="folder of the .npz files; default: FEDALLOY_DATA")
    parser.add_argument("--folder", type=Path, required=True, help="the run's folder, new or to be resumed")
    parser.add_argument("--out", type=Path, required=True, help="where the curve and the samples go")
    parser.add_argument("--seconds", type=float, default=170.0, help="stop after this time, with a checkpoint")
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--side", type=int, help="resize images; default: as they are")
    parser.add_argument("--model", help="default: that of the method")
    parser.add_argument(
        "--norm",
        default="group",
        choices=("group", "batch"),
        help="of the generative models: a GPU replays captured steps with group; batch is what was published",
    )
    parser.add_argument("--classifier", default="resnet10")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--cohort", type=float)
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--iterations", type=int, help="FedEvg: most local steps per round; default: the epochs")
    parser.add_argument("--schedule", default="diffusion", choices=("diffusion", "half_cosine", "constant"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--per-class", type=int, default=10)
    parser.add_argument("--evaluate-every", type=int, default=10)
    parser.add_argument("--classifier-epochs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--engine", default="batched")
    parser.add_argument("--precision", default="tf32", choices=("float32", "tf32", "bf16"))
    parser.add_argument("--block", type=int, help="clients at a time; up to 8 run in separate streams")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> dict[str, Any]:
    """One session; prints the last line of the curve."""
    args = parse(given)
    if args.data is not None:
        os.environ["FEDALLOY_DATA"] = str(args.data)
    result, clock = run_round(args)
    found = curve(result, clock, args)
    save(result, found, args)
    print(json.dumps({name: found[name] for name in ("status", "rounds", "bytes", "median_seconds_per_round")}))
    return found


if __name__ == "__main__":
    main()
