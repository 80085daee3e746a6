"""Trees in memory that several processes see: written on one side, read on the other, never serialised."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGN = 64


@dataclass(frozen=True)
class Slot:
    """Where one leaf lies inside a row."""

    path: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    begin: int
    size: int


@dataclass(frozen=True)
class Layout:
    """How a nested dict of tensors lies in one row of bytes."""

    slots: tuple[Slot, ...]
    size: int
    empty: tuple[tuple[str, ...], ...] = ()

    @staticmethod
    def of(example: Mapping[str, Any]) -> Layout:
        """The layout of everything shaped like ``example``."""
        slots, empty, begin = [], [], 0
        for path, leaf in _walk(example, ()):
            if leaf is None:
                empty.append(path)
                continue
            size = leaf.numel() * leaf.element_size()
            slots.append(Slot(path, leaf.shape, leaf.dtype, begin, size))
            begin += -(-size // _ALIGN) * _ALIGN
        return Layout(tuple(slots), max(begin, _ALIGN), tuple(empty))

    def write(self, row: Tensor, values: Mapping[str, Any]) -> None:
        """Copy ``values`` into a row."""
        for slot in self.slots:
            _leaf(row, slot).copy_(_at(values, slot.path))

    def read(self, row: Tensor) -> dict[str, Any]:
        """The values in a row, as views of it."""
        values: dict[str, Any] = {}
        for path in self.empty:
            _place(values, path)[path[-1]] = {}
        for slot in self.slots:
            _place(values, slot.path)[slot.path[-1]] = _leaf(row, slot)
        return values


def shared_rows(rows: int, layout: Layout) -> Tensor:
    """``[rows, layout.size]`` bytes that a forked process shares with this one."""
    memory = mmap.mmap(-1, rows * layout.size)
    return torch.frombuffer(memory, dtype=torch.uint8).reshape(rows, layout.size)


def _leaf(row: Tensor, slot: Slot) -> Tensor:
    return row[slot.begin : slot.begin + slot.size].view(slot.dtype).reshape(slot.shape)


def _walk(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Tensor | None]]:
    """Every leaf with its path; an empty dict is a leaf that is None."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _walk(value, (*path, name))
        else:
            yield (*path, name), value if isinstance(value, Tensor) else None


def _place(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The dict that holds the last name of a path, made on the way."""
    for name in path[:-1]:
        values = values.setdefault(name, {})
    return values


def _at(tree: Mapping[str, Any], path: tuple[str, ...]) -> Tensor:
    value: Any = tree
    for name in path:
        value = value[name]
    leaf: Tensor = value
    return leaf
