"""Recipes: untrusted files, checked as by ``fedalloy recipe check``."""

from __future__ import annotations

import functools
from pathlib import Path

from benchmarks.fuzz.driving import Way
from benchmarks.fuzz.mutating import Case

_HERE = Path(__file__).resolve().parents[2] / "recipes"
_SMALL = 2_500


@functools.cache
def examples() -> list[Case]:
    """The recipes of this repository that read no files."""
    found = [file.read_bytes() for file in sorted(_HERE.rglob("*.toml"))]
    whole = b"""
name = "everything"
[task]
dataset = { kind = "synthetic", examples = 60 }
model = { kind = "mlp", hidden = [4] }
test_fraction = 0.2
[partition]
kind = "dirichlet"
clients = 4
alpha = 0.5
[algorithm]
name = "fedavg"
lr = 0.1
batch_size = 8
[weighting]
kind = "samples"
[server]
kind = "sgd"
lr = 1.0
[sampling]
cohort = 2
[devices]
success = 0.9
on_failure = "resend"
[evaluate]
metrics = ["accuracy", "loss"]
[run]
rounds = 2
seeds = [1, 2]
max_norm = 10.0
[engine]
kind = "loop"
[[compare]]
name = "fedprox"
set = { "algorithm.mu" = 0.1 }
"""
    small = [data for data in found if len(data) < _SMALL and b"claims" not in data and b"table" not in data]
    return [{"recipe.toml": data} for data in [whole, *small]]


def read(case: Case, folder: Path) -> str:
    """Load, check, and resolve every entry, without running anything."""
    from fedalloy.experiment.recipe import entry_names, load, resolve
    from fedalloy.studies.compare.comparing import check_seeds

    file = folder / "recipe.toml"
    file.write_bytes(case.get("recipe.toml", b""))
    found = load(file)
    resolve(found)
    for entry in entry_names(found)[:2]:
        resolve(found, entry=entry)
    check_seeds(found)
    return "fine"


WAY = Way("recipes", examples, read, 1000, reads_anywhere=True)
