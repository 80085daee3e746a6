"""The GPU kernels on one card, before and after: whether they agree with the loop, how long a round takes, and on what.

    PYTHONPATH=src python -m benchmarks.gpu_kernels [--only conform cnn ...] [--out FOLDER]

Needs torch with CUDA, numpy and safetensors, and no data: images are drawn, with the shapes of CIFAR-10 and MNIST.
Every part prints what it finds at once, and one that fails does not end the others. "Before" is ``kernel = "mapped"``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.h200 import cnn, resnet20, timed_fit
from fedalloy.algorithms import fedavg, fedprox, named, scaffold
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Engine, Outcome
from fedalloy.core.types import Context, Examples, Work
from fedalloy.engines import conv_graphs, conv_sgd
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


def timed(fed: Federation, engine: Engine, rounds: int) -> tuple[float, list[float], dict[str, float], Outcome]:
    """Seconds of the first round, of each further one, of the last one's phases, and its outcome."""
    times = []
    for number in range(1, rounds + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        with collecting() if number > rounds else nullcontext({}) as phases:
            outcome = fed.round(engine, number)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return times[0], times[1:], phases, outcome


def profiled(work: Callable[[], Any], label: str, top: int = 18) -> None:
    """The kernels of some work, by time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda one: -one.self_device_time_total)
    total = sum(one.self_device_time_total for one in rows) / 1e3
    lines = [f"{one.self_device_time_total / 1e3:9.3f} ms x{one.count:5d} {one.key[:90]}" for one in rows]
    print(f"-- kernels of {label}: {total:.2f} ms in {sum(one.count for one in rows)} launches", flush=True)
    print("\n".join(lines[:top]), flush=True)
    if OUT:
        with (OUT[0] / "profiles.txt").open("a") as file:
            file.write("\n".join([f"-- {label}: {total:.2f} ms", *lines, ""]))


def profiled_round(fed: Federation, engine: Batched, label: str) -> None:
    """The kernels of a round, or of one client's step where clients run one after another."""
    lanes = next(iter(engine._client_graphs._lanes.values()), []) if engine._client_graphs else []
    if lanes and lanes[0].graph is not None:
        profiled(lanes[0].graph.replay, f"{label}, one step of {len(lanes)} lanes")
    else:
        profiled(lambda: fed.round(engine, 99), label)


def measure(
    part: str, label: str, fed: Federation, engine: Batched, rounds: int, profile: bool = False
) -> Outcome | None:
    """Time a variant; what fails is noted and does not end the part."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.reset_peak_memory_stats()
            first, times, phases, outcome = timed(fed, engine, rounds)
        spread = [round(1e3 * one, 3) for one in (min(times), max(times))]
        note(part=part, variant=label, ms=round(1e3 * statistics.median(times), 3), spread_ms=spread,
             first_s=round(first, 2), phases_ms={n: round(1e3 * v, 2) for n, v in phases.items()},
             peak_mb=round(torch.cuda.max_memory_allocated() / 1e6), fallback=engine._unbatchable,
             said=sorted({str(one.message)[:160] for one in said if "deprecated" not in str(one.message)})[:4],
             loss=float(outcome.cohort.stats["train_loss"].mean()))  # fmt: skip
        if profile:
            profiled_round(fed, engine, f"{part} {label}")
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


def conform() -> bool:
    """The kernels against the loop, in float64 on the card, with clients of different sizes; whether all is well."""
    begin = len(FOUND)
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
    factored(data)
    planted(data)
    return all(row.get("ok", row.get("found", False)) for row in FOUND[begin:])


def factored(data: Dataset) -> None:
    """The same with a dense layer whose updates stay factors: sums, norms and updates."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 200), nn.ReLU(),
            nn.Linear(200, 10),
        )  # fmt: skip

    fed = federation(fedavg(lr=0.1, batch_size=7), data, model, 9, 9, dtype=torch.float64)
    engine = Batched()
    for number in (1, 2, 3):
        found, right = fed.round(engine, number).cohort, fed.round(Loop(), number).cohort
        weights = torch.rand(9, dtype=torch.float64, device="cuda")
        sums, expected = found.combine("delta", weights), right.combine("delta", weights)
        gap = max(float((sums[name] - leaf).abs().max()) for name, leaf in expected.items())
        norms = float((found.norms("delta") - right.norms("delta")).abs().max())
        whole = max(float((found.payload["delta"][n] - v).abs().max()) for n, v in right.payload["delta"].items())
        kind = type(found.payload["delta"]).__name__
        note(
            part="conform",
            kernel="factored",
            sums=gap,
            norms=norms,
            whole=whole,
            ok=max(gap, norms, whole) < 1e-9,
            kept=kind,
        )


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


def cnn_federation() -> Federation:
    """50 clients x 50 images, batches of 10, the CNN of 1,626,442 parameters."""
    return federation(fedavg(lr=0.1, batch_size=10), images(5000, (3, 32, 32)), cnn, 100, 50)


def convolutional() -> None:
    """A known benchmark of simulators."""
    fed = cnn_federation()
    for label, kernel in (
        ("tf32 best", "best"),
        ("bf16 best", "best"),
        ("tf32 mapped", "mapped"),
        ("bf16 mapped", "mapped"),
    ):
        engine = Batched(precision=label[:4], kernel=kernel)  # type: ignore[arg-type]
        measure("cnn", label, fed, engine, 30, profile=True)
    asked, conv_graphs.may_be_factored = conv_graphs.may_be_factored, lambda algorithm: False
    measure("cnn", "tf32 best, private copies", fed, Batched(precision="tf32"), 30)
    conv_graphs.may_be_factored = asked


