"""The GPU kernels on one card, before and after: whether they agree with the loop, how long a round takes, and on what.

    PYTHONPATH=src python -m benchmarks.gpu_kernels [--only conform cnn generative resnet] [--out FOLDER]

Needs torch with CUDA, numpy and safetensors, and no data: images are drawn, with the shapes of CIFAR-10 and MNIST. Every
part prints what it finds at once, and one that fails does not end the others. "Before" is ``kernel = "mapped"``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.h200 import cnn, resnet20
from fedalloy.algorithms import fedavg, fedprox, named, scaffold
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Engine, Outcome
from fedalloy.core.types import Context, Examples, Work
from fedalloy.engines import conv_sgd
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.engines.profile import collecting
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.federation import FederatedTask, federate
from fedalloy.tasks.models.acgan import acgan
from fedalloy.tasks.models.cvae import cvae
from fedalloy.tasks.models.energy import resnet10
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.tasks.partitions.dirichlet import Dirichlet
from fedalloy.tasks.partitions.iid import Iid
from fedalloy.tasks.partitions.power_law import PowerLaw

FOUND: list[dict[str, Any]] = []
OUT: list[Path] = []


def note(**row: Any) -> None:
    """Print a row at once, and keep it."""
    FOUND.append(row)
    print(json.dumps(row), flush=True)
    if OUT:
        (OUT[0] / "kernels.json").write_text(json.dumps(FOUND, indent=1))


def images(count: int, shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> Dataset:
    """Ten classes of images in [0, 1]: a pattern per class, and noise."""
    key = Key.of(7)
    y = key.fold("y").permutation(count) % 10
    pattern = key.fold("p").uniform(10, *shape, dtype=dtype)
    x = (pattern[y] + 0.3 * key.fold("x").normal(count, *shape, dtype=dtype)).clamp(0, 1)
    return Dataset(x=x, y=y, classes=10, test=Examples(x[:1000], y[:1000]), bounds=(0.0, 1.0))


@dataclass
class Federation:
    """An algorithm on a task on the card, whose rounds start from the same model."""

    algorithm: Algorithm
    task: FederatedTask
    clients: Tensor

    def __post_init__(self) -> None:
        self.algorithm = self.algorithm.bind(self.task)
        objective = self.task.objective
        self.task = replace(self.task.to("cuda"), objective=objective.to("cuda"))
        params, buffers = ({n: v.cuda() for n, v in part.items()} for part in objective.init(Key.of(1)))
        self.shared = self.algorithm.init(params, self.task.population, buffers)["shared"]
        fresh = objective.init
        self.states = {
            c: self.algorithm.init_client(self.shared, Key.of(2).fold(c), fresh) for c in self.clients.tolist()
        }

    def round(self, engine: Engine, number: int = 1) -> Outcome:
        """One round of the engine, without the server."""
        ctx = Context(
            number, self.task.population, Key.of(3).fold("round", number), self.algorithm.solver.lr_at(number)
        )
        return engine(self.algorithm, self.task, self.shared, self.states, Work.of(self.clients), ctx)


def federation(
    algorithm: Algorithm,
    data: Dataset,
    model: Callable[[], nn.Module],
    clients: int,
    cohort: int,
    split: Any = None,
    dtype: torch.dtype = torch.float32,
) -> Federation:
    """The first ``cohort`` of ``clients`` take part."""
    objective = ModuleObjective(model, dtype=dtype)
    task = federate(data, split or Iid(), clients, objective, test_fraction=0.0, key=Key.of(0))
    return Federation(algorithm, task, torch.arange(cohort))


def timed(fed: Federation, engine: Engine, rounds: int) -> tuple[float, list[float], Outcome]:
    """Seconds of the first round, of each further one, and the last outcome."""
    times = []
    for number in range(1, rounds + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        outcome = fed.round(engine, number)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return times[0], times[1:], outcome


def profiled(fed: Federation, engine: Engine, label: str, top: int = 16) -> None:
    """The kernels of one further round, by time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        fed.round(engine, 99)
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    total = sum(one.self_device_time_total for one in rows) / 1e3
    lines = [f"{one.self_device_time_total / 1e3:9.3f} ms x{one.count:5d} {one.key[:90]}" for one in rows]
    print(f"-- kernels of {label}: {total:.2f} ms in {sum(one.count for one in rows)} launches", flush=True)
    print("\n".join(lines[:top]), flush=True)
    if OUT:
        with (OUT[0] / "profiles.txt").open("a") as file:
            file.write("\n".join([f"-- {label}: {total:.2f} ms", *lines, ""]))


