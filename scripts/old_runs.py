"""Interrupted runs that later versions must be able to continue: made once, stored with the tests, and continued by
them.

    PYTHONPATH=src python scripts/old_runs.py make tests/experiment/old_runs
    PYTHONPATH=src python scripts/old_runs.py continue tests/experiment/old_runs OUT.json

``make`` writes runs of four methods that were stopped after round 2 of 4, a comparison that was stopped in its second
method, and ``expected.json``: the results of continuing each. ``continue`` works on copies and writes the same
numbers with digests of records and checkpoints, so that two versions can be compared bit for bit on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, STOPPED = 4, 2
_TASK = {"dataset": "digits", "model": {"kind": "mlp", "hidden": [6]}}
# Double precision: the classifier's 200 epochs enlarge the rounding of float32, which differs between processors.
_ENERGY = {"dataset": "digits", "model": {"kind": "energy_mlp", "hidden": [6]}, "dtype": "float64"}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"lr": 0.2},
    "scaffold": {"lr": 0.2},
    "superfed_mm": {"lr": 0.2, "start": 0.0},
    "fedevg": {"lr": 0.001, "per_class": 2},
}


def recipe_of(name: str) -> dict[str, Any]:
    """A run that takes seconds: digits, four clients of which three take part, a tiny model."""
    return {
        "task": _ENERGY if name == "fedevg" else _TASK,
        "partition": {"kind": "classes", "clients": 4, "per_client": 3},
        "sampling": {"kind": "uniform", "cohort": 3},
        "algorithm": {"name": name, "batch_size": 64, **METHODS[name]},
        "run": {"rounds": ROUNDS, "seeds": [7]},
        "engine": {"kind": "loop", "threads": 1},
    }


def comparison() -> dict[str, Any]:
    """Two methods on the same recipe."""
    entries = [{"name": "fedavg"}, {"name": "scaffold"}]
    return {**recipe_of("fedavg"), "algorithm": {"lr": 0.2, "batch_size": 64}, "compare": entries}


def make(place: Path) -> None:
    """Empty ``place`` and fill it."""
    shutil.rmtree(place, ignore_errors=True)
    for name in METHODS:
        _interrupted(recipe_of(name), place / name)
    _interrupted_comparison(place / "comparison")
    expected = {name: _without_digests(found) for name, found in continued(place).items()}
    (place / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")


def continued(place: Path) -> dict[str, Any]:
    """Continue copies of all runs; returns their results by the run's name."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "runs"
        shutil.copytree(place, copy)
        for name in METHODS:
            continue_run(copy / name)
        continue_comparison(copy / "comparison")
        return {str(run.relative_to(copy)): reached(run) for run in runs_in(copy)}


def runs_in(place: Path) -> list[Path]:
    """The folders of runs below a folder."""
    return sorted(file.parent for file in place.rglob("status.json"))


def continue_run(folder: Path) -> None:
    """As ``fedalloy run FOLDER --resume`` does."""
    from fedalloy.experiment.recipe import load, resolve

    resolve(load(folder)).run(folder, resume=True)


def continue_comparison(folder: Path) -> None:
    """As the same ``fedalloy compare`` does after an interruption."""
    from fedalloy import compare

    compare(comparison(), folder, processes=1)


def reached(folder: Path) -> dict[str, Any]:
    """State, the rows of all rounds without clocks, and digests of records and of the last checkpoint."""
    from fedalloy import read_run

    run = read_run(folder)
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    last = folder / "checkpoints" / f"round-{ROUNDS:06d}.safetensors"
    files = [folder / "rounds.jsonl", folder / "clients.jsonl", last]
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    return {"state": status["state"], "rounds": list(run.rounds()), "digests": digests}


def _interrupted(recipe: dict[str, Any], folder: Path) -> None:
    from fedalloy.experiment.recipe import parse, resolve

    resolve(parse(recipe)).run(folder, watcher=_stopping(folder))
    (folder / "lock").unlink(missing_ok=True)


def _interrupted_comparison(folder: Path) -> None:
    """The first method ends; the second is stopped, as by Ctrl-C."""
    from fedalloy import compare

    both = comparison()
    compare({**both, "compare": both["compare"][:1]}, folder, processes=1)
    _interrupted(recipe_of("scaffold"), folder / "scaffold" / "seed-7")
    (folder / "comparison.json").write_text(json.dumps({"order": ["fedavg", "scaffold"]}) + "\n", encoding="utf-8")


def _stopping(folder: Path) -> Callable[[Any], None]:
    from fedalloy.experiment.records.stop import ask_to_stop

    def watch(event: Any) -> None:
        if event.row["round"] == STOPPED:
            ask_to_stop(folder)

    return watch


def _without_digests(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "digests"}


def main() -> None:
    """One of the two steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["make", "continue"])
    parser.add_argument("place", type=Path)
    parser.add_argument("out", nargs="?", type=Path)
    asked = parser.parse_args()
    if asked.step == "make":
        make(asked.place)
    else:
        text = json.dumps(continued(asked.place), indent=1) + "\n"
        asked.out.write_text(text, encoding="utf-8") if asked.out else print(text)


if __name__ == "__main__":
    main()
