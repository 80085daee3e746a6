"""Checks of a run's files, as far as readers rely on them: an edited or damaged entry gives an error that names it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records.shapes import row_fault

Types = tuple[type, ...]
_NUMBER: Types = (int, float)
_RECIPE: dict[str, Types] = {
    "name": (str,), "run": (dict,), "task": (dict,), "evaluate": (dict,), "algorithm": (dict,), "engine": (dict,),
    "partition": (dict,), "run.rounds": (int,), "run.seeds": (list,), "run.seed": (int,), "run.target": _NUMBER,
    "run.target_metric": (str,), "run.target_on": (str,), "evaluate.metrics": (list,), "run.metrics": (list,),
    "algorithm.name": (str,), "compare": (list,),
}  # fmt: skip
_MANIFEST: dict[str, Types] = {
    "sizes": (list,), "class_counts": (list,), "names": (list,), "clients": (int,), "digest": (str,), "unused": (int,),
    "split": (dict,), "split.train": (int,), "split.test": (int,), "split.labels": (str,), "split.rows": (str,),
    "split.common_test": (bool,),
}  # fmt: skip
_ROUND: dict[str, Types] = {
    "round": (int,), "ids": (list,), "dropped": (dict,), "weights": (list, dict, type(None)), "absent": (list,),
    "evaluation": (dict,), "evaluation_global": (dict,), "evaluation_mix": (dict,), "global": (dict,), "info": (dict,),
    "train_loss": (*_NUMBER, type(None)), "bytes_up": _NUMBER, "bytes_down": _NUMBER, "simulated_seconds": _NUMBER,
}  # fmt: skip
_CLIENTS: dict[str, Types] = {"round": (int,), "ids": (list,), "model": (str,), "split": (str,)}


def checked_recipe(recipe: dict[str, Any], path: Path) -> dict[str, Any]:
    """The stored recipe, if the parts that readers use are valid."""
    _check(recipe, _RECIPE, str(path))
    seeds = recipe.get("run", {}).get("seeds", [0])
    if not seeds or not all(isinstance(seed, int) for seed in seeds):
        raise _damaged(str(path), "run.seeds", seeds)
    return recipe


def checked_manifest(manifest: dict[str, Any] | None, path: Path) -> dict[str, Any] | None:
    """The description of the partition, where there is one."""
    _check(manifest or {}, _MANIFEST, str(path))
    return manifest


def checked_round(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A row of ``rounds.jsonl``; its scores are tables by metric."""
    _check(row, _ROUND, where, needed=("round", "ids", "dropped"))
    for metric, scores in row.get("evaluation", {}).items():
        if not isinstance(scores, dict):
            raise _damaged(where, f"evaluation.{metric}", scores)
    return _plain(row, where)


def checked_clients(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A row of ``clients.jsonl``: every list has a value for every id."""
    _check(row, _CLIENTS, where, needed=("round", "ids"))
    for name, values in row.items():
        if isinstance(values, list) and len(values) != len(row["ids"]):
            raise _damaged(where, name, values)
    return _plain(row, where)


def checked_timing(row: dict[str, Any], where: str) -> dict[str, Any]:
    """A row of ``timings.jsonl``."""
    _check(row, {"round": (int,)}, where, needed=("round",))
    return _plain(row, where)


def _plain(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The row, if all its values are within their bounds."""
    wrong = row_fault(row)
    if wrong:
        raise CheckpointError(
            f"{where} is damaged: {wrong} holds a value that no run writes; restore it, or run again elsewhere"
        )
    return row


def _check(found: Mapping[str, Any], shape: Mapping[str, Types], where: str, needed: tuple[str, ...] = ()) -> None:
    for name, types in shape.items():
        table, _, inner = name.rpartition(".")
        place = found.get(table, {}) if table else found
        if inner not in place:
            if name in needed:
                raise CheckpointError(f"{where} is damaged: it has no '{name}'; restore it, or run again elsewhere")
            continue
        value = place[inner]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise _damaged(where, name, value)


def _damaged(where: str, name: str, value: object) -> CheckpointError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return CheckpointError(f"{where} is damaged: '{name}' cannot be {shown}; restore the file, or run again elsewhere")
