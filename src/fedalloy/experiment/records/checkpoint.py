"""A nested state as one safetensors file: tensors by path, everything else in a JSON header. No pickle.

The file has one metadata entry, ``fedalloy``: a JSON object with ``format``, ``sha256`` and ``state``, the
skeleton of the state. In a skeleton a dict is an object, a plain scalar is itself, and everything else is
an array ``[tag, ...]``:

| entry | stands for |
|---|---|
| ``["tensor", name]`` | the tensor of that name |
| ``["raw", name, dtype, shape]`` | a tensor of a dtype the format lacks, stored as bytes |
| ``["list", [...]]``, ``["tuple", [...]]`` | a list or a tuple |
| ``["float", hex]`` | a float that JSON cannot represent (NaN, infinity): its eight bytes |

The checksum covers the skeleton and every tensor's name, dtype, shape and bytes. Equal states give equal
files, byte for byte. Tensors come back on the CPU, each owning its memory.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fedalloy.core.errors import CheckpointError
from fedalloy.core.types import State
from fedalloy.experiment.records.atomic import write_atomically

FORMAT = 2
"""2: the states of clients are stacked, or in files of their own; 1 is read, and would not find them."""
_READ = (1, FORMAT)
_ENTRY = "fedalloy"
_OS_ERROR = re.compile(r"os error (\d+)")
# The dtypes that every version of the format supports; all others are stored as bytes.
_NATIVE = frozenset({
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
})  # fmt: skip


def save(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state atomically, with its checksum."""
    write_atomically(path, lambda temporary: write(temporary, state))


def write(path: Path, state: Mapping[str, Any]) -> None:
    """Write a state with its checksum, which reveals a truncated file."""
    tensors, skeleton = flatten(state)
    tensors = _unshared(tensors)
    header = {"format": FORMAT, "sha256": digest(tensors, skeleton), "state": skeleton}
    try:
        save_file(tensors, path, metadata={_ENTRY: _dumps(header)})
    except SafetensorError as error:
        if (found := _OS_ERROR.search(str(error))) is None:
            raise
        number = int(found[1])  # raise it as our own writes would, such as for a full disk
        raise OSError(number, os.strerror(number), str(path)) from error


