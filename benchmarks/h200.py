"""On one GPU: fedalloy's public ``fit`` against a hand-written sequential loop, in one run.

    PYTHONPATH=src python -m benchmarks.h200 --data FOLDER [--rounds 200] [--only SHAPE ...] [--out FILE.json]
    PYTHONPATH=src python -m benchmarks.h200 --conform

``FOLDER`` holds ``cifar10_train_a.npz`` and ``cifar10_test.npz``. The first shape is a known CIFAR-10 benchmark of
simulators: a CNN of 1,626,442 parameters, 50 clients a round with 50 images each, batches of 10, one epoch. The
second is one local epoch of ResNet-20 with GroupNorm for 3 clients with batches of 64 and 50 clients with batches
of 10. "Before" is ``kernel = "mapped"``. ``--conform`` needs no data: it compares the kernels with the loop in float64
and plants faults that the comparison must find; ``--timed`` leaves that out, for a process beside. With
``FEDALLOY_TINY=1`` images are drawn and few, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedalloy.algorithms import drfedavg, fedavg, fedprox, scaffold
from fedalloy.core.keys import Key
from fedalloy.core.types import Examples
from fedalloy.engines.batched import Batched
from fedalloy.experiment.fit import fit
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.tasks.dropout import Dropout
from fedalloy.tasks.federation import FederatedTask, federate
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.tasks.partitions.iid import Iid
from fedalloy.tasks.partitions.power_law import PowerLaw

LR = 0.1
TINY = bool(os.environ.get("FEDALLOY_TINY"))
DEVICE = "cuda" if torch.cuda.is_available() or not TINY else "cpu"


def cnn() -> nn.Module:
    """Two 3x3 convolutions, one pooling, two dense layers: 1,626,442 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(12544, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


class Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut that subsamples and pads with zero channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, outputs), nn.GroupNorm(8, outputs)
        self.stride, self.extra = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both paths."""
        short = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.extra))
        return functional.relu(self.norm2(self.second(functional.relu(self.norm1(self.first(x))))) + short)


def resnet20() -> nn.Module:
    """ResNet-20 for 32x32 images with GroupNorm."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(8, 16), nn.ReLU()]
    width = 16
    for stage, channels in enumerate((16, 32, 64)):
        for block in range(3):
            layers.append(Residual(width, channels, 2 if stage and not block else 1))
            width = channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def synchronize() -> None:
    """Wait for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def load(folder: Path) -> Dataset:
    """Real CIFAR-10 images, standardised per channel."""
    if TINY:
        x, y = Key.of(1).normal(48, 3, 32, 32), torch.arange(48) % 10
        return Dataset(x=x, y=y, classes=10, test=Examples(x, y))

    def read(name: str) -> tuple[Tensor, Tensor]:
        with np.load(folder / name, allow_pickle=False) as file:
            x = torch.from_numpy(file["x"]).float() / 255
            y = torch.from_numpy(file["y"])
        mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
        return (x - mean.reshape(1, 3, 1, 1)) / std.reshape(1, 3, 1, 1), y

    x, y = read("cifar10_train_a.npz")
    return Dataset(x=x, y=y, classes=10, test=Examples(*read("cifar10_test.npz")))


def task_for(data: Dataset, model: Any, clients: int) -> FederatedTask:
    """An even split without local test parts, so that every client has the stated number of images."""
    return federate(data, Iid(), clients, ModuleObjective(model), test_fraction=0.0, key=Key.of(0))


def timed_fit(
    task: FederatedTask, rounds: int, cohort: int, batch: int, engine: Batched
) -> tuple[list[float], float, float]:
    """Seconds per round (first left out), final accuracy on the test images, peak memory in MB."""
    stamps: list[float] = []
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()

    def stamp(_: object) -> None:
        synchronize()
        stamps.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        result = fit(
            fedavg(lr=LR, batch_size=batch), task, rounds=rounds, cohort=cohort, seed=1, device=DEVICE,
            folder=f"{folder}/run", engine=engine, evaluate_every=rounds, watcher=stamp, checkpoint_every=1e9,
        )  # fmt: skip
        accuracy = [row["global"]["accuracy"] for row in result.rounds() if "global" in row][-1]
    gaps = [after - before for before, after in itertools.pairwise(stamps[:-1])]
    return gaps, accuracy, torch.cuda.max_memory_allocated() / 1e6 if DEVICE == "cuda" else 0.0


def sequential(task: FederatedTask, model: Any, rounds: int, cohort: int, batch: int) -> list[float]:
    """A hand-written loop: client after client, one autograd call per step."""
    module = model().to(DEVICE)
    params = list(module.parameters())
    server = [leaf.detach().clone() for leaf in params]
    x, y = task.train.x.to(DEVICE), task.train.y.to(DEVICE)
    start, size = task.train.start.tolist(), task.train.size.tolist()
    generator, times = torch.Generator().manual_seed(0), []
    for _ in range(rounds):
        synchronize()
        begin = time.perf_counter()
        mean = [torch.zeros_like(leaf) for leaf in server]
        for client in torch.randperm(len(size), generator=generator)[:cohort].tolist():
            with torch.no_grad():
                for leaf, value in zip(params, server, strict=True):
                    leaf.copy_(value)
            order = (start[client] + torch.randperm(size[client], generator=generator)).to(DEVICE)
            for rows in order.split(batch):
                grads = torch.autograd.grad(functional.cross_entropy(module(x[rows]), y[rows]), params)
                with torch.no_grad():
                    for leaf, gradient in zip(params, grads, strict=True):
                        leaf.sub_(gradient, alpha=LR)
            with torch.no_grad():
                for total, leaf in zip(mean, params, strict=True):
                    total.add_(leaf, alpha=1 / cohort)
        server = mean
        synchronize()
        times.append(time.perf_counter() - begin)
    return times[1:]


@dataclass(frozen=True)
class Shape:
    """Clients in all, of a round, the size of a batch, rounds of the sequential loop at a time, and our rounds as a
    share of those that are asked for."""

    model: Any
    clients: int
    cohort: int
    batch: int
    sequential: int
    share: float = 1.0


SHAPES = {
    "cnn-50x50": Shape(cnn, 200, 50, 10, 6), "resnet20-3x64": Shape(resnet20, 156, 3, 64, 20, 0.1),
    "resnet20-50x10": Shape(resnet20, 1000, 50, 10, 2, 0.1),
}  # fmt: skip
TINY_SHAPES = {name: Shape(shape.model, 12, 2, 2, 2) for name, shape in SHAPES.items()}


def compare(name: str, data: Dataset, shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """One shape: the sequential loop before every variant of ours, so that both have the same load."""
    task = task_for(data, shape.model, shape.clients)
    rows: list[dict[str, Any]] = []
    control: list[float] = []
    variants = {
        "float32 before": Batched(kernel="mapped"), "float32": Batched(),
        "tf32 before": Batched(precision="tf32", kernel="mapped"), "tf32": Batched(precision="tf32"),
        "bf16 before": Batched(precision="bf16", kernel="mapped"), "bf16": Batched(precision="bf16"),
    }  # fmt: skip
    for label, engine in variants.items():
        control += sequential(task, shape.model, shape.sequential, shape.cohort, shape.batch)
        try:
            gaps, accuracy, peak = timed_fit(task, rounds, shape.cohort, shape.batch, engine)
        except Exception as error:  # a variant that this torch cannot run is recorded as failed
            rows.append({"shape": name, "variant": label, "failed": f"{type(error).__name__}: {error}"[:300]})
            continue
        ms = 1e3 * statistics.median(gaps)
        spread = [1e3 * value for value in (min(gaps), max(gaps))]
        rows.append({
            "shape": name, "variant": label, "ms": round(ms, 3), "spread_ms": [round(v, 3) for v in spread],
            "accuracy": round(accuracy, 4), "peak_mb": round(peak),
            "fallback": engine._unbatchable or engine._uncaptured,
        })  # fmt: skip
        print(rows[-1], flush=True)
    base = 1e3 * statistics.median(control)
    for row in rows:
        row["sequential_ms"] = round(base, 2)
        row["ratio"] = round(base / row["ms"], 2) if "ms" in row else None
    return rows


def agreement() -> list[dict[str, Any]]:
    """The loop against CUDA graphs on the GPU, in float64, with clients of different sizes, dropout and
    convolutions."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (3, 6, 6)), nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(),
            nn.Conv2d(8, 8, 3, stride=2), nn.Tanh(), nn.Flatten(), Dropout(0.2), nn.Linear(32, 4),
        )  # fmt: skip

    key = Key.of(3)
    data = Dataset(x=key.normal(400, 108, dtype=torch.float64), y=key.fold("y").permutation(400) % 4, classes=4)
    objective = ModuleObjective(model, dtype=torch.float64)
    rows: list[dict[str, Any]] = []
    for clients in (5, 20):
        task = federate(data, PowerLaw(1.0), clients, objective, key=Key.of(1))
        for name, algorithm in {
            "fedavg": fedavg(lr=0.1, batch_size=7), "momentum": fedavg(lr=0.1, batch_size=7, momentum=0.9, decay=0.9),
            "prox": fedprox(0.1, lr=0.1, batch_size=7), "scaffold": scaffold(lr=0.1, batch_size=7, epochs=2),
            "adam": fedavg(lr=0.01, batch_size=7, optimizer="adam"),
            "dr": drfedavg(official=True, lr=0.1, batch_size=7),
        }.items():  # fmt: skip
            models = [
                fit(
                    algorithm, task, rounds=3, seed=2, device=DEVICE, engine=engine, devices=DeviceProfile(success=0.8)
                ).model
                for engine in ("loop", Batched())
            ]
            gap = max(float((models[0][leaf] - models[1][leaf]).abs().max()) for leaf in models[0])
            rows.append({"clients": clients, "algorithm": name, "largest difference": gap})
            print(rows[-1], flush=True)
    return rows


