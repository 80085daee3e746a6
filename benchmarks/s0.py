"""The deep-unfolding experiments in one command: learn all tables in parallel, compare, draw, collect the results.

    PYTHONPATH=src python -m benchmarks.s0 1 2 3 4 --device cuda [--seconds 480] [--jobs 16] [--out FOLDER]

Every table of every environment is learned in its own process; on a GPU these are limited by launching small
kernels, so in parallel they cost little more than one. Then every environment with all its tables is compared on
CPU processes. Everything is in ``runs/s0``, and the same command continues from there; ``--seconds``
ends the learning in time, with its progress saved. ``--out`` gets the tables, the progress, the accuracies of every
round and seed (``results.json``) and the pictures. ``--set`` goes to every command: ``--set unfold.iterations=50``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RECIPES, RUNS = Path("recipes/s0"), Path("runs/s0")
LEARNED = ("duw_fedavg", "duw_fednova")


def recipe_of(name: str) -> Path:
    """``1`` to ``4``, or the name of another recipe of the folder."""
    return RECIPES / (f"environment-{name}.toml" if name.isdecimal() else f"{name}.toml")


def learn(names: list[str], device: str, seconds: float | None, changes: list[str]) -> None:
    """All tables at once; those still busy at the end of the time are asked to stop and save."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    running: dict[str, subprocess.Popen[str]] = {}
    for name in names:
        for entry in LEARNED:
            more = [word for change in (f"engine.device={device}", *changes) for word in ("--set", change)]
            command = [sys.executable, "-m", "fedalloy", "unfold", str(recipe_of(name)), "--entry", entry, *more]
            running[f"{name} {entry}"] = subprocess.Popen(command, env=env, text=True)
    end = time.monotonic() + (seconds or float("inf"))
    while any(one.poll() is None for one in running.values()) and time.monotonic() < end:
        time.sleep(0.5)
    for one in running.values():
        if one.poll() is None:
            one.send_signal(signal.SIGTERM)
    for what, one in running.items():
        print(f"{what}: {'learned' if one.wait() == 0 else f'not finished (exit code {one.returncode})'}", flush=True)


def compare(name: str, jobs: int, changes: list[str]) -> None:
    """All methods of an environment with all seeds, on CPUs."""
    more = [word for change in changes for word in ("--set", change)]
    folder = RUNS / recipe_of(name).stem / "runs"
    command = [sys.executable, "-m", "fedalloy", "compare", str(recipe_of(name)), "-o", str(folder), "-j", str(jobs)]
    subprocess.run([*command, *more], check=False)


def results(name: str) -> dict[str, Any]:
    """Accuracy on the balanced test set of every method, seed and round."""
    found: dict[str, Any] = {}
    for rounds in sorted((RUNS / recipe_of(name).stem / "runs").glob("**/rounds.jsonl")):
        method = rounds.parent.parent.name
        rows = [json.loads(line) for line in rounds.read_text().splitlines()]
        curve = [row["global"]["accuracy"] for row in rows if "global" in row]
        found.setdefault(method, {})[rounds.parent.name] = curve
    return found


def tell(name: str, found: dict[str, Any]) -> None:
    """Mean and standard deviation over seeds in the last round."""
    import statistics

    for method, curves in found.items():
        last = [100 * curve[-1] for curve in curves.values() if curve]
        spread = statistics.stdev(last) if len(last) > 1 else 0.0
        print(f"{recipe_of(name).stem} {method:12} {statistics.mean(last):6.2f} +- {spread:.2f} % ({len(last)} seeds)")


def draw(names: list[str], out: Path) -> None:
    """Maps and rows of all learned tables, if matplotlib is installed."""
    for entry in LEARNED:
        tables = [table for name in names if (table := RUNS / recipe_of(name).stem / f"{entry}.json").exists()]
        for kind in ("weights", "rows"):
            command = [
                sys.executable,
                "-m",
                "fedalloy",
                "plot",
                kind,
                *map(str, tables),
                "-o",
                str(out / f"{entry}-{kind}.png"),
            ]
            if tables:
                subprocess.run(command, check=False)


def take_home(names: list[str], out: Path, found: dict[str, Any]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        for file in (RUNS / recipe_of(name).stem).glob("*.json*"):
            place = out / recipe_of(name).stem
            place.mkdir(exist_ok=True)
            shutil.copy(file, place / file.name)
    (out / "results.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", help="1 2 3 4, or dogs-standin-a, dogs-standin-b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, help="time limit of the learning")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="processes that compare")
    parser.add_argument("--out", type=Path, default=RUNS / "results")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    wanted = parser.parse_args()
    learn(wanted.names, wanted.device, wanted.seconds, wanted.changes)
    ready = [n for n in wanted.names if all((RUNS / recipe_of(n).stem / f"{e}.json").exists() for e in LEARNED)]
    for name in ready:
        compare(name, wanted.jobs, wanted.changes)
    found = {name: results(name) for name in ready}
    take_home(wanted.names, wanted.out, found)
    for name in ready:
        tell(name, found[name])
    draw(wanted.names, wanted.out)


if __name__ == "__main__":
    main()
