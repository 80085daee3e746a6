"""The numbers of a round as flat names: what curves, trackers and tables show of a row of ``rounds.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

_PLAIN = ("train_loss", "bytes_up", "bytes_down", "simulated_seconds")
_COUNTED = {"ids": "counted", "absent": "absent", "late": "late", "dropped": "dropped"}
_NESTED = ("evaluation", "evaluation_global", "global", "info")


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a row; lists of numbers (such as angles of clients) by their mean.

    >>> scalars({"round": 3, "ids": [4, 9], "train_loss": 0.5, "evaluation": {"accuracy": {"mean": 0.8, "gini": None}}})
    {'train_loss': 0.5, 'counted': 2.0, 'evaluation/accuracy/mean': 0.8}
    """
    found = {name: float(row[name]) for name in _PLAIN if row.get(name) is not None}
    found |= {short: float(len(row[name])) for name, short in _COUNTED.items() if name in row}
    for name in _NESTED:
        found.update(_flat(row.get(name, {}), name))
    return {name: value for name, value in found.items() if math.isfinite(value)}


def seconds_of(row: Mapping[str, Any]) -> float:
    """How long a round took, from its row of ``timings.jsonl``: all phases together.

    >>> seconds_of({"round": 1, "clients": 0.5, "server": 0.25, "engine": {"engine": "loop"}})
    0.75
    """
    phases = (value for name, value in row.items() if name not in ("round", "memory", "device_memory"))
    return sum(float(value) for value in phases if isinstance(value, int | float))


def _flat(value: Any, name: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(item, f"{name}/{key}")
    elif isinstance(value, list):
        numbers = [item for item in value if isinstance(item, int | float)]
        if numbers:
            yield name, math.fsum(numbers) / len(numbers)
    elif isinstance(value, int | float):
        yield name, float(value)
