"""Examples as trees: one tensor whose first axis is the examples, or a dict or tuple of such tensors, which may be
nested. A single tensor is a tree with one leaf and takes a fast path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.errors import DataError

Inputs = Any
"""A tensor or a (nested) dict or tuple of tensors. Code that takes tensors only is annotated with ``Tensor``."""


def each(function: Callable[..., Any], x: Inputs, *others: Inputs) -> Inputs:
    """Apply ``function`` leaf by leaf.

    >>> each(torch.neg, {"a": torch.ones(1), "b": {"c": torch.zeros(1)}})
    {'a': tensor([-1.]), 'b': {'c': tensor([-0.])}}
    """
    if isinstance(x, Tensor):
        return function(x, *others)
    if isinstance(x, tuple) and x:
        return tuple(each(function, *parts) for parts in zip(x, *others, strict=True))
    return {name: each(function, leaf, *(other[name] for other in others)) for name, leaf in _named(x).items()}


def leaves(x: Inputs) -> Iterator[Tensor]:
    """Every tensor."""
    if isinstance(x, Tensor):
        yield x
        return
    for value in x if isinstance(x, tuple) and x else _named(x).values():
        yield from leaves(value)


def _named(x: Inputs) -> Mapping[str, Inputs]:
    if not isinstance(x, Mapping) or not x:
        found = f"an empty {type(x).__name__}" if isinstance(x, Mapping | tuple) else f"a {type(x).__name__}"
        raise DataError(f"examples must be a tensor, or a dict or tuple of tensors, got {found}; use torch.as_tensor")
    return x


def length(x: Inputs) -> int:
    """How many examples there are.

    >>> length({"a": torch.zeros(3, 2), "b": torch.zeros(3)})
    3
    """
    return len(x) if isinstance(x, Tensor) else len(next(leaves(x)))


def device_of(x: Inputs) -> torch.device:
    """Where the examples are."""
    return x.device if isinstance(x, Tensor) else next(leaves(x)).device


def take(x: Inputs, rows: Tensor | slice | int) -> Inputs:
    """Some examples, by an index or a slice."""
    return x[rows] if isinstance(x, Tensor) else each(lambda leaf: leaf[rows], x)


def take_each(x: Inputs, some: Iterable[Tensor]) -> Iterator[Inputs]:
    """Several sets of examples, by their indices."""
    if isinstance(x, Tensor):
        return (x[rows] for rows in some)
    return (take(x, rows) for rows in some)


def joined(parts: list[Inputs]) -> Inputs:
    """Several sets of examples, concatenated."""
    return each(lambda *leaves: torch.cat(leaves), *parts)


def shape_of(x: Inputs) -> Any:
    """The shape of one example: a tuple, or a dict of them.

    >>> shape_of({"a": torch.zeros(3, 2), "b": torch.zeros(3)})
    {'a': (2,), 'b': ()}
    """
    return each(lambda leaf: tuple(leaf.shape[1:]), x)


def to(x: Inputs, device: torch.device | str) -> Inputs:
    """The same examples on another device; no copy if they are there already."""
    return x.to(device) if isinstance(x, Tensor) else each(lambda leaf: leaf.to(device), x)


def one_by_one(x: Inputs) -> Iterator[Inputs]:
    """Iterate over the first axis."""
    return iter(x) if isinstance(x, Tensor) else (take(x, row) for row in range(length(x)))


def pieces(count: int, size: int) -> Iterator[slice]:
    """Slices of at most ``size`` rows.

    >>> list(pieces(5, 2))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    for begin in range(0, count, size):
        yield slice(begin, min(begin + size, count))


def bytes_each(x: Inputs) -> int:
    """Bytes per example; 0 if there are none."""
    return sum(leaf[0].numel() * leaf.element_size() for leaf in leaves(x)) if length(x) else 0
