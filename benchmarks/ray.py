"""The engine ``ray``: checked on a cluster of three raylets, and measured.

    python -m benchmarks.ray --conform [--brief]     # against the loop and under faults, see benchmarks/ray_conform.py
    python -m benchmarks.ray --speed [--repeats 9]   # W3: two workers against `workers` and against Flower's simulation
    python -m benchmarks.ray --memory                # what a round adds to the driver: cohorts of 10, 100 and 1000
    python -m benchmarks.ray --costs                 # the constants of docs/scale.md

``--speed`` takes turns as ``benchmarks.peers`` does, in whose environment Flower runs (``python -m benchmarks.peers
--prepare`` makes it); it needs an idle machine. Results are written to benchmarks/results/ray.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import fedalloy
from benchmarks.peers.environments import PEERS, Peer
from benchmarks.peers.machine import describe
from benchmarks.peers.measuring import measure
from benchmarks.workloads import WORKLOADS, Workload, task_of
from fedalloy.engines.cluster.packing import pack, unpack
from fedalloy.engines.ray import Ray

RESULTS = Path(__file__).parent / "results" / "ray.json"
SIDES = (Peer("fedalloy", "workers"), Peer("ray", "ray"), *(peer for peer in PEERS if peer.module == "flower"))
COHORTS = (10, 100, 1000)
WIDTH, HIDDEN = 784, 2000


def wide_model() -> nn.Module:
    """1.59 million parameters."""
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def speed(repeats: int, seconds: float, patience: float) -> dict[str, Any]:
    """Milliseconds a round of W3, in turns; the engine ``workers`` is called fedalloy there."""
    load = next(one for one in WORKLOADS if one.name == "W3")
    with tempfile.TemporaryDirectory() as folder:
        return measure(load, SIDES, Path(folder) / "W3", repeats, seconds, 60.0, patience)


def memory() -> dict[str, Any]:
    """The most private memory that the driver took during two rounds, above that before the first, by the size of the
    cohort; looked at every 5 ms. The object store is memory of another process."""
    found: dict[str, Any] = {"parameters": sum(leaf.numel() for leaf in wide_model().parameters()), "mb": {}}
    load = Workload("memory", "", wide_model, (WIDTH,), max(COHORTS), 2, 2, max(COHORTS), 1)
    task = task_of(load)
    for cohort in (2, *COHORTS):  # the first one loads Ray, and is not reported
        with _watching() as seen:
            fedalloy.fit(
                fedalloy.algorithms.fedavg(lr=0.05, batch_size=2), task, rounds=2, cohort=cohort, engine=Ray(workers=2),
                evaluate_every=2, evaluate_clients=1,
            )  # fmt: skip
        found["mb"][cohort] = round((max(seen) - seen[0]) / 1e6, 1)
        print(f"cohort {cohort}: {found['mb'][cohort]} MB, {max(seen) / 1e6:.0f} MB in all", flush=True)
    del found["mb"][2]
    return found


@contextmanager
def _watching() -> Iterator[list[float]]:
    seen, ended = [_private()], threading.Event()

    def look() -> None:
        while not ended.wait(0.005):
            seen.append(_private())

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        ended.set()
        watcher.join()


def _private() -> float:
    """Bytes of anonymous memory of this process, now."""
    text = Path("/proc/self/status").read_text()
    return 1024.0 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("RssAnon:"))


def costs() -> dict[str, Any]:
    """The constants of the cost model: a message, a block's own cost, bytes through the object store, summing."""
    engine = Ray(workers=2, block=1)
    load = replace(next(one for one in WORKLOADS if one.name == "W1"), clients=256, cohort=256, examples=1)
    task, algorithm = task_of(load), fedalloy.algorithms.fedavg(lr=0.05, batch_size=1)
    seconds: list[float] = []
    fedalloy.fit(
        algorithm, task, rounds=12, cohort=256, engine=_kept(engine), evaluate_every=12, evaluate_clients=1,
        watcher=lambda event: seconds.append(event.seconds["clients"]),
    )  # fmt: skip
    pool = engine._pool
    assert pool is not None
    import ray

    actor = pool.members[0].actor
    leaves = {"w": torch.zeros(25_000_000)}
    there = ray.put(pack(leaves))
    found = {
        "block_ms": 1e3 * median(seconds[2:]) / 256,
        "message_ms": 1e3 * median(_times(lambda: ray.get(actor.rows.remote({}, "")), 200)),
        "put_gb_s": 0.1 / median(_times(lambda: ray.put(pack(leaves)), 9)),
        "get_gb_s": 0.1 / median(_times(lambda: unpack(ray.get(there))["w"].sum(), 9)),
        "add_gb_s": _adding(pool),
    }
    Ray.close(engine)
    return {name: round(value, 4) for name, value in found.items()}


def _adding(pool: Any) -> float:
    """Gigabytes of partial sums a second that one worker reads from the object store and adds."""
    import ray

    pieces = [ray.put(pack({number: {"w": torch.rand(4_000_000)}})) for number in range(8)]
    actor = pool.members[0].actor
    taken = _times(lambda: ray.get(actor.add.remote({"w": torch.float32}, *pieces)), 7)
    return 8 * 4 * 4e6 / 1e9 / median(taken)


def _times(what: Any, count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        what()
        found.append(time.perf_counter() - began)
    return found


def _kept(engine: Ray) -> Ray:
    """The engine with its workers kept at the end of a run."""
    engine.close = lambda: None  # type: ignore[method-assign]
    return engine


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("conform", "brief", "speed", "memory", "costs"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn")
    parser.add_argument("--patience", type=float, default=5.0, help="seconds to wait for an idle machine, per turn")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def main() -> None:
    given = arguments()
    if given.conform:
        from benchmarks.ray_conform import BRIEF, WHOLE, conform

        with tempfile.TemporaryDirectory() as folder:
            wrong = conform(BRIEF if given.brief else WHOLE, Path(folder))
        raise SystemExit(1 if any(wrong.values()) else 0)
    found: dict[str, Any] = json.loads(given.output.read_text()) if given.output.exists() else {}
    if given.speed:
        found["speed"] = speed(given.repeats, given.seconds, given.patience)
    if given.memory:
        found["memory"] = memory()
    if given.costs:
        found["costs"] = costs()
    found["machine"] = {**describe(), "torch": torch.__version__, "date": datetime.now(UTC).date().isoformat()}
    given.output.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: found[name] for name in ("speed", "memory", "costs") if getattr(given, name)}, indent=1))


if __name__ == "__main__":
    main()
