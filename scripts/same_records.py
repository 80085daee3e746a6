"""Compare the records of two versions of the source: run with one, run with the other, compare.

    PYTHONPATH=before/src python scripts/same_records.py run before.json
    PYTHONPATH=after/src python scripts/same_records.py run after.json
    python scripts/same_records.py compare before.json after.json

Every case is a short run of the loop engine in one thread; two tables of deep unfolding are learned as well.
All numbers of the records, and a hash of every tensor of the last checkpoint, must be the same to the last bit. For the
methods in ``NEAR``, which may use a recorded norm instead of a pass over the updates, the records must agree to 1e-12
(the table learned by a first-order gradient, which amplifies small differences, to 1e-9), relative for numbers
above 1, and the hashes are not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BASE = ["engine.kind='loop'", "partition.kind='dirichlet'", "partition.alpha=0.5"]
_RECIPE = """
[task]
dataset = { kind = "digits", flat = %s }
model = %s
valid_fraction = 0.1

[partition]
clients = 8

[algorithm]
name = "%s"
batch_size = 16

[run]
rounds = 4
checkpoint_every = 1
"""
_MLP = '{ kind = "mlp", hidden = [16] }'
_NORM = '{ kind = "with_norm:model" }'
_NORM_MODULE = """
from collections import OrderedDict

from torch import nn


def model(inputs, classes):
    layers = {"flat": nn.Flatten(), "first": nn.Linear(inputs, 16), "norm": nn.BatchNorm1d(16), "relu": nn.ReLU()}
    return nn.Sequential(OrderedDict(layers, head=nn.Linear(16, classes)))
"""
CASES: dict[str, tuple[str, str, list[str]]] = {
    "fedavg": ("fedavg", _MLP, ["algorithm.momentum=0.5", "sampling.cohort=5"]),
    "fedavg, batch norm": ("fedavg", _NORM, []),
    "scaffold": ("scaffold", _MLP, ["sampling.cohort=5"]),
    "fednova, failing links": (
        "fednova", _MLP, ["devices.success=0.6", "devices.on_failure='resend'", "algorithm.momentum=0.9"]),
    "ditto": ("ditto", _MLP, ["algorithm.personal_epochs=2", "sampling.cohort=5"]),
    "superfed_mm": ("superfed_mm", _MLP, ["sampling.cohort=5"]),
    "aaggff_d": ("aaggff_d", _MLP, ["sampling.cohort=5"]),
    "ewwa": ("ewwa", _MLP, []),
    "fedcams": ("fedcams", _MLP, ["sampling.cohort=5"]),
    "median": ("median", _NORM, []),
    "krum": ("krum", _NORM, []),
    "fedbn": ("fedbn", _NORM, []),
    "fedrep": ("fedrep", _MLP, []),
    "fedevg": ("fedevg", _MLP, ["algorithm.per_class=2"]),
    "fedcvae": ("fedcvae", '{ kind = "cvae_rows", width = 16, latent = 4 }', []),
    "fedboosting": ("fedboosting", _MLP, []),
    "fedlayerwise": ("fedlayerwise", _MLP, []),
    "fedadp": ("fedadp", _MLP, []),
    "qfedavg": ("qfedavg", _MLP, []),
    "fedmgda": ("fedmgda", _MLP, []),
}  # fmt: skip
NEAR = {"fedlayerwise": 1e-12, "fedadp": 1e-12, "qfedavg": 1e-12, "fedmgda": 1e-12, "unfold, first_order": 1e-9}


def main() -> None:
    """``run FILE`` or ``compare BEFORE AFTER``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("run", help="write the records of the fedalloy that is found").add_argument("file", type=Path)
    beside = steps.add_parser("compare", help="exit with 1 where two files differ")
    beside.add_argument("before", type=Path)
    beside.add_argument("after", type=Path)
    asked = parser.parse_args()
    if asked.step == "run":
        asked.file.write_text(json.dumps(run_all(), indent=1), encoding="utf-8")
        return
    bad = compare(*(json.loads(file.read_text(encoding="utf-8")) for file in (asked.before, asked.after)))
    sys.exit(f"differ: {', '.join(bad)}" if bad else None)


