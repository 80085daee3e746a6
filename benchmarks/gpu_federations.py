"""Federations on a GPU, and how their rounds are timed, profiled and compared. Without one they run on the CPU, which
says nothing about time, but whether the scripts work."""

from __future__ import annotations

import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Engine, Outcome
from fedalloy.core.types import Context, Examples, Work
from fedalloy.engines.batched import Batched
from fedalloy.engines.profile import collecting
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.federation import FederatedTask, federate
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.tasks.partitions.iid import Iid

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FOUND: list[dict[str, Any]] = []
OUT: list[Path] = []


def synchronize() -> None:
    """Wait for the GPU."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def note(**row: Any) -> None:
    """Print a row at once, and add it to the file: several processes write to one."""
    FOUND.append(row)
    print(json.dumps(row), flush=True)
    if OUT:
        with (OUT[0] / "kernels.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")


def reset_peak() -> None:
    """Begin again to count the largest memory."""
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_mb() -> int:
    """The largest memory since then."""
    return round(torch.cuda.max_memory_allocated() / 1e6) if DEVICE == "cuda" else 0


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
        assert isinstance(objective, ModuleObjective)
        self.task = replace(self.task.to(DEVICE), objective=objective.to(DEVICE))
        params, buffers = ({n: v.to(DEVICE) for n, v in part.items()} for part in objective.init(Key.of(1)))
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
    trainable: Sequence[str] | None = None,
) -> Federation:
    """The first ``cohort`` of ``clients`` take part; ``trainable`` are the leaves to be trained, if not all."""
    objective = ModuleObjective(model, dtype=dtype, trainable=None if trainable is None else tuple(trainable))
    task = federate(data, split or Iid(), clients, objective, test_fraction=0.0, key=Key.of(0))
    return Federation(algorithm, task, torch.arange(cohort))


def timed(fed: Federation, engine: Engine, rounds: int) -> tuple[float, list[float], dict[str, float], Outcome]:
    """Seconds of the first round, of each further one, of the last one's phases, and its outcome."""
    times = []
    for number in range(1, rounds + 2):
        synchronize()
        begin = time.perf_counter()
        watch: AbstractContextManager[dict[str, float]] = collecting() if number > rounds else nullcontext({})
        with watch as phases:
            outcome = fed.round(engine, number)
        synchronize()
        times.append(time.perf_counter() - begin)
    return times[0], times[1:], phases, outcome


def profiled(work: Callable[[], Any], label: str, top: int = 18) -> None:
    """The kernels of some work, by time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA] if DEVICE == "cuda" else None) as found:
        work()
        synchronize()
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
        lanes[0].values["at"].zero_()
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
            reset_peak()
            first, times, phases, outcome = timed(fed, engine, rounds)
        spread = [round(1e3 * one, 3) for one in (min(times), max(times))]
        note(part=part, variant=label, ms=round(1e3 * statistics.median(times), 3), spread_ms=spread,
             first_s=round(first, 2), phases_ms={n: round(1e3 * v, 2) for n, v in phases.items()},
             peak_mb=peak_mb(), fallback=engine._unbatchable or engine._uncaptured,
             said=sorted({str(one.message)[:700] for one in said if "deprecated" not in str(one.message)})[:4],
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