def measure(
    part: str, label: str, fed: Federation, engine: Batched, rounds: int, profile: bool = False
) -> Outcome | None:
    """Time a variant; what fails is noted and does not end the part."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.reset_peak_memory_stats()
            first, times, outcome = timed(fed, engine, rounds)
            with collecting() as phases:
                fed.round(engine, 98)
        spread = [round(1e3 * one, 3) for one in (min(times), max(times))]
        note(part=part, variant=label, ms=round(1e3 * statistics.median(times), 3), spread_ms=spread,
             first_s=round(first, 2), phases_ms={n: round(1e3 * v, 2) for n, v in phases.items()},
             peak_mb=round(torch.cuda.max_memory_allocated() / 1e6), fallback=engine._unbatchable,
             said=sorted({str(one.message)[:160] for one in said if "deprecated" not in str(one.message)})[:4],
             loss=float(outcome.cohort.stats["train_loss"].mean()))  # fmt: skip
        if profile:
            profiled(fed, engine, f"{part} {label}")
        return outcome
    except Exception:
        note(part=part, variant=label, failed=traceback.format_exc()[-1500:])
        return None


def apart(one: Outcome, other: Outcome) -> float:
    """The largest difference of two outcomes' payloads and losses."""
    pairs = [
        (one.cohort.payload[part][name], leaf)
        for part, leaves in other.cohort.payload.items() for name, leaf in leaves.items()
    ]  # fmt: skip
    losses = one.cohort.stats["train_loss"] - other.cohort.stats["train_loss"]
    return max([*(float((a.double() - b.double()).abs().max()) for a, b in pairs), float(losses.abs().max())])


def small_chain() -> nn.Module:
    """A convolutional chain with padding, a stride, both kinds of pooling and blank regions."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3, stride=2, padding=1), nn.Tanh(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 10),
    )  # fmt: skip


def small_normed() -> nn.Module:
    """A convolutional model with GroupNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8),
        nn.SiLU(), nn.Flatten(), nn.Linear(392, 10),
    )  # fmt: skip


CHAIN_CASES = {
    "fedavg": fedavg(lr=0.1, batch_size=7, epochs=2), "momentum": fedavg(lr=0.1, batch_size=7, momentum=0.9),
    "decay": fedavg(lr=0.1, batch_size=7, weight_decay=0.01), "prox": fedprox(0.1, lr=0.1, batch_size=7),
}  # fmt: skip
OTHER_CASES = {
    "adam": fedavg(lr=0.01, batch_size=7, optimizer="adam"), "scaffold": scaffold(lr=0.1, batch_size=7),
    "fedavg": fedavg(lr=0.1, batch_size=7),
}  # fmt: skip


def conform() -> None:
    """The kernels against the loop, in float64 on the card, with clients of different sizes."""
    data = images(400, (3, 16, 16), torch.float64)
    data.x[:, :, :6] = 0.5
    cases = [("chain", small_chain, name, CHAIN_CASES[name], Batched()) for name in ("fedavg", "prox")]
    cases += [("chain uncompiled", small_chain, name, a, Batched(compiled=False)) for name, a in CHAIN_CASES.items()]
    plain = {"kernel": "sequential", "compiled": False}
    cases += [("sequential uncompiled", small_normed, name, a, Batched(**plain)) for name, a in OTHER_CASES.items()]
    cases += [("sequential", small_normed, "adam", OTHER_CASES["adam"], Batched(kernel="sequential"))]
    for kernel, model, name, algorithm, engine in cases:
        try:
            fed = federation(algorithm, data, model, 9, 9, PowerLaw(1.0), torch.float64)
            gap = max(apart(fed.round(engine, number), fed.round(Loop(), number)) for number in (1, 2, 3))
            used = "conv" if engine._conv_graphs else "sequential" if engine._client_graphs else "mapped"
            graphs = len(engine._conv_graphs._captured) if engine._conv_graphs else len(engine._client_graphs._lanes)
            note(part="conform", kernel=kernel, algorithm=name, largest=gap, ok=gap < 1e-9, used=used, graphs=graphs)
        except Exception:
            note(part="conform", kernel=kernel, algorithm=name, failed=traceback.format_exc()[-1500:])
    planted(data)


def planted(data: Dataset) -> None:
    """Faults that the comparison must find: padding that counts, the second of two equal maxima, a lost update."""
    fed = federation(CHAIN_CASES["fedavg"], data, small_chain, 9, 9, PowerLaw(1.0), torch.float64)
    right = fed.round(Loop())
    kept = conv_sgd.Batches.of
    try:
        faulty = staticmethod(
            lambda block, everybody: replace(kept(block, everybody), mask=torch.ones_like(block.mask))
        )
        conv_sgd.Batches.of = faulty  # type: ignore[method-assign, assignment]
        note(part="conform", fault="padding counts", found=apart(fed.round(Batched()), right) > 1e-9)
    finally:
        conv_sgd.Batches.of = staticmethod(kept)  # type: ignore[method-assign, assignment]
    graphs = Batched()
    fed.round(graphs)
    captured = next(iter(graphs._conv_graphs._captured.values()), None) if graphs._conv_graphs else None
    if captured is not None:
        captured.graph.replay = lambda: None  # type: ignore[method-assign]
        note(part="conform", fault="graph not replayed", found=apart(fed.round(graphs, 2), fed.round(Loop(), 2)) > 1e-9)