def agrees() -> bool:
    """Whether the GPU engine agrees with the loop in float64, and every planted fault is found."""
    from benchmarks.gpu_conform import conform

    same = agreement()
    return max(row["largest difference"] for row in same) <= 1e-9 and conform()


def main() -> None:
    """The shapes that are asked for; after each, all rows so far are written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--conform", action="store_true")
    parser.add_argument("--timed", action="store_true")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--only", nargs="*", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.conform and options.data is None:
        parser.error("--data FOLDER is needed, unless with --conform")
    if options.rounds < 3:
        parser.error("--rounds must be 3 or more: the first round and the last, which evaluates, are not timed")
    if not options.timed and not agrees():
        raise SystemExit("the GPU engine does not agree with the loop, or a planted fault was not found")
    if options.conform:
        print("conform: all agree, all planted faults found")
        return
    data, rows = load(options.data), []
    for name in options.only:
        shape = (TINY_SHAPES if TINY else SHAPES)[name]
        rounds = max(min(20, options.rounds), int(shape.share * options.rounds)) if not TINY else 3
        rows += compare(name, data, shape, rounds)
        if options.out:
            options.out.write_text(json.dumps(rows, indent=1))
    for row in rows:
        print(json.dumps(row))
    if failed := [f"{row['shape']} {row['variant']}" for row in rows if "failed" in row]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
