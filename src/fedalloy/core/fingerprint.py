"""The identity of an experiment as plain values: settings as they are, arrays as hashes of their contents."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

Plain = dict[str, Any]
VALUES = "sha256"
"""The key of a hash of floating-point values, which may differ between devices."""
_LONG = 64
_BLOCK = 1 << 24
_DEEPEST = 12


def digest(*parts: Tensor | str) -> str:
    """A stable hash of tensors (dtype, shape and bytes) and texts.

    >>> digest(torch.ones(2)) == digest(torch.ones(2)), digest(torch.ones(2)) == digest(torch.ones(1, 2))
    (True, False)
    """
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, str):
            total.update(f"\ntext {len(part)}\n{part}".encode())
            continue
        leaf = part.detach().cpu().contiguous()
        total.update(f"\n{leaf.dtype} {list(leaf.shape)}\n".encode())
        for block in _hashes(leaf.reshape(-1).view(torch.uint8)):
            total.update(block)
    return total.hexdigest()[:32]


def _hashes(content: Tensor) -> list[bytes]:
    """The hashes of blocks, computed in parallel if there are several, because data sets are large."""
    blocks = content.split(_BLOCK) if len(content) else ()
    if len(blocks) <= 1:
        return [_hash(block) for block in blocks]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(_hash, blocks))


def _hash(block: Tensor) -> bytes:
    return hashlib.sha256(block.numpy().data).digest()


def portrait(value: Any, defaults: bool = True, deep: int = 0) -> Any:
    """A value as JSON: rules and settings by kind and fields, tensors and long lists by their hash.

    Without ``defaults``, fields with their default value are left out.

    >>> portrait((1, None, {"a": range(2)}))
    [1, None, {'a': [0, 1]}]
    """
    go = functools.partial(portrait, defaults=defaults, deep=deep + 1)
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if value == value and abs(value) != float("inf") else repr(value)
        case Tensor():
            return of_tensor(value)
        case Mapping():
            return {str(key): go(item) for key, item in value.items()}
        case list() | tuple() | range() | set() | frozenset():
            return _of_many(value, go)
    return _of_object(value, go, defaults) if deep < _DEEPEST else _name(type(value))


def of_tensor(value: Tensor) -> Plain:
    """Shape, dtype and hash of a tensor."""
    exact = not (value.is_floating_point() or value.is_complex())
    return {"shape": list(value.shape), "dtype": str(value.dtype), ("exact" if exact else VALUES): digest(value)}


def _of_many(values: Any, go: Any) -> Any:
    items = [go(item) for item in values]
    items = sorted(items, key=repr) if isinstance(values, set | frozenset) else items
    return items if len(items) <= _LONG else {"length": len(items), "exact": digest(json.dumps(items))}


def _of_object(value: Any, go: Any, defaults: bool) -> Any:
    if isinstance(value, functools.partial):
        return {"kind": "partial", "of": go(value.func), "arguments": go([value.args, value.keywords])}
    if isinstance(value, nn.Module):
        return {"kind": repr(value), "leaves": go(value.state_dict())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field for field in dataclasses.fields(value) if field.init and not field.name.startswith("_")]
        kept = {field.name: getattr(value, field.name) for field in fields}
        return {"kind": _name(type(value)), **{
            field.name: go(kept[field.name]) for field in fields if defaults or not _is_default(field, kept[field.name])
        }}  # fmt: skip
    if hasattr(value, "tolist") and hasattr(value, "dtype"):  # an array or an array scalar
        return go(value.tolist())
    if callable(value) and hasattr(value, "__qualname__"):
        return _name(value)
    own = {name: item for name, item in getattr(value, "__dict__", {}).items() if not name.startswith("_")}
    return {"kind": _name(type(value)), **go(own)}


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    try:
        return bool(value == default)
    except (RuntimeError, ValueError, TypeError):  # comparing tensors and arrays gives no single bool
        return False


def _name(thing: Any) -> str:
    """The name of a class or function, without its module, which differs between running and importing a script. A
    renamed class keeps in ``known_as`` the name that folders of earlier runs contain."""
    return str(getattr(thing, "__dict__", {}).get("known_as", thing.__qualname__))