def update_errors(fed: Federation, variants: dict[str, Batched]) -> None:
    """Every variant's updates against the loop in float64."""
    exact = replace(fed.task.to("cuda", torch.float64), objective=ModuleObjective(cnn, dtype=torch.float64))
    wide = Federation(fed.algorithm, exact, fed.clients)
    wide.shared = {part: {n: v.double() for n, v in leaves.items()} for part, leaves in fed.shared.items()}
    right = wide.round(Loop()).cohort.payload["delta"]
    for label, engine in variants.items():
        try:
            found = fed.round(engine).cohort.payload["delta"]
            errors = {n: float((found[n].double() - v).norm() / v.norm()) for n, v in right.items()}
            mean = {
                n: float((found[n].double().mean(0) - v.mean(0)).norm() / v.mean(0).norm()) for n, v in right.items()
            }
            note(part="cnn errors", variant=label, leaves={n: f"{e:.1e}" for n, e in errors.items()},
                 mean={n: f"{e:.1e}" for n, e in mean.items()})  # fmt: skip
        except Exception:
            note(part="cnn errors", variant=label, failed=traceback.format_exc()[-800:])


def convolutional() -> None:
    """50 clients x 50 images, batches of 10, the CNN of 1,626,442 parameters."""
    fed = federation(fedavg(lr=0.1, batch_size=10), images(5000, (3, 32, 32)), cnn, 100, 50)
    update_errors(fed, {
        f"{precision} {kernel}": Batched(precision=precision, kernel=kernel)  # type: ignore[arg-type]
        for precision in ("float32", "tf32", "bf16") for kernel in ("mapped", "best")
    })  # fmt: skip
    for precision in ("tf32", "bf16", "float32"):
        for kernel in ("mapped", "best"):
            engine = Batched(precision=precision, kernel=kernel)  # type: ignore[arg-type]
            measure("cnn", f"{precision} {kernel}", fed, engine, 30, profile=precision != "float32")
    measure("cnn", "tf32 best uncompiled", fed, Batched(precision="tf32", compiled=False), 30)


def generative() -> None:
    """MNIST's shape, 10 clients with Dirichlet(1) shares, batches of 64; per round and per client's step."""
    data = images(56320, (1, 32, 32))
    made = {
        "fedcvae": (lambda: cvae((1, 32, 32), 10, norm="group"), {}),
        "fedcgan": (lambda: acgan((1, 32, 32), 10, norm="group"), {}),
        "fedevg": (lambda: resnet10((1, 32, 32), 10), {"low": 0.0, "high": 1.0, "iterations": 20}),
    }  # fmt: skip
    for name, (model, extra) in made.items():
        try:
            fed = federation(named(name, batch_size=64, **extra), data, model, 10, 10, Dirichlet(1.0))
        except Exception:
            note(part=name, failed=traceback.format_exc()[-1500:])
            continue
        sizes = fed.task.train.size.tolist()
        note(part=name, sizes=sizes, steps=sum(min(-(-size // 64), extra.get("iterations", 10**9)) for size in sizes))
        rounds = 2
        measure(name, "tf32 best", fed, Batched(precision="tf32"), rounds, profile=True)
        measure(name, "bf16 best", fed, Batched(precision="bf16"), rounds, profile=name == "fedevg")
        measure(name, "tf32 best uncompiled", fed, Batched(precision="tf32", compiled=False), 1)
        measure(name, "tf32 mapped", fed, Batched(precision="tf32", kernel="mapped"), 1)


def residual() -> None:
    """ResNet-20 with GroupNorm: three clients with batches of 64, ten with 20, fifty with 10; two local steps."""
    for clients, batch in ((3, 64), (10, 20), (50, 10)):
        data = images(clients * batch * 2, (3, 32, 32))
        fed = federation(fedavg(lr=0.1, batch_size=batch), data, resnet20, clients, clients)
        for label, engine in {
            "tf32 best": Batched(precision="tf32"), "tf32 mapped": Batched(precision="tf32", kernel="mapped"),
            "tf32 sequential": Batched(precision="tf32", kernel="sequential"),
        }.items():  # fmt: skip
            measure(f"resnet20 {clients}x{batch}", label, fed, engine, 10)


PARTS: dict[str, Callable[[], None]] = {
    "conform": conform, "cnn": convolutional, "generative": generative, "resnet": residual,
}  # fmt: skip


def main() -> None:
    """Run the parts in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        OUT.append(options.out)
    note(torch=torch.__version__, card=torch.cuda.get_device_name())
    for name in options.only:
        begin = time.perf_counter()
        try:
            PARTS[name]()
        except Exception:
            note(part=name, failed=traceback.format_exc()[-2000:])
        note(part=name, seconds=round(time.perf_counter() - begin, 1))


if __name__ == "__main__":
    main()
