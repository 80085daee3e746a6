"""Compares nested values: what differs, and where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.contributions import Notes


def differences(one: Any, other: Any, tolerance: float = 0.0, where: str = "") -> Iterator[str]:
    """Every place at which two nested values differ by more than ``tolerance * max(1, |other|)``; NaN equals NaN.

    >>> list(differences({"w": torch.ones(2)}, {"w": torch.tensor([1.0, 1.5])}, 0.1))
    ['w: differs by 0.5']
    """
    if isinstance(one, Notes) and isinstance(other, Notes):
        one, other = ({**vars(notes), "clean": None} for notes in (one, other))  # whether it is known is no fact
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        yield from _keys(one, other, where)
        for name in other:
            if name in one:
                yield from differences(one[name], other[name], tolerance, f"{where}.{name}".removeprefix("."))
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        yield from _tensors(one, other, tolerance, where)
    elif one != other and not (one != one and other != other):
        yield f"{where}: {one!r} instead of {other!r}"


def copied(value: Any) -> Any:
    """A deep copy of a nested value."""
    if isinstance(value, Mapping):
        return {name: copied(inner) for name, inner in value.items()}
    return value.clone() if isinstance(value, Tensor) else value


def broken(value: Any, where: str = "") -> Iterator[str]:
    """Every place that holds a number that is not finite."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from broken(inner, f"{where}.{name}".removeprefix("."))
    elif isinstance(value, Tensor) and value.is_floating_point() and not bool(value.isfinite().all()):
        yield f"{where or 'value'}: not finite"


def _keys(one: Mapping[str, Any], other: Mapping[str, Any], where: str) -> Iterator[str]:
    for name in other.keys() - one.keys():
        yield f"{where}: lacks {name}".removeprefix(": ")
    for name in one.keys() - other.keys():
        yield f"{where}: has unexpected {name}".removeprefix(": ")


def _tensors(one: Tensor, other: Tensor, tolerance: float, where: str) -> Iterator[str]:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        yield f"{where}: {one.dtype} {tuple(one.shape)} instead of {other.dtype} {tuple(other.shape)}"
        return
    a, b = one.detach().cpu().double(), other.detach().cpu().double()
    equal = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(equal, 0.0, (a - b).abs())
    if not bool((equal | (gap <= tolerance * b.abs().clamp(min=1))).all()):
        yield f"{where}: differs by {float(gap.max()):.3g}"
