"""The time of an outer iteration of deep unfolding. Environment I: 5 clients, 10 rounds, 2 epochs, batch 50.

    PYTHONPATH=src python -m benchmarks.unfold [--public FOLDER] [--iterations 5] [--json FILE]

Ours runs in a separate process with one thread. With ``--public`` so does the published script: FOLDER is a checkout
of that experiment outside of this repository (``main_mnist_env1_2.py`` and its ``mnist`` folder); it gets a stub
of torchvision, since its test set is not used for learning. The two alternate, iteration by iteration, so that both
have the same load; the first iteration of each is not counted. Reported are wall-clock and processor
seconds, peak memory, and a computed floor: the arithmetic of one forward and backward pass over every batch
(and one pass over every example for the final loss) at the rate of a large matrix product on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SIDES = ("ours", "public")
ROUNDS, EPOCHS, BATCH = 10, 2, 50
SCRIPT, END = "main_mnist_env1_2.py", "#%% Figures"
TORCHVISION = {
    "__init__": "from . import datasets, transforms",
    "transforms": "class Compose:\n    def __init__(self, steps): pass\n"
    "class ToTensor: pass\nclass Normalize:\n    def __init__(self, *_): pass\n",
    "datasets": "import torch\nclass MNIST(torch.utils.data.Dataset):\n    def __init__(self, **_): pass\n"
    "    def __len__(self): return 10000\n    def __getitem__(self, i): return torch.zeros(1, 28, 28), 0\n",
}


class Clock:
    """Records every iteration, then waits for its turn."""

    def __init__(self) -> None:
        self.since: tuple[float, float] | None = None

    def begin(self) -> None:
        """Wait for a line on standard input, then start."""
        sys.stdin.readline()
        self.since = (time.perf_counter(), time.process_time())

    def end(self) -> None:
        """Print the time of the iteration."""
        assert self.since is not None
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        wall, cpu = time.perf_counter() - self.since[0], time.process_time() - self.since[1]
        print(json.dumps({"wall_s": wall, "cpu_s": cpu, "peak_mb": peak}), flush=True)


def ours(iterations: int) -> None:
    """The learning of this package."""
    import torch

    import fedalloy

    torch.set_num_threads(1)
    task = fedalloy.task({"kind": "duw_mnist", "environment": "one_client_large"}, test_fraction=0.0)
    algorithm = fedalloy.algorithms.fedavg(lr=0.01, epochs=EPOCHS, batch_size=BATCH)
    clock = Clock()
    clock.begin()

    def told(event: Any) -> None:
        clock.end()
        if event.iteration < event.iterations:
            clock.begin()

    fedalloy.unfold(algorithm, task, rounds=ROUNDS, iterations=iterations, watcher=told)


def public(iterations: int, folder: str) -> None:
    """The published learning; it prints before every iteration, and the clock hooks into that."""
    import torch

    torch.set_num_threads(1)
    os.chdir(folder)
    clock, begun = Clock(), False

    def listen(*words: Any, **_: Any) -> None:
        nonlocal begun
        if words and isinstance(words[0], int):
            if begun:
                clock.end()
            begun = True
            clock.begin()

    source = re.sub(r"(?m)^M = \d+", f"M = {iterations}", Path(SCRIPT).read_text(encoding="utf-8").split(END)[0])
    exec(compile(source, SCRIPT, "exec"), {"__name__": "published", "print": listen})
    clock.end()


def race(sides: list[list[str]], iterations: int, env: dict[str, str]) -> list[list[dict[str, float]]]:
    """One iteration of each in turn; the first of each is not counted."""
    children = [
        subprocess.Popen(side, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) for side in sides
    ]
    told: list[list[dict[str, float]]] = [[] for _ in children]
    for _ in range(iterations):
        for side, child, lines in zip(sides, children, told, strict=True):
            assert child.stdin
            assert child.stdout
            child.stdin.write("go\n")
            child.stdin.flush()
            line = child.stdout.readline()
            if not line:
                raise SystemExit(f"{' '.join(side)} ended early")
            lines.append(json.loads(line))
    for child in children:
        child.communicate()
    return [lines[1:] for lines in told]


def floor() -> dict[str, float]:
    """The arithmetic of an iteration, and the seconds that it takes at the rate of a large matrix product."""
    import torch

    torch.set_num_threads(1)
    sizes, layers = (1042, 1023, 862, 1184, 4459), ((784, 128), (128, 128), (128, 10))
    weights = sum(a * b for a, b in layers)
    # Forward, gradient by the weights, gradient by the inputs of all layers but the first.
    example = 2 * (2 * weights + sum(a * b for a, b in layers[1:]))
    flops = sum(sizes) * example * (ROUNDS * EPOCHS + 1)
    one, other = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = float("inf")
    for _ in range(12):
        begun = time.process_time()
        torch.mm(one, other)
        best = min(best, time.process_time() - begun)
    rate = 2 * 1024**3 / best
    return {"gigaflop": flops / 1e9, "gigaflop_per_s": rate / 1e9, "floor_s": flops / rate}


def summary(name: str, lines: list[dict[str, float]]) -> dict[str, Any]:
    """Medians, and the peak."""
    medians = {key: statistics.median(line[key] for line in lines) for key in ("wall_s", "cpu_s")}
    return {"side": name, **medians, "peak_mb": max(line["peak_mb"] for line in lines), "iterations": len(lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--public", metavar="FOLDER")
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.side == "ours":
        ours(wanted.iterations)
    elif wanted.side == "public":
        public(wanted.iterations, wanted.public)
    else:
        report(wanted.public, wanted.iterations, wanted.json)


def report(folder: str | None, iterations: int, file: str | None) -> None:
    """Measure both, then print a table."""
    count = iterations + 1
    names = [name for name in SIDES if name == "ours" or folder]
    with tempfile.TemporaryDirectory() as scratch:
        stand_in = Path(scratch) / "torchvision"
        stand_in.mkdir()
        for module, text in TORCHVISION.items():
            (stand_in / f"{module}.py").write_text(text)
        path = os.pathsep.join([*(entry for entry in sys.path if entry), scratch])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": path, "MPLBACKEND": "agg"}
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.unfold", "--iterations", str(count)]
        more = ["--public", str(Path(folder).resolve())] if folder else []
        told = race([[*command, "--side", name, *more] for name in names], count, env)
    found: dict[str, Any] = {"floor": floor(), "sides": [summary(*pair) for pair in zip(names, told, strict=True)]}
    for side in found["sides"]:
        print(f"{side['side']:8} {side['wall_s']:7.2f} s wall {side['cpu_s']:7.2f} s cpu {side['peak_mb']:7.0f} MB")
    print(f"floor    {found['floor']['floor_s']:7.2f} s  ({found['floor']['gigaflop']:.0f} GFLOP at "
          f"{found['floor']['gigaflop_per_s']:.0f} GFLOP/s)")  # fmt: skip
    if len(found["sides"]) == 2:
        mine, theirs = found["sides"]
        found["ratio"] = {key: theirs[key] / mine[key] for key in ("wall_s", "cpu_s", "peak_mb")}
        print("public / ours: " + ", ".join(f"{key} {value:.1f}" for key, value in found["ratio"].items()))
    if file:
        Path(file).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
