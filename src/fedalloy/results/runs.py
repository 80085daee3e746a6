"""The runs in folders, their order, and which of them belong together."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records.reading import QUICK, find_runs, is_run
from fedalloy.results.outcome import RunOutcome, read_outcome

TUNING = "tuning"
"""The folder of a comparison's tuning runs, which are not results."""


class Named(Protocol):
    """A run, or a summary of one."""

    @property
    def name(self) -> str:
        """The algorithm's name."""


Run = TypeVar("Run", bound=Named)


def by_name(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """The runs of every algorithm, in their order."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.name, []).append(run)
    return groups


def runs_in(places: Sequence[Path]) -> list[Path]:
    """The runs in some folders and below, without tuning runs."""
    found = [run for place in places for run in find_runs(place) if TUNING not in run.relative_to(place).parts]
    if not found:
        raise CheckpointError(f"no run in {', '.join(map(str, places))}; name run folders, or a folder that holds runs")
    return list(dict.fromkeys(found))


def read_outcomes(places: Sequence[Path]) -> list[RunOutcome]:
    """The outcomes of the runs in some folders, in the order of their comparison."""
    order = order_of(places)
    return sorted(told_apart([read_outcome(run) for run in runs_in(places)]), key=lambda run: place_in(order, run))


def order_of(places: Sequence[Path]) -> list[str]:
    """The algorithms of the comparisons among the folders, as their recipes name them."""
    folders = dict.fromkeys(folder for place in places for folder in (place, *_comparison_of(place)))
    files = [folder / "comparison.json" for folder in folders]
    return [name for file in files if file.is_file() for name in json.loads(file.read_text(encoding="utf-8"))["order"]]


def _comparison_of(run: Path) -> list[Path]:
    """The folder of the comparison that a run may belong to."""
    return [run.parents[1]] if is_run(run) and len(run.parents) > 1 else []


def place_in(order: Sequence[str], run: RunOutcome) -> tuple[int, str, int]:
    """A key that sorts runs by that order, then by name and seed."""
    name = run.name.removesuffix(QUICK)  # the recipe of a shortened comparison has the names without the suffix
    return order.index(name) if name in order else len(order), run.name, run.seed


def told_apart(runs: Sequence[RunOutcome]) -> list[RunOutcome]:
    """Runs with the same name and seed are different experiments: the folder is added to their names."""
    twice = {name for (name, _), count in Counter((run.name, run.seed) for run in runs).items() if count > 1}
    folders = [run.folder for run in runs if run.name in twice and run.folder]
    if len(folders) < 2:
        return list(runs)
    common = Path(os.path.commonpath(folders))
    return [_with_place(run, common) if run.name in twice else run for run in runs]


def _with_place(run: RunOutcome, common: Path) -> RunOutcome:
    folder = run.folder or common
    # In a comparison the last folder is the seed and the one before it the name: neither adds information.
    parts = [part for part in folder.relative_to(common).parts if part not in (run.name, f"seed-{run.seed}")]
    return replace(run, name=f"{run.name} ({'/'.join(parts)})" if parts else run.name)
