"""Messages between server and nodes: a JSON header and trees of tensors as plain bytes. No pickle.

All tensors of a message are one array: Flower transfers every array with several requests, which for a model of many
small tensors takes most of the time of a message. A few bytes are stored beside the header, which costs no request at
all. The header has the position of each tensor.
Everything received is checked by its declared types, shapes and sizes before a tensor is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedalloy.core.types import Payload, Tree
from fedalloy.flower.protocol.header import PARTS, RECORD, Malformed, plain_record, read_header

if TYPE_CHECKING:
    from flwr.app import RecordDict as RecordDict

_TENSORS, _ALL, _STYPE = "tensors", "all", "fedalloy.raw"
_FEW = 1 << 18
"""Up to this many bytes are stored beside the header. More are an array, which Flower sends once for several nodes."""
_ALIGNED = 8
"""Every tensor begins at a multiple of this many bytes, the alignment of the widest number."""
_MOST_DIMENSIONS, _MOST_TENSORS, _MOST_NAME = 16, 10_000, 400
_MOST_NUMBERS = 1 << 56
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    )
}  # fmt: skip
Described = tuple[torch.dtype, tuple[int, ...]]
"""The description of one tensor in a header."""


@dataclass(frozen=True)
class TensorMessage:
    """A header of plain values, and parts: trees by name."""

    header: dict[str, Any]
    parts: Payload = field(default_factory=dict)


def pack(message: TensorMessage, packed: dict[int, RecordDict] | None = None, *, release: bool = False) -> RecordDict:
    """A message as Flower records. With ``packed``, messages that have the same parts (the same object, kept by its
    owner) share one array, which is made once; Flower then hashes and sends it once. With ``release`` the message loses
    its tensors one after another while they are copied, so that there are never two copies of all."""
    from flwr.app import Array, ArrayRecord

    listed = {
        part: [[name, _dtype_name(leaf), list(leaf.shape)] for name, leaf in leaves.items()]
        for part, leaves in message.parts.items()
    }
    header = {**message.header, PARTS: listed}
    known = packed.get(id(message.parts)) if packed is not None else None
    if known is not None:
        content = plain_record(header)
        content[_TENSORS] = known[_TENSORS]
        return content
    data = _moved(message.parts) if release else _copied(message.parts)
    if len(data) <= _FEW:
        return plain_record(header, {_TENSORS: bytes(data)} if data else None)
    record = ArrayRecord({_ALL: Array("uint8", (len(data),), _STYPE, b"")})
    setattr(record[_ALL], "data", data)  # noqa: B010 (any buffer will do, and this one is not copied)
    content = plain_record(header)
    content[_TENSORS] = record
    if packed is not None:
        packed[id(message.parts)] = content
    return content


def unpack(content: RecordDict, max_bytes: float = math.inf, *, release: bool = False) -> TensorMessage:
    """The message in received records; :class:`Malformed` if something is wrong with it. With ``release`` the records
    lose their array, so that its memory is free as soon as nobody uses the tensors."""
    sketch = outline(content, max_bytes)
    found = _data(content)
    if release:
        if isinstance(found, bytearray):
            _forget(content)
        content.pop(_TENSORS, None)
    # A buffer that can be written belongs to whoever received it; what Flower has received cannot, and is copied.
    data, start = found if isinstance(found, bytearray) else bytearray(found), 0
    parts: dict[str, Tree] = {}
    for part, leaves in sketch.parts.items():
        parts[part] = {}
        for name, leaf in leaves.items():
            parts[part][name] = _read(data, start, leaf)
            start += _aligned_size(leaf)
    return TensorMessage(sketch.header, parts)


def _forget(content: RecordDict) -> None:
    """Take the data from arrays that nobody else reads. Records refer to themselves in circles, so their memory would
    otherwise be kept until Python collects garbage, which counts objects and not bytes."""
    for record in content.array_records.values():
        for array in record.values():
            array.data = b""


def outline(content: RecordDict, max_bytes: float = math.inf) -> TensorMessage:
    """A message whose tensors have names, shapes and dtypes but no content: all that is known before it is read."""
    size = len(_beside(content))
    size += sum(len(array.data) for record in content.array_records.values() for array in record.values())
    if size > max_bytes:
        raise Malformed(f"it holds {size / 1e6:.1f} MB, the limit is {max_bytes / 1e6:g} MB")
    header = read_header(content)
    listed = _listed(header.pop(PARTS, None))
    needed, there = sum(_bytes(*one) for entries in listed.values() for one in entries.values()), len(_data(content))
    if there != needed:
        raise Malformed(f"its tensors have {there} bytes, their shapes and dtypes need {needed:.10g}")
    parts = {part: {name: _sketch(*one) for name, one in entries.items()} for part, entries in listed.items()}
    return TensorMessage(header, parts)


def sizes(parts: Payload) -> dict[str, int]:
    """The bytes of every part.

    >>> sizes({"delta": {"w": torch.zeros(3)}})
    {'delta': 12}
    """
    return {part: sum(leaf.numel() * leaf.element_size() for leaf in leaves.values()) for part, leaves in parts.items()}


def _beside(content: RecordDict) -> bytes:
    """The bytes beside the header."""
    record = content.config_records.get(RECORD)
    found = record.get(_TENSORS, b"") if record is not None else b""
    if not isinstance(found, bytes):
        raise Malformed("its tensors are not bytes")
    return found


def _data(content: RecordDict) -> bytes:
    """The bytes of all tensors; refuses other arrays."""
    arrays, beside = content.array_records, _beside(content)
    if not arrays:
        return beside
    if beside or set(arrays) != {_TENSORS} or set(arrays[_TENSORS]) != {_ALL}:
        raise Malformed(f"it holds arrays that its header does not name: {', '.join(sorted(arrays)):.200}")
    array = arrays[_TENSORS][_ALL]
    if array.stype != _STYPE:
        raise Malformed(f"its tensors are written as {array.stype!s:.40}, which is not understood")
    return array.data


def _listed(told: Any) -> dict[str, dict[str, Described]]:
    """The descriptions of the tensors of every part, from a header."""
    if not isinstance(told, dict):
        raise Malformed("its header does not list its parts")
    if sum(len(entries) for entries in told.values() if isinstance(entries, list)) > _MOST_TENSORS:
        raise Malformed(f"it has more than {_MOST_TENSORS} tensors")
    return {part: _described(part, entries) for part, entries in told.items()}


def _described(part: str, listed: Any) -> dict[str, Described]:
    if not isinstance(listed, list) or len(part) > _MOST_NAME or not all(_is_entry(one) for one in listed):
        raise Malformed(f"{part:.200} is not a list of tensors")
    tree = {name: _describe(f"{part}/{name}"[:200], dtype, shape) for name, dtype, shape in listed}
    if len(tree) < len(listed):
        raise Malformed(f"{part:.200} has two tensors of the same name")
    return tree


def _is_entry(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and len(value[0]) <= _MOST_NAME


def _describe(where: str, name: Any, shape: Any) -> Described:
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise Malformed(f"{where} is written as {name!s:.40}, which is not understood")
    if not _is_shape(shape):
        raise Malformed(f"{where} has no valid shape")
    return dtype, tuple(shape)


def _is_shape(value: Any) -> bool:
    """Lengths whose product torch can represent, in bytes too and even if one of them is 0."""
    if not isinstance(value, list) or len(value) > _MOST_DIMENSIONS:
        return False
    lengths = all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _MOST_NUMBERS for n in value)
    return lengths and math.prod(n for n in value if n) <= _MOST_NUMBERS


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """The padded size of a tensor in bytes; a Python integer, which cannot overflow."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED


