"""Invariants of a server's state after every round, for any contributions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.fuzz.watching import Fault


def check_finite(state: Any) -> None:
    """Every number of a state is finite, and no variance below zero."""
    for where, leaf in _leaves(state, ""):
        if leaf.is_floating_point() and not bool(leaf.isfinite().all()):
            raise Fault("nan", f"the server's state at {where} is not finite")
        if where.endswith("running_var") and bool((leaf < 0).any()):
            raise Fault("nan", f"the server's state at {where} is a negative variance")


def check_length(before: Mapping[str, Tensor], after: Mapping[str, Tensor], limit: float) -> None:
    """A server that averages moves its model no further than the largest allowed norm of an update."""
    moved = sum(float((after[name].double() - leaf.double()).pow(2).sum()) for name, leaf in before.items()) ** 0.5
    if not moved <= limit * (1 + 1e-5):
        raise Fault("norm", f"the model moved by {moved:g}, updates are screened at {limit:g}")


def _leaves(value: Any, where: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{where}/{name}")
    elif isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, float):
        yield where, torch.tensor(value)
