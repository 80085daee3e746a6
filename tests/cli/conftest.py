"""A recipe that takes a moment, and command lines over other copies of the source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.lines import Nursery

RECIPE = """
name = "tiny"
[task]
model = "logistic"
[partition]
kind = "dirichlet"
alpha = 0.5
clients = 6
[devices]
epochs = { low = 1, high = 2 }
success = 0.8
[sampling]
cohort = 4
[algorithm]
name = "fedavg"
lr = 0.2
batch_size = 64
[run]
rounds = 4
seeds = [0, 1]
target = 0.5
"""


@pytest.fixture
def nurseries(tmp_path: Path) -> Iterator[type[Nursery]]:
    """Nurseries over other copies of the source, closed at the end."""
    made: list[Nursery] = []

    class Kept(Nursery):
        def __init__(self, source: Path, scratch: Path) -> None:
            super().__init__(source, scratch)
            made.append(self)

    yield Kept
    for nursery in made:
        nursery.close()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path
