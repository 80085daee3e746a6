"""The GPU kernels on one card, before and after: whether they agree with the loop, how long a round takes, and on what.

    PYTHONPATH=src python -m benchmarks.gpu_kernels [--only conform cnn:tf32 ...] [--out FOLDER]

Needs no data: images are drawn, with the shapes of CIFAR-10 and MNIST. ``FEDALLOY_TINY=1`` tries a part on a CPU.
Every part prints what it finds at once, and one that fails does not end the others. "Before" is ``kernel = "mapped"``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_conform import conform
from benchmarks.gpu_federations import DEVICE, FOUND, OUT, Federation, federation, images, measure, note, timed
from benchmarks.gpu_models import LORA_TRAINS, attention, lora
from benchmarks.h200 import cnn, resnet20, timed_fit
from fedalloy.algorithms import fedavg, fedprox, named, scaffold
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.core.native import draws
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import client_graphs, conv_graphs, cuda_graphs, tracing
from fedalloy.engines.loop import Loop
from fedalloy.tasks.federation import federate
from fedalloy.tasks.models.acgan import acgan
from fedalloy.tasks.models.cvae import cvae
from fedalloy.tasks.models.energy import resnet10
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.tasks.partitions.dirichlet import Dirichlet
from fedalloy.tasks.partitions.iid import Iid


def update_errors(fed: Federation, variants: dict[str, Batched]) -> None:
    """Every variant's updates against the loop in float64."""
    exact = replace(fed.task.to(DEVICE, torch.float64), objective=ModuleObjective(cnn, dtype=torch.float64))
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


TINY = bool(os.environ.get("FEDALLOY_TINY"))
"""Small sizes, to try the script on a CPU."""


def cnn_federation() -> Federation:
    """50 clients x 50 images, batches of 10, the CNN of 1,626,442 parameters."""
    if TINY:
        return federation(fedavg(lr=0.1, batch_size=4), images(100, (3, 32, 32)), cnn, 10, 3)
    return federation(fedavg(lr=0.1, batch_size=10), images(5000, (3, 32, 32)), cnn, 100, 50)


def convolutional(precision: str) -> None:
    """A known benchmark of simulators: as it is, with stored patches, with private copies of all layers, mapped."""
    fed, rounds = cnn_federation(), 2 if TINY else 30
    best = "fused" if TINY else "best"

    def timed_as(label: str, kernel: str = best, *, profile: bool = False) -> None:
        given: dict[str, Any] = {"precision": precision, "kernel": kernel}
        engine = Batched(**given)
        measure("cnn", f"{precision} {label}", fed, engine, rounds, profile=profile)

    timed_as("best", profile=True)
    with changed(conv_graphs, "IMPLICIT", False):
        timed_as("stored patches", profile=True)
    with changed(conv_graphs, "may_be_factored", lambda algorithm: False):
        timed_as("private copies")
    timed_as("mapped", "mapped", profile=True)


@contextmanager
def changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def errors() -> None:
    """Updates against float64, before and after."""
    update_errors(cnn_federation(), {
        f"{precision} {kernel}": Batched(precision=precision, kernel=kernel)
        for precision in ("tf32", "bf16", "float32") for kernel in ("mapped", "best")
    })  # fmt: skip


GENERATIVE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "fedevg": (lambda: resnet10((1, 32, 32), 10), {"low": 0.0, "high": 1.0}),
    "fedcgan": (lambda: acgan((1, 32, 32), 10, norm="group"), {}),
    "fedcvae": (lambda: cvae((1, 32, 32), 10, norm="group"), {}),
}


def generative_federation(name: str, **more: Any) -> Federation:
    """MNIST's shape, 10 clients with Dirichlet(1) shares, batches of 64, one epoch."""
    model, extra = GENERATIVE[name]
    extra = {**extra, **more}
    if TINY:
        return federation(named(name, batch_size=4, **extra), images(40, (1, 32, 32)), model, 3, 3, Dirichlet(1.0))
    return federation(named(name, batch_size=64, **extra), images(56320, (1, 32, 32)), model, 10, 10, Dirichlet(1.0))