def errors() -> None:
    """Updates against float64, before and after."""
    update_errors(cnn_federation(), {
        f"{precision} {kernel}": Batched(precision=precision, kernel=kernel)  # type: ignore[arg-type]
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
    return federation(named(name, batch_size=64, **extra), images(56320, (1, 32, 32)), model, 10, 10, Dirichlet(1.0))


def generative() -> None:
    """Methods that generate data, a whole round."""
    for name, precision in (("fedevg", "tf32"), ("fedcgan", "tf32"), ("fedcvae", "tf32"), ("fedevg", "bf16")):
        try:
            fed = generative_federation(name)
        except Exception:
            note(part=name, failed=traceback.format_exc()[-1500:])
            continue
        sizes = fed.task.train.size
        note(part=name, sizes=sizes.tolist(), steps=int(((sizes + 63) // 64).sum()))
        engine = Batched(precision=precision)  # type: ignore[arg-type]
        measure(name, f"{precision} best", fed, engine, 1, profile=True)


def generative_before() -> None:
    """The same without compiling, and mapped."""
    for name in ("fedcvae", "fedcgan"):
        fed = generative_federation(name)
        measure(name, "tf32 mapped", fed, Batched(precision="tf32", kernel="mapped"), 1)
        measure(name, "tf32 best uncompiled", fed, Batched(precision="tf32", compiled=False), 1)


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
             fallback=engine._unbatchable)  # fmt: skip


def residual() -> None:
    """ResNet-20 with GroupNorm: three clients with batches of 64, ten with 20, fifty with 10; two local steps."""
    for clients, batch in ((3, 64), (10, 20), (50, 10)):
        data = images(clients * batch * 2, (3, 32, 32))
        fed = federation(fedavg(lr=0.1, batch_size=batch), data, resnet20, clients, clients)
        for label, engine in {
            "tf32 mapped": Batched(precision="tf32", kernel="mapped"), "tf32 best": Batched(precision="tf32"),
        }.items():  # fmt: skip
            measure(f"resnet20 {clients}x{batch}", label, fed, engine, 10)


def warm(name: str, precision: str) -> None:
    """Fill the compiler's cache: one round."""
    begin = time.perf_counter()
    fed = cnn_federation() if name == "cnn" else generative_federation(name)
    fed.round(Batched(precision=precision))  # type: ignore[arg-type]
    print(f"warm {name} {precision}: {time.perf_counter() - begin:.1f} s", flush=True)


METHODS: dict[str, Callable[..., Algorithm]] = {
    "fedavg": fedavg, "momentum": partial(fedavg, momentum=0.9), "adamw": partial(fedavg, optimizer="adamw"),
    "fedprox": partial(fedprox, 0.1), "scaffold": scaffold,
}  # fmt: skip


def table() -> None:
    """Models x methods: the multiple over the loop, 20 clients with two batches of 16, tf32."""
    for model in (cnn, resnet20):
        data = images(640, (3, 32, 32))
        for name, method in METHODS.items():
            part = f"table {model.__name__} {name}"
            try:
                fed = federation(method(lr=0.01, batch_size=16), data, model, 20, 20)
                loop = statistics.median(timed(fed, Loop(), 2)[1])
                note(part=part, loop_ms=round(1e3 * loop, 2))
                measure(part, "tf32 best", fed, Batched(precision="tf32"), 5)
            except Exception:
                note(part=part, failed=traceback.format_exc()[-800:])


SHARED: dict[str, Callable[[], Federation]] = {
    "fedevg": lambda: generative_federation("fedevg", iterations=20),
    "resnet20": lambda: federation(fedavg(lr=0.1, batch_size=64), images(768, (3, 32, 32)), resnet20, 3, 3),
}


def sharing() -> None:
    """One, two and four processes on one card, each with its own rounds: how many rounds a second in all."""
    for name in SHARED:
        for count in (1, 2, 4):
            with tempfile.TemporaryDirectory() as folder:
                call = [sys.executable, "-m", "benchmarks.gpu_kernels", "--member", name, folder]
                members = [subprocess.Popen(call, stdout=subprocess.PIPE, text=True) for _ in range(count)]
                while len(list(Path(folder).glob("ready-*"))) < count and all(one.poll() is None for one in members):
                    time.sleep(0.1)
                (Path(folder) / "go").touch()
                said = [one.communicate()[0].strip().splitlines() for one in members]
            rates = [float(lines[-1]) if lines else 0.0 for lines in said]
            note(part=f"sharing {name}", processes=count, rounds_per_second=round(sum(rates), 3), each=rates)


def member(name: str, folder: str, rounds: int = 10) -> None:
    """One process of ``sharing``: warm up, wait for the others, print rounds per second."""
    fed, engine = SHARED[name](), Batched(precision="tf32")
    timed(fed, engine, 1)
    (Path(folder) / f"ready-{os.getpid()}").touch()
    while not (Path(folder) / "go").exists():
        time.sleep(0.01)
    print(rounds / sum(timed(fed, engine, rounds - 1)[1]) * (rounds - 1) / rounds)


PARTS: dict[str, Callable[[], Any]] = {
    "conform": conform, "cnn": convolutional, "errors": errors, "generative": generative, "fit": whole_rounds,
    "resnet": residual, "before": generative_before, "table": table, "sharing": sharing,
}  # fmt: skip


def main() -> None:
    """Run the parts in order."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(PARTS), default=list(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--warm", nargs=2, metavar=("NAME", "PRECISION"), help="only fill the compiler's cache")
    parser.add_argument("--member", nargs=2, metavar=("NAME", "FOLDER"), help="one process of the part 'sharing'")
    options = parser.parse_args()
    if options.warm:
        warm(*options.warm)
        return
    if options.member:
        member(*options.member)
        return
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
