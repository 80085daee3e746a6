"""Golden vectors on disk: cases of consecutive rounds, read and checked before anything is replayed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedalloy.core.errors import SpecError


class Values(dict[str, Any]):
    """Named values of a file; the error for a missing one names where it was searched.

    >>> Values({"mu": 0.1}, "params").settings(mu="mu", momentum="gamma")
    {'mu': 0.1}
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        super().__init__(values)
        self.where = where

    def __missing__(self, name: str) -> Any:
        raise SpecError(f"{self.where} lacks '{name}'; it has: {', '.join(self) or '(nothing)'}")

    def tensor(self, name: str, axes: int) -> Tensor:
        """A value in float64 that must have ``axes`` axes."""
        value = numbers(self[name], f"{self.where}.{name}")
        if value.dim() != axes:
            raise SpecError(f"{self.where}.{name} has the shape {list(value.shape)}: expected {axes} axes")
        return value

    def settings(self, **names: str) -> dict[str, Any]:
        """Settings of a rule under the names of the file; those that the file does not have keep their defaults."""
        return {setting: self[name] for setting, name in names.items() if name in self}


@dataclass(frozen=True)
class VectorCase:
    """Rounds that share state. A replayer sees the names of what is expected, never the values."""

    params: Values
    init: Values
    rounds: tuple[Values, ...]
    wanted: frozenset[str]


@dataclass(frozen=True)
class Recorded:
    """A case and the expected fields of every round, by dotted name."""

    case: VectorCase
    expected: tuple[dict[str, Tensor], ...]


@dataclass(frozen=True)
class Vectors:
    """The content of one file."""

    group: str
    records: tuple[Recorded, ...]


def read(path: Path) -> Vectors:
    """Read a file of golden vectors; an error names what is wrong with it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SpecError(f"{path} is not JSON: {error}") from error
    where = path.name
    dtype = _entry(content, "dtype", str, where)
    if dtype != "float64":
        raise SpecError(f"{where}.dtype is '{dtype}'; allowed: float64, because results are compared to 1e-9")
    cases = _filled(content, "cases", where)
    records = tuple(_recorded(case, f"{where}: case {number}") for number, case in enumerate(cases, 1))
    return Vectors(_entry(content, "group", str, where), records)


def flatten(fields: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined by dots.

    >>> flatten({"weights": {"fedavg": 1, "term": 2}, "w": 3})
    {'weights.fedavg': 1, 'weights.term': 2, 'w': 3}
    """
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        nested = isinstance(value, Mapping)
        flat |= flatten(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return flat


def numbers(value: Any, where: str) -> Tensor:
    """Numbers, nested lists of them or a tensor, in float64; null is NaN."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", torch.float64)
    try:
        return torch.from_numpy(np.array(value, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise SpecError(f"{where} is not a number or a regular list of numbers: {error}") from error


def _recorded(case: Any, where: str) -> Recorded:
    params, init = (Values(_entry(case, name, dict, where), f"{where}.{name}") for name in ("params", "init"))
    inputs, expected = [], []
    for number, round in enumerate(_filled(case, "rounds", where), 1):
        here = f"{where}, round {number}"
        inputs.append(Values(_entry(round, "inputs", dict, here), f"{here}.inputs"))
        fields = flatten(_entry(round, "expected", dict, here))
        expected.append({name: numbers(value, f"{here}.expected.{name}") for name, value in fields.items()})
    wanted = frozenset(name for fields in expected for name in fields)
    return Recorded(VectorCase(params, init, tuple(inputs), wanted), tuple(expected))


def _filled(parent: Any, name: str, where: str) -> list[Any]:
    """A list that must not be empty."""
    entries: list[Any] = _entry(parent, name, list, where)
    if not entries:
        raise SpecError(f"{where}.{name} is empty: nothing to replay")
    return entries


def _entry(parent: Any, name: str, kind: type, where: str) -> Any:
    words: dict[type, str] = {dict: "an object", list: "a list", str: "text"}
    if not isinstance(parent, dict):
        raise SpecError(f"{where} is not an object with '{name}' but {type(parent).__name__}")
    if name not in parent:
        raise SpecError(f"{where} lacks '{name}' ({words[kind]}); it has: {', '.join(parent) or '(nothing)'}")
    if not isinstance(parent[name], kind):
        raise SpecError(f"{where}.{name} should be {words[kind]}, not {type(parent[name]).__name__}")
    return parent[name]
