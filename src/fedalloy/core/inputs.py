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
Shape = Any
"""The shape of an example: a tuple of numbers, or a dict or tuple of shapes, in the form of the inputs."""


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


def one_length(x: Inputs) -> int:
    """How many examples there are; features with different numbers of them are refused.

    >>> one_length({"a": torch.zeros(3, 2), "b": torch.zeros(3)})
    3
    """
    sizes = sorted({len(leaf) for leaf in leaves(x)})
    if len(sizes) > 1:
        raise DataError(f"the features have {' and '.join(map(str, sizes))} rows; all must have as many")
    return sizes[0]


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


def shape_of(x: Inputs) -> Shape:
    """The shape of one example: a tuple, or a dict of them.

    >>> shape_of({"a": torch.zeros(3, 2), "b": torch.zeros(3)})
    {'a': (2,), 'b': ()}
    """
    return each(lambda leaf: tuple(leaf.shape[1:]), x)


def is_one_shape(shape: Shape) -> bool:
    """Whether this is the shape of one tensor; several tensors have a dict or a tuple of shapes.

    >>> is_one_shape((3, 2)), is_one_shape({"a": (2,)}), is_one_shape(((2,), (3,)))
    (True, False, False)
    """
    return isinstance(shape, tuple | list) and all(isinstance(extent, int) for extent in shape)


def listed(shape: Shape) -> Any:
    """A shape, or a dict or tuple of shapes, with lists instead of tuples, as JSON has them."""
    if isinstance(shape, Mapping):
        return {name: listed(one) for name, one in shape.items()}
    return [listed(one) if isinstance(one, tuple | Mapping) else one for one in shape]


def shown(shape: Shape) -> str:
    """A shape in words.

    >>> shown((3, 2)), shown({"words": (5,), "age": ()})
    ('3x2', 'words 5 and age 1')
    """
    if is_one_shape(shape):
        return "x".join(map(str, shape)) or "1"
    named = shape.items() if isinstance(shape, Mapping) else enumerate(shape)
    return " and ".join(f"{name} {shown(one)}" for name, one in named)


def zeros(shape: Shape, rows: int, dtype: torch.dtype) -> Inputs:
    """Examples of this shape, all 0."""
    if is_one_shape(shape):
        return torch.zeros(rows, *shape, dtype=dtype)
    if isinstance(shape, tuple | list):
        return tuple(zeros(one, rows, dtype) for one in shape)
    return {name: zeros(one, rows, dtype) for name, one in shape.items()}


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
