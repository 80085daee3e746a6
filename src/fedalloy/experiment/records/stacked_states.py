"""The states of many clients as a few tensors: one per leaf, with a row per client.

A safetensors file has a header with an entry for every tensor, which for the states of many clients is larger than the
format allows, and slow long before that.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.errors import CheckpointError
from fedalloy.core.types import State

_INT64 = 1 << 63
_NUMBERS: dict[str, torch.dtype] = {"bool": torch.bool, "int": torch.int64, "float": torch.float64}


def pack(states: Mapping[int, State]) -> State:
    """Clients whose states have the same form are stacked: ``{"0": {"form", "ids", "leaves"}, ...}``.

    >>> packed = pack({3: {"w": torch.ones(2), "n": 1}, 8: {"w": torch.zeros(2), "n": 2}})
    >>> packed["0"]["ids"], packed["0"]["leaves"]["1"]
    (tensor([3, 8]), tensor([1, 2]))
    """
    groups: dict[Any, tuple[list[int], list[list[Any]]]] = {}
    for client in sorted(states):
        leaves: list[Any] = []
        ids, rows = groups.setdefault(_form(states[client], leaves, client), ([], []))
        ids.append(client)
        rows.append(leaves)
    return {
        str(number): {
            "form": json.dumps(form, separators=(",", ":")),
            "ids": torch.tensor(ids, dtype=torch.int64),
            "leaves": {str(place): _stacked(column) for place, column in enumerate(zip(*rows, strict=True))},
        }
        for number, (form, (ids, rows)) in enumerate(groups.items())
    }


def unpack(packed: State) -> dict[int, State]:
    """The inverse of :func:`pack`."""
    found: dict[int, State] = {}
    for group in packed.values():
        form = json.loads(group["form"])
        columns = [group["leaves"][str(place)] for place in range(len(group["leaves"]))]
        plain = [column.tolist() if column.dim() == 1 else None for column in columns]
        for row, client in enumerate(group["ids"].tolist()):
            found[client] = _state(form, _row(columns, plain, row))
    return dict(sorted(found.items()))


def _row(columns: list[Tensor], plain: list[list[Any] | None], row: int) -> Iterator[tuple[Tensor, Any]]:
    for column, numbers in zip(columns, plain, strict=True):
        yield column[row], None if numbers is None else numbers[row]


def _form(value: Any, leaves: list[Any], client: int) -> Any:
    """The form of a state, as nested tuples; tensors and numbers are put into ``leaves``."""
    if isinstance(value, Tensor):
        leaves.append(value.detach())
        return "tensor", str(value.dtype), tuple(value.shape)
    if isinstance(value, Mapping):
        return "dict", tuple((_key(name, client), _form(one, leaves, client)) for name, one in value.items())
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return kind, tuple(_form(one, leaves, client) for one in value)
    if value is None or isinstance(value, str):
        return "plain", value
    for name, kinds in (("bool", bool), ("int", int), ("float", float)):
        if isinstance(value, kinds) and (name != "int" or -_INT64 <= value < _INT64):
            leaves.append(torch.tensor(value, dtype=_NUMBERS[name]))
            return (name,)
    raise CheckpointError(
        f"the state of client {client} holds a {type(value).__name__} ({value!r:.40}); a state holds tensors, int "
        "(64 bits), float, bool, str, None, lists and tuples of those, and dicts: convert it, or leave it out"
    )


def _key(name: Any, client: int) -> str:
    if not isinstance(name, str):
        raise CheckpointError(f"the state of client {client} has the key {name!r}; the keys of a state are strings")
    return name


def _stacked(column: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([leaf.cpu() for leaf in column])


def _state(form: Any, leaves: Iterator[tuple[Tensor, Any]]) -> Any:
    match form:
        case ["dict", items]:
            return {name: _state(one, leaves) for name, one in items}
        case ["list", items]:
            return [_state(one, leaves) for one in items]
        case ["tuple", items]:
            return tuple(_state(one, leaves) for one in items)
        case ["plain", value]:
            return value
        case ["tensor", *_]:
            return next(leaves)[0].clone()  # every state owns its memory
        case _:
            return next(leaves)[1]
