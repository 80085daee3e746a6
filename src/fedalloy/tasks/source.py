"""How a task was made, as the tables of a recipe: with them the command line can make the same task again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedalloy.core.errors import FedalloyError
from fedalloy.core.spec import to_spec

_PLAIN = (str, int, float, bool)
_TASK = (
    "dataset", "model", "loss", "kind", "unit", "standardise", "trainable", "test_fraction", "valid_fraction", "dtype",
    "classifier", "synthetic", "augment", "buckets",
)  # fmt: skip


@dataclass(frozen=True)
class TaskSource:
    """The tables ``task``, ``partition`` and ``noise`` of a recipe, and the seed of all draws."""

    tables: Mapping[str, Any]
    seed: int


def source_of(arguments: Mapping[str, Any]) -> TaskSource | None:
    """The source of a task made by :func:`fedalloy.task` with these arguments; None if one of them is no plain value
    (an array, a function), which no recipe can hold.

    >>> source_of({"dataset": "digits", "partition": None, "clients": 5, "newcomers": 0, "noise": None, "seed": 3})
    TaskSource(tables={'task': {'dataset': 'digits'}, 'partition': {'clients': 5, 'newcomers': 0}}, seed=3)
    """
    given = {**arguments, "partition": _as_table("partition", arguments["partition"])}
    given["dataset"] = _as_table("dataset", given["dataset"])
    if isinstance(given.get("dtype"), torch.dtype):
        given["dtype"] = str(given["dtype"]).removeprefix("torch.")
    rule = {"kind": given["partition"]} if isinstance(given["partition"], str) else given["partition"] or {}
    tables = {
        "task": {name: given.get(name) for name in _TASK},
        "partition": rule if not isinstance(rule, Mapping) else {**rule, **_counts(given)},
        "noise": given["noise"],
    }
    if not _is_plain(tables) or not isinstance(given["seed"], int):
        return None
    return TaskSource(_stored(tables), given["seed"])


def _counts(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given[name] for name in ("clients", "newcomers")}


def _as_table(category: str, value: Any) -> Any:
    """A rule given as an object, as its table; unchanged where it has none."""
    if value is None or isinstance(value, str | Mapping):
        return value
    try:
        return to_spec(category, value)
    except (FedalloyError, TypeError):
        return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and _is_plain(one) for name, one in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else value is None or isinstance(value, _PLAIN)


def _stored(value: Any) -> Any:
    """As a file holds it: nothing for None, lists for tuples."""
    if isinstance(value, Mapping):
        return {name: _stored(one) for name, one in value.items() if one is not None}
    return [_stored(one) for one in value] if isinstance(value, list | tuple) else value