def load(path: Path, verify: bool = True) -> State:
    """Read a state back; a file that is damaged in any way is a :class:`CheckpointError`.

    Verifying costs ten times as much as reading: the writer of a file may skip it.
    """
    try:
        tensors, header = _read(path)
        if header["format"] not in _READ:
            raise ValueError(f"its format is {header['format']!r}, this version reads {FORMAT}")
        if verify and header["sha256"] != digest(tensors, header["state"]):
            raise ValueError("its checksum does not match its content")
    except (SafetensorError, OSError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise _unusable(path, error) from error
    try:
        return unflatten(tensors, header["state"])
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, struct.error) as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, why: Exception) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {path.name} cannot be used: {why}. It is truncated, damaged or not a checkpoint; "
        "delete it to fall back to the one before"
    )


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a state under ``/``-joined escaped paths, and the rest as a JSON-able skeleton.

    >>> tensors, skeleton = flatten({"params": {"w": torch.ones(2)}, "round": 3})
    >>> list(tensors), skeleton
    (['params/w'], {'params': {'w': ['tensor', 'params/w']}, 'round': 3})
    """
    tensors: dict[str, Tensor] = {}
    return tensors, _pack_dict(state, "", tensors)


def unflatten(tensors: Mapping[str, Tensor], skeleton: Mapping[str, Any]) -> State:
    """The inverse of :func:`flatten`.

    >>> unflatten({"w": torch.ones(2)}, {"w": ["tensor", "w"], "pair": ["tuple", [1, None]]})
    {'w': tensor([1., 1.]), 'pair': (1, None)}
    """
    return {key: _unpack(entry, tensors) for key, entry in skeleton.items()}


def digest(tensors: Mapping[str, Tensor], skeleton: Mapping[str, Any]) -> str:
    """The SHA-256 of a flattened state; does not depend on the order of its tensors."""
    total = hashlib.sha256(_dumps(skeleton).encode())
    for name in sorted(tensors):
        leaf = tensors[name]
        total.update(f"\n{name} {leaf.dtype} {list(leaf.shape)}\n".encode())
        total.update(bytes_of(leaf).numpy().data)
    return total.hexdigest()


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(path, framework="pt") as file:
        header = json.loads((file.metadata() or {})[_ENTRY])
        # A copy: tensors are memory-mapped, and the file may be deleted or damaged during the run.
        return {name: file.get_tensor(name).clone() for name in file.keys()}, header  # noqa: SIM118


def _pack_dict(state: Mapping[str, Any], path: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    packed = {}
    for key, value in state.items():
        if not isinstance(key, str):
            raise CheckpointError(f"{_place(path)} has the key {key!r}; the keys of a state are strings")
        packed[str(key)] = _pack(value, _join(path, key), tensors)
    return packed


def _pack(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    match value:
        case Tensor():
            return _pack_tensor(value, path, tensors)
        case Mapping():
            return _pack_dict(value, path, tensors)
        case list() | tuple():
            items = [_pack(item, _join(path, str(index)), tensors) for index, item in enumerate(value)]
            return ["tuple" if isinstance(value, tuple) else "list", items]
        case float() if not math.isfinite(value):
            return ["float", struct.pack(">d", value).hex()]
        case None | bool() | str():
            return value
        case int() | float():
            return float(value) if isinstance(value, float) else int(value)
    raise CheckpointError(
        f"{_place(path)} is a {type(value).__name__}; a state holds tensors, int, float, bool, str, None, "
        "lists and tuples of those, and dicts: convert it, or leave it out"
    )


def _pack_tensor(leaf: Tensor, path: str, tensors: dict[str, Tensor]) -> list[Any]:
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_meta:
        raise CheckpointError(f"{_place(path)} is sparse, quantized or without data; store a dense tensor instead")
    plain = leaf.detach().cpu().resolve_conj().resolve_neg().contiguous()
    native = plain.dtype in _NATIVE
    tensors[path] = plain if native else bytes_of(plain)
    dtype = str(plain.dtype).removeprefix("torch.")
    return ["tensor", path] if native else ["raw", path, dtype, list(plain.shape)]


def _unpack(entry: Any, tensors: Mapping[str, Tensor]) -> Any:
    match entry:
        case dict():
            return unflatten(tensors, entry)
        case ["tensor", name]:
            return tensors[name]
        case ["raw", name, dtype, shape]:
            return tensors[name].view(_dtype(dtype)).reshape(shape)
        case ["list", items]:
            return [_unpack(item, tensors) for item in items]
        case ["tuple", items]:
            return tuple(_unpack(item, tensors) for item in items)
        case ["float", bits]:
            return struct.unpack(">d", bytes.fromhex(bits))[0]
    return entry


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"there is no dtype {name!r:.40}")
    return found


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without shared memory, which the format refuses."""
    return dict(_each_unshared(tensors))


def _each_unshared(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    seen = set()
    for name, leaf in tensors.items():
        storage = leaf.untyped_storage().data_ptr()
        yield name, leaf.clone() if storage in seen else leaf
        seen.add(storage)


def bytes_of(leaf: Tensor) -> Tensor:
    """The bytes of a contiguous tensor; with explicit strides, since those of a single number may be anything."""
    return leaf.as_strided((leaf.numel(),), (1,)).view(torch.uint8)


def _join(path: str, key: str) -> str:
    """A child's path. Backslashes, slashes and everything that is not printable ASCII are escaped, as are the empty
    key and the one name reserved by the format, so that different paths stay different."""
    escaped = key.encode("unicode_escape").decode("ascii").replace("/", r"\x2f") or r"\0"
    escaped = r"\x5f_metadata__" if escaped == "__metadata__" else escaped
    return f"{path}/{escaped}" if path else escaped


def _place(path: str) -> str:
    return f"the state at '{path}'" if path else "the state"


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
