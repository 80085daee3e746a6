"""What travels between server and nodes: a JSON header and trees of tensors as plain bytes. No pickle.

Whatever arrives is checked by its stated types, shapes and sizes before a single tensor is made of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedalloy.core.errors import FedalloyError
from fedalloy.core.types import Payload, Tree

if TYPE_CHECKING:
    from flwr.app import Array, RecordDict

FORMAT = 1
"""Of letters; raised when an older reader could misunderstand a newer writer."""
_RECORD, _HEADER, _STYPE = "fedalloy", "header", "fedalloy.raw"
_MOST_HEADER = 4 << 20
_MOST_DIMENSIONS = 16
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    )
}  # fmt: skip


class Malformed(FedalloyError):
    """What arrived is not a letter, or is larger than allowed."""


@dataclass(frozen=True)
class Letter:
    """A header of plain values, and parts: trees by name."""

    header: dict[str, Any]
    parts: Payload = field(default_factory=dict)


def pack(letter: Letter) -> RecordDict:
    """A letter as the records that Flower carries."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    header = json.dumps({**letter.header, "parts": sorted(letter.parts)}, separators=(",", ":"))
    content = RecordDict({_RECORD: ConfigRecord({_HEADER: header})})
    for part, leaves in letter.parts.items():
        if leaves:
            content[part] = ArrayRecord({name: _to_array(leaf) for name, leaf in leaves.items()})
    return content


def unpack(content: RecordDict, max_bytes: float = math.inf) -> Letter:
    """The letter that Flower brought; :class:`Malformed` says what is wrong with it."""
    sketch = outline(content, max_bytes)
    parts = {
        part: {name: _to_tensor(content.array_records[part][name]) for name in leaves}
        for part, leaves in sketch.parts.items()
    }
    return Letter(sketch.header, parts)


def outline(content: RecordDict, max_bytes: float = math.inf) -> Letter:
    """A letter whose tensors have names, shapes and dtypes but no content: all that can be known before it is read."""
    arrays = content.array_records
    size = sum(len(array.data) for record in arrays.values() for array in record.values())
    if size > max_bytes:
        raise Malformed(f"it holds {size / 1e6:.1f} MB, the limit is {max_bytes / 1e6:g} MB")
    header = _read_header(content)
    names = header.pop("parts", None)
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise Malformed("its header does not list its parts")
    if strange := arrays.keys() - set(names):
        raise Malformed(f"it holds parts that its header does not name: {', '.join(sorted(strange))}")
    return Letter(header, {part: _sketch(part, arrays[part]) if part in arrays else {} for part in names})


def sizes(letter: Letter) -> dict[str, int]:
    """The bytes of every part.

    >>> sizes(Letter({}, {"delta": {"w": torch.zeros(3)}}))
    {'delta': 12}
    """
    return {
        part: sum(leaf.numel() * leaf.element_size() for leaf in leaves.values())
        for part, leaves in letter.parts.items()
    }


def _read_header(content: RecordDict) -> dict[str, Any]:
    record = content.config_records.get(_RECORD)
    text = record.get(_HEADER) if record is not None else None
    if not isinstance(text, str) or len(text) > _MOST_HEADER:
        raise Malformed("it has no header of fedalloy's")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed("its header is not JSON") from None
    if not isinstance(header, dict):
        raise Malformed("its header is not an object")
    return header


def _sketch(part: str, record: Mapping[str, Array]) -> Tree:
    return {name: _sketch_leaf(f"{part}/{name}", array) for name, array in record.items()}


def _sketch_leaf(where: str, array: Array) -> Tensor:
    dtype = _DTYPES.get(array.dtype)
    if array.stype != _STYPE or dtype is None:
        raise Malformed(f"{where} is written as {array.stype!s:.40} of {array.dtype!s:.40}, which is not understood")
    shape = tuple(array.shape)
    if len(shape) > _MOST_DIMENSIONS or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise Malformed(f"{where} has no proper shape")
    if len(array.data) != _nbytes(shape, dtype):
        raise Malformed(f"{where} has {len(array.data)} bytes, its shape and dtype need {_nbytes(shape, dtype)}")
    return torch.empty(shape, dtype=dtype, device="meta")


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """An array without elements travels as one byte: Flower cannot carry none."""
    return max(1, math.prod(shape) * dtype.itemsize)


def _to_array(leaf: Tensor) -> Array:
    from flwr.app import Array

    plain = leaf.detach().cpu().contiguous()
    name = str(plain.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise Malformed(f"a tensor of {plain.dtype} cannot be sent; allowed: {', '.join(sorted(_DTYPES))}")
    data = plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"\0"
    return Array(dtype=name, shape=tuple(plain.shape), stype=_STYPE, data=data)


def _to_tensor(array: Array) -> Tensor:
    dtype = _DTYPES[array.dtype]
    if math.prod(array.shape) == 0:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(bytearray(array.data), dtype=dtype).reshape(array.shape)
