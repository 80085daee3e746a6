"""Trees in memory that processes share: one process writes them, another reads them, without serialisation."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.engines.processes import forks

_ALIGN = 64


@dataclass(frozen=True)
class Slot:
    """The position of one leaf in a row; a ``plain`` leaf is a Python number."""

    path: tuple[str, ...]
    shape: torch.Size
    dtype: torch.dtype
    begin: int
    size: int
    plain: bool = False


@dataclass(frozen=True)
class Layout:
    """How a nested dict of tensors and numbers is stored in a row of bytes; ``empty`` are the paths of empty dicts."""

    slots: tuple[Slot, ...]
    size: int
    empty: tuple[tuple[str, ...], ...] = ()

    @staticmethod
    def of(example: Mapping[str, Any]) -> Layout:
        """The layout of all trees with the structure and shapes of ``example``."""
        slots, empty, begin = [], [], 0
        for path, leaf in _walk(example, ()):
            if leaf is None:
                empty.append(path)
                continue
            value = torch.as_tensor(leaf, dtype=_kind(leaf))
            size = value.numel() * value.element_size()
            slots.append(Slot(path, value.shape, value.dtype, begin, size, not isinstance(leaf, Tensor)))
            begin += -(-size // _ALIGN) * _ALIGN
        return Layout(tuple(slots), max(begin, _ALIGN), tuple(empty))

    def write(self, row: Tensor, values: Mapping[str, Any]) -> None:
        """Copy ``values`` into a row; refused if their structure is not that of the example."""
        found, known = dict(_walk(values, ())), {*(slot.path for slot in self.slots), *self.empty}
        if found.keys() != known:
            strange = ", ".join(sorted(".".join(path) for path in found.keys() ^ known))
            raise SpecError(f"a state or a part changed its structure at {strange}: every client has the same, always")
        for slot in self.slots:
            leaf_in(row, slot).copy_(torch.as_tensor(found[slot.path], dtype=slot.dtype))

    def read(self, row: Tensor) -> dict[str, Any]:
        """The values in a row: tensors as views of it, Python numbers as copies."""
        values: dict[str, Any] = {}
        for path in self.empty:
            _place(values, path)[path[-1]] = {}
        for slot in self.slots:
            leaf = leaf_in(row, slot)
            _place(values, slot.path)[slot.path[-1]] = leaf.item() if slot.plain else leaf
        return values


def shared_rows(rows: int, layout: Layout) -> Tensor:
    """``[rows, layout.size]`` bytes that the processes of :mod:`fedalloy.engines.processes` share with this one."""
    if not forks():
        fresh = torch.zeros(rows, layout.size, dtype=torch.uint8)
        fresh.share_memory_()
        return fresh
    memory = mmap.mmap(-1, rows * layout.size)
    return torch.frombuffer(memory, dtype=torch.uint8).reshape(rows, layout.size)


def leaf_in(row: Tensor, slot: Slot) -> Tensor:
    """One leaf of a row, as a view of it."""
    return row[slot.begin : slot.begin + slot.size].view(slot.dtype).reshape(slot.shape)


def _walk(tree: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every leaf with its path; an empty dict counts as a leaf with the value None."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _walk(value, (*path, name))
        else:
            yield (*path, name), None if isinstance(value, Mapping) else value


def _place(values: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """The innermost dict of a path; missing dicts are created."""
    for name in path[:-1]:
        values = values.setdefault(name, {})
    return values


def _kind(leaf: Any) -> torch.dtype:
    """The dtype that stores a leaf without loss; Python's ints and floats get 64 bits."""
    if isinstance(leaf, Tensor):
        return leaf.dtype
    for kind, dtype in ((bool, torch.bool), (int, torch.int64), (float, torch.float64)):
        if isinstance(leaf, kind):
            return dtype
    raise SpecError(f"{leaf!r} is a {type(leaf).__name__}: states hold tensors and plain numbers")