def generative(name: str, precision: str) -> None:
    """A method that generates data, a whole round: compiled, and if that failed the reason is in ``said``."""
    fed = generative_federation(name)
    sizes = fed.task.train.size
    note(part=name, sizes=sizes.tolist(), steps=int(((sizes + 63) // 64).sum()))
    engine = Batched(precision=precision, kernel="sequential" if TINY else "best")  # type: ignore[arg-type]
    measure(name, f"{precision} best", fed, engine, 1 if name == "fedevg" else 4, profile=True)
    graphs = engine._client_graphs
    if name == "fedevg" and graphs is not None:
        graphs._lanes = {key: lanes[:1] for key, lanes in graphs._lanes.items()}
        measure(name, f"{precision} best, one lane", fed, engine, 1)


def generative_before(name: str) -> None:
    """The same without compiling, and mapped."""
    fed = generative_federation(name)
    measure(name, "tf32 best uncompiled", fed, Batched(precision="tf32", compiled=False), 1)
    measure(name, "tf32 mapped", fed, Batched(precision="tf32", kernel="mapped"), 1)


def whole_rounds() -> None:
    """The public ``fit`` with records, on the CNN."""
    task = federate(images(10000, (3, 32, 32)), Iid(), 200, ModuleObjective(cnn), test_fraction=0.0, key=Key.of(0))
    for label, engine in {
        "tf32 best": Batched(precision="tf32"), "bf16 best": Batched(precision="bf16"),
        "tf32 mapped": Batched(precision="tf32", kernel="mapped"),
    }.items():  # fmt: skip
        gaps, accuracy, peak = timed_fit(task, 60, 50, 10, engine)
        note(part="fit cnn", variant=label, ms=round(1e3 * statistics.median(gaps), 3), accuracy=accuracy,
             quartiles=[round(1e3 * one, 3) for one in statistics.quantiles(gaps, n=4)], peak_mb=round(peak),
             fallback=engine._unbatchable or engine._uncaptured)  # fmt: skip


RESIDUAL = {"3x64": (3, 64), "10x20": (10, 20), "50x10": (50, 10)}


def residual_federation(clients: int, batch: int) -> Federation:
    """ResNet-20 with GroupNorm, two local steps."""
    if TINY:
        clients, batch = 2, 3
    data = images(clients * batch * 2, (3, 32, 32))
    return federation(fedavg(lr=0.1, batch_size=batch), data, resnet20, clients, clients)


def residual(shape: str, kinds: str = "") -> None:
    """Three clients with batches of 64, ten with 20, fifty with 10: all ways to run them, or those that are named."""
    fed = residual_federation(*RESIDUAL[shape])
    ways = {
        "mapped": {"kernel": "mapped"}, "uncompiled": {"kernel": "mapped", "compiled": False},
        "sequential": {"kernel": "sequential"}, "best": {},
    }  # fmt: skip
    for way in kinds.split(",") if kinds else ways:
        engine = Batched(precision="tf32", **ways[way])  # type: ignore[arg-type]
        measure(f"resnet20 {shape}", f"tf32 {way}", fed, engine, 2 if TINY else 10, profile=True)


METHODS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg, "momentum": partial(fedavg, momentum=0.9), "adamw": partial(fedavg, optimizer="adamw"),
    "fedprox": partial(fedprox, 0.1), "scaffold": scaffold,
}  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...] | None]] = {
    "cnn": (cnn, None), "resnet20": (resnet20, None), "attention": (attention, None), "lora": (lora, LORA_TRAINS),
}  # fmt: skip


def table(chosen: str = "", warm: str = "") -> None:
    """Models x methods: the multiple over the loop, 20 clients with two batches of 16, tf32; of one model only if it is
    named. ``warm`` only compiles."""
    clients, batch = (2, 2) if TINY else (20, 16)
    data = images(2 * clients * batch, (3, 32, 32))
    for name in [chosen] if chosen else list(MODELS):
        model, trained = MODELS[name]
        for method, make in METHODS.items():
            part = f"table {name} {method}"
            try:
                fed = federation(make(lr=0.01, batch_size=batch), data, model, clients, clients, trainable=trained)
                engine = Batched(precision="tf32")
                if warm:
                    timed(fed, engine, 0)
                    continue
                loop = statistics.median(timed(fed, Loop(), 2)[1])
                times = timed(fed, engine, 10)[1]
                note(part=part, loop_ms=round(1e3 * loop, 2), ms=round(1e3 * statistics.median(times), 2),
                     spread_ms=[round(1e3 * one, 2) for one in (min(times), max(times))],
                     multiple=round(loop / statistics.median(times), 1), kernel=kernel_of(engine),
                     fallback=engine._unbatchable or engine._uncaptured)  # fmt: skip
            except Exception:
                note(part=part, failed=traceback.format_exc()[-800:])