def run_all() -> dict[str, Any]:
    """The records of every case."""
    with tempfile.TemporaryDirectory() as there:
        place = Path(there)
        (place / "with_norm.py").write_text(_NORM_MODULE, encoding="utf-8")
        found = {name: run_case(place, name) for name in CASES}
        return found | {f"unfold, {gradient}": learn_table(place, gradient) for gradient in ("exact", "first_order")}


def run_case(place: Path, name: str) -> dict[str, Any]:
    """The results of one case: its rows, and a hash of every tensor of its last checkpoint."""
    algorithm, model, sets = CASES[name]
    _write_recipe(place, algorithm, model)
    folder = place / name.replace(", ", "-").replace(" ", "-")
    _fedalloy(place, "run", "recipe.toml", "--allow-imports", "-o", folder, *_sets([*_BASE, *sets]))
    rows = {file: (folder / file).read_text(encoding="utf-8") for file in ("rounds.jsonl", "clients.jsonl")}
    last = max((folder / "checkpoints").rglob("*.safetensors"))
    return {file: [json.loads(row) for row in text.splitlines()] for file, text in rows.items()} | {
        "state": _digests(last)
    }


def learn_table(place: Path, gradient: str) -> dict[str, Any]:
    """A table of weights learned with failing links."""
    _write_recipe(place, "duw_fedavg", _MLP)
    table = place / f"{gradient}.json"
    learning = ["unfold.iterations=3", f"unfold.gradient='{gradient}'"]
    failing = ["devices.success=0.8", "devices.on_failure='resend'"]
    _fedalloy(place, "unfold", "recipe.toml", "-o", table, *_sets([*_BASE, *learning, *failing]))
    return {"table": json.loads(table.read_text(encoding="utf-8"))}


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The cases that do not agree; prints the differences of each."""
    return [case for case in before if not _agrees(case, before[case], after.get(case))]


def _agrees(case: str, before: Any, after: Any) -> bool:
    found = dict(differences(before, after))
    if not found:
        print(f"{case:28} same")
        return True
    place, worst = max(found.items(), key=lambda one: one[1])
    print(f"{case:28} {len(found)} differ, at most {worst:.3g}: {place}")
    return all(size <= NEAR.get(case, 0.0) for at, size in found.items() if case not in NEAR or not _hashed(at))


def _hashed(place: str) -> bool:
    return place.startswith("/state")


def differences(one: Any, other: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """Where two values differ and by how much; infinite where they are not both numbers."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in [*one, *(other.keys() - one.keys())]:
            yield from differences(one.get(name, math.inf), other.get(name, math.inf), f"{place}/{name}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for position, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{place}/{position}")
    elif not _same(one, other):
        yield place, _distance(one, other)


def _same(one: Any, other: Any) -> bool:
    """NaN equals NaN: both runs have no value there."""
    return bool(one == other or (one != one and other != other))


def _distance(one: Any, other: Any) -> float:
    if not all(isinstance(value, float | int) and math.isfinite(value) for value in (one, other)):
        return math.inf
    return float(abs(one - other) / max(1.0, abs(one)))


def _write_recipe(place: Path, algorithm: str, model: str) -> None:
    flat = "false" if "cvae" in algorithm else "true"
    (place / "recipe.toml").write_text(_RECIPE % (flat, model, algorithm), encoding="utf-8")


def _sets(sets: list[str]) -> list[str]:
    return [word for one in sets for word in ("--set", one)]


def _fedalloy(place: Path, *words: object) -> None:
    command = [sys.executable, "-m", "fedalloy", *map(str, words)]
    # With several threads the order of sums would differ.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))}\n{done.stdout}{done.stderr}")


def _digests(file: Path) -> dict[str, str]:
    from safetensors.torch import load_file

    def digest(leaf: Any) -> str:
        return hashlib.sha256(leaf.contiguous().numpy().tobytes()).hexdigest()

    return {name: digest(leaf) for name, leaf in load_file(file).items()}


if __name__ == "__main__":
    main()