def _sketch(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _aligned_size(leaf: Tensor) -> int:
    """The size of a tensor in bytes, with padding."""
    return _bytes(leaf.dtype, tuple(leaf.shape))


def _copied(parts: Payload) -> bytes:
    """The bytes of all tensors."""
    return b"".join(piece for leaves in parts.values() for leaf in leaves.values() for piece in _pieces(leaf))


def _moved(parts: Payload) -> bytearray:
    """The bytes of all tensors, which are taken out of the parts."""
    data = bytearray(sum(_aligned_size(leaf) for leaves in parts.values() for leaf in leaves.values()))
    view, start = memoryview(data), 0
    for leaves in parts.values():
        for name in list(leaves):
            leaf = leaves.pop(name)
            for piece in _pieces(leaf):
                view[start : start + len(piece)] = piece
                start += len(piece)
            del leaf
    return data


def _pieces(leaf: Tensor) -> Iterator[Any]:
    """The bytes of a tensor where they are, without a copy, and its padding."""
    plain = leaf.detach().cpu().contiguous()
    if plain.numel():
        yield plain.reshape(-1).view(torch.uint8).numpy()
        yield bytes(_aligned_size(plain) - plain.numel() * plain.element_size())


def _dtype_name(leaf: Tensor) -> str:
    name = str(leaf.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise Malformed(f"a tensor of {leaf.dtype} cannot be sent; allowed: {', '.join(sorted(_DTYPES))}")
    return name


def _read(data: bytearray, start: int, sketch: Tensor) -> Tensor:
    if sketch.numel() == 0:
        return torch.empty(sketch.shape, dtype=sketch.dtype)
    return torch.frombuffer(data, dtype=sketch.dtype, count=sketch.numel(), offset=start).reshape(sketch.shape)