def kernel_of(engine: Batched) -> str:
    """Which kernel took the last rounds' steps."""
    if engine._conv_graphs is not None:
        return "chain"
    sequential = engine._client_graphs is not None and any(engine._client_graphs._lanes.values())
    return "sequential" if sequential else "mapped"


SHARED: dict[str, Callable[[], Federation]] = {
    "fedevg": lambda: generative_federation("fedevg", iterations=20),
    "resnet20": lambda: residual_federation(*RESIDUAL["3x64"]),
}


def sharing(chosen: str = "") -> None:
    """One, two and four processes on one card, each with its own rounds: how many rounds a second in all."""
    for name in [chosen] if chosen else SHARED:
        for count in (1, 2) if TINY else (1, 2, 4):
            with tempfile.TemporaryDirectory() as folder:
                call = [sys.executable, "-m", "benchmarks.gpu_kernels", "--member", name, folder]
                members = [subprocess.Popen(call, stdout=subprocess.PIPE, text=True) for _ in range(count)]
                while len(list(Path(folder).glob("ready-*"))) < count and all(one.poll() is None for one in members):
                    time.sleep(0.1)
                (Path(folder) / "go").touch()
                said = [one.communicate()[0].strip().splitlines() for one in members]
            rates = [float(lines[-1]) if lines else 0.0 for lines in said]
            lost = {"failed": f"ended with {[one.returncode for one in members]}"} if min(rates) == 0 else {}
            note(part=f"sharing {name}", processes=count, rounds_per_second=round(sum(rates), 3), each=rates, **lost)


ROUNDS_SHARED = {"fedevg": 5, "resnet20": 300}


def member(name: str, folder: str) -> None:
    """One process of ``sharing``: warm up, wait for the others, print rounds per second."""
    fed, engine, rounds = SHARED[name](), Batched(precision="tf32"), 2 if TINY else ROUNDS_SHARED[name]
    timed(fed, engine, 1)
    (Path(folder) / f"ready-{os.getpid()}").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.01)
    first, others, *_ = timed(fed, engine, rounds - 1)
    print(rounds / (first + sum(others)))


PARTS: dict[str, Callable[..., Any]] = {
    "conform": conform, "cnn": convolutional, "errors": errors, "generative": generative, "fit": whole_rounds,
    "resnet": residual, "before": generative_before, "table": table, "sharing": sharing,
}  # fmt: skip
EVERYTHING = [
    "conform", *(f"cnn:{one}" for one in ("tf32", "bf16", "float32")), "errors",
    *(f"generative:{name}:{one}" for one in ("tf32", "bf16") for name in GENERATIVE), "fit",
    *(f"resnet:{shape}" for shape in RESIDUAL), *(f"before:{name}" for name in GENERATIVE), "table", "sharing",
]  # fmt: skip


def say_all(error: Exception) -> None:
    """Print all of a compiler's error, of which users see a line."""
    print(f"COMPILER: {error}"[-6000:], flush=True)
    WARN(error)


WARN = tracing.warn_uncompiled
tracing.warn_uncompiled = conv_graphs.warn_uncompiled = cuda_graphs.warn_uncompiled = say_all  # type: ignore[attr-defined]


def only_compile() -> None:
    """Fill the compiler's cache: end before the first round of clients one after another."""

    def stop(lanes: list[client_graphs.Lane], training: BlockTraining) -> TrainingResult:
        raise SystemExit(0)

    client_graphs.run = stop


def main() -> None:
    """Run the parts in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=EVERYTHING, help="parts, with their arguments after colons")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--warm", action="store_true", help="only fill the compiler's cache")
    parser.add_argument("--member", nargs=2, metavar=("NAME", "FOLDER"), help="one process of the part 'sharing'")
    options = parser.parse_args()
    if options.member:
        member(*options.member)
        return
    if options.warm:
        only_compile()
        options.only = [f"{part}:warm" if part.startswith("table:") else part for part in options.only]
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        OUT.append(options.out)
    note(torch=torch.__version__, card=torch.cuda.get_device_name() if DEVICE == "cuda" else "none",
         threads=torch.get_num_threads(), compiled_draws=draws.COMPILED)  # fmt: skip
    for part in options.only:
        name, *given = part.split(":")
        begin = time.perf_counter()
        try:
            PARTS[name](*given)
        except Exception:
            note(part=part, failed=traceback.format_exc()[-2000:])
        note(part=part, seconds=round(time.perf_counter() - begin, 1))
    if failed := sum("failed" in row for row in FOUND):
        raise SystemExit(f"{failed} parts or variants failed: the rows say why")


if __name__ == "__main__":
    main()
