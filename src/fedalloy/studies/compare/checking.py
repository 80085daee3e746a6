"""Arguments of a comparison that are checked before anything runs: with a wrong one every run would fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedalloy.core import registry
from fedalloy.core.errors import SpecError


def check_arguments(processes: object, watcher: object, track: Any) -> None:
    """Refuse what is no number of processes, no function and no list of trackers."""
    if processes is not None and (not isinstance(processes, int) or isinstance(processes, bool) or processes < 1):
        raise SpecError(f"compare: processes is {processes!r}; it must be a whole number of at least 1")
    if watcher is not None and not callable(watcher):
        raise SpecError(f"compare: watcher must be a function of a run's news, or None, got {watcher!r}")
    if isinstance(track, str) or not isinstance(track, Iterable):
        raise SpecError(f"compare: track must be a list, such as ['tensorboard'], got {track!r}")
    for name in track:
        if not isinstance(name, str):
            raise SpecError(f"compare: trackers are given by name, as other processes make them, got {name!r}")
        registry.find("tracker", name)


def check_folder(folder: object) -> None:
    """Refuse what is no path of a folder."""
    if folder is not None and (not isinstance(folder, str | Path) or not str(folder)):
        raise SpecError(f"compare: folder must be the path of a folder, or None for the default, got {folder!r}")


def check_engine(engine: object) -> None:
    """Refuse an engine that no recipe can hold."""
    if engine is not None and not isinstance(engine, str):
        raise SpecError(
            f"compare: engine must be a name, because a recipe holds it, got {type(engine).__name__}: write "
            "engine='workers', and its arguments as engine_options={'processes': 2}"
        )


def check_grid(grid: object) -> None:
    """Refuse a grid that is no table of lists, and lists without a value, which would be left out."""
    if not isinstance(grid, Mapping):
        raise SpecError(f"compare: grid must be a table, such as {{'algorithm.lr': [0.1, 0.5]}}, got {grid!r}")
    for path, values in grid.items():
        inside = values if isinstance(values, Mapping) else {path: values}
        for name, one in inside.items():
            if isinstance(one, str) or not isinstance(one, Iterable) or not list(one):
                raise SpecError(
                    f"compare: grid: '{name}' must be a list of values to try, such as [0.1, 0.5], got {one!r}"
                )
