"""What one client's data mean: a pair ``(x, y)``, or pairs for training, validation and testing.

Tuples group, lists and arrays hold data. Nothing is concluded from lengths: a value that can be read in two ways is
refused, with both readings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.errors import DataError
from fedalloy.core.inputs import Inputs
from fedalloy.core.own_code import own_code
from fedalloy.core.protocols import DataPart
from fedalloy.core.types import Examples
from fedalloy.tasks.datasets.base import Dataset, as_pair, from_clients

PARTS: tuple[DataPart, ...] = ("train", "valid", "test")
Pair = tuple[Any, Any]
ClientParts = dict[str, Pair]
"""Pairs by part; the part ``""`` is everything a client has, to be split by the task's fractions."""
_Form = Literal["array", "flat", "tuple", "list", "other"]

ALLOWED = (
    "a client's data are (x, y), or (train, test) or (train, valid, test) of such pairs, or a mapping with the keys "
    "x and y, or train and any of valid and test"
)


def read_client(value: Any, who: str) -> ClientParts:
    """The pairs of one client by part; ``who`` names the client in errors.

    >>> sorted(read_client({"train": ([1.0], [0]), "test": ([2.0], [1])}, "client 0"))
    ['test', 'train']
    """
    if isinstance(value, Examples):
        return {"": (value.x, value.y)}
    if isinstance(value, Mapping):
        return _from_mapping(value, who)
    if is_torch_dataset(value):
        return {"": stacked(value, who)}
    if not isinstance(value, tuple | list):
        raise DataError(f"{who}: got {_kind(value)}; {ALLOWED}")
    if len(value) == 2:
        return _from_two(value[0], value[1], who)
    if len(value) == 3 and all(_form(one) == "tuple" for one in value):
        return {part: _pair(one, f"{who} [{part}]") for part, one in zip(PARTS, value, strict=True)}
    kinds = ", ".join(map(_kind, value[:4])) + (", ..." if len(value) > 4 else "")
    raise DataError(f"{who}: got {len(value)} values ({kinds}); {ALLOWED}")


def pooled(clients: Sequence[Any], names: Sequence[str] | None = None, classes: int | None = None) -> Dataset:
    """A dataset in memory from the data of every client.

    >>> pooled([{"train": ([[0.0]], [0]), "test": ([[1.0]], [1])}]).part
    tensor([0, 2])
    """
    called = (
        [f"client '{name}'" for name in names] if names is not None else [f"client {k}" for k in range(len(clients))]
    )
    read = [read_client(value, who) for value, who in zip(clients, called, strict=True)]
    whole = ["" in parts for parts in read]
    if any(whole) and not all(whole):
        raise DataError(
            f"{called[whole.index(True)]} has one pair (x, y) and {called[whole.index(False)]} has parts for training "
            "and testing; give all clients in the same form"
        )
    if not read or all(whole):
        return from_clients([parts[""] for parts in read], names, classes)
    joined = [_joined(parts, who) for parts, who in zip(read, called, strict=True)]
    made = from_clients([(one.x, one.y) for one, _ in joined], names, classes)
    part = torch.cat([part for _, part in joined])
    return Dataset(made.x, made.y, made.classes, made.owner, names=made.names, notices=made.notices, part=part)


def examples_of(parts: ClientParts, who: str) -> dict[str, Examples]:
    """The pairs of a client as tensors, by part."""
    return {name: Examples(*as_pair(*pair, f"{who} [{name}]" if name else who)) for name, pair in parts.items()}


def stacked(dataset: Any, who: str, rows: Sequence[int] | None = None) -> Pair:
    """Some rows of a torch ``Dataset`` (default: all) as arrays; every row must be a pair (x, y)."""
    with own_code(f"{who}: its Dataset", DataError):
        found = [dataset[row] for row in (range(len(dataset)) if rows is None else rows)]
    return stack_rows(found, who)


def stack_rows(rows: Sequence[Any], who: str) -> Pair:
    """Pairs (x, y) of single examples as two arrays."""
    for row in rows:
        if not isinstance(row, tuple | list) or len(row) != 2:
            raise DataError(f"{who}: a row of the Dataset is {_kind(row)}; every row must be a pair (x, y)")
    if not rows:
        return np.zeros((0, 0), np.float32), np.zeros(0, np.int64)
    try:
        return _stack([row[0] for row in rows]), _stack([row[1] for row in rows])
    except (RuntimeError, ValueError, TypeError) as cause:
        raise DataError(f"{who}: the rows of the Dataset do not have one shape ({cause})") from cause


def is_torch_dataset(value: Any) -> bool:
    """Whether a value is a torch ``Dataset``."""
    return isinstance(value, torch.utils.data.Dataset)


def _stack(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {name: _stack([value[name] for value in values]) for name in first}
    if isinstance(first, tuple) and first and all(isinstance(one, Tensor | np.ndarray) for one in first):
        return tuple(_stack(list(column)) for column in zip(*values, strict=True))
    if isinstance(first, Tensor):
        return torch.stack(values)
    return np.stack([np.asarray(value) for value in values])


def _from_mapping(value: Mapping[Any, Any], who: str) -> ClientParts:
    keys = set(value)
    if keys == {"x", "y"}:
        return {"": (value["x"], value["y"])}
    if "train" in keys and keys <= set(PARTS):
        return {part: _pair(value[part], f"{who} [{part}]") for part in PARTS if part in keys}
    raise DataError(f"{who}: a mapping with the keys {', '.join(map(str, value)) or 'none'}; {ALLOWED}")


def _from_two(first: Any, second: Any, who: str) -> ClientParts:
    one, other = _form(first), _form(second)
    if one == other == "tuple" and not (_rows_of_numbers(first) and _rows_of_numbers(second)):
        return {"train": _pair(first, f"{who} [train]"), "test": _pair(second, f"{who} [test]")}
    if one in ("tuple", "list") and other in ("tuple", "list"):
        raise DataError(
            f"{who}: ({_kind(first)}, {_kind(second)}) can mean (x, y), with x a list of examples and y a list of "
            "targets, or (train, test), each a pair (x, y). Give arrays for the first (numpy.array(x), "
            "numpy.array(y)), or a mapping for the second: {'train': (x, y), 'test': (x, y)}"
        )
    if "other" in (one, other):
        wrong = first if one == "other" else second
        raise DataError(f"{who}: {_kind(wrong)} holds no examples; {ALLOWED}")
    return {"": (first, second)}


def _pair(value: Any, who: str) -> Pair:
    """One part, which must be a pair."""
    if isinstance(value, Examples):
        return value.x, value.y
    if isinstance(value, Mapping) and set(value) == {"x", "y"}:
        return value["x"], value["y"]
    if is_torch_dataset(value):
        return stacked(value, who)
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise DataError(f"{who}: got {_kind(value)}; a part must be a pair (x, y)")
    return value[0], value[1]


def _joined(parts: ClientParts, who: str) -> tuple[Examples, Tensor]:
    """All parts of a client behind each other, and the part of every row."""
    made = {PARTS.index(name): one for name, one in examples_of(parts, who).items() if len(one)}
    if not made:
        return Examples(*as_pair([], [], who)), torch.zeros(0, dtype=torch.int64)
    shapes = {str(inputs.shape_of(one.x)) for one in made.values()}
    if len(shapes) > 1:
        raise DataError(f"{who}: its parts have examples of shape {' and '.join(sorted(shapes))}; give one shape")
    x, y = (_cat([getattr(one, name) for one in made.values()]) for name in ("x", "y"))
    part = torch.cat([torch.full((len(one),), number) for number, one in made.items()])
    return Examples(x, y), part


def _cat(some: list[Inputs]) -> Inputs:
    return inputs.joined(some)


def _form(value: Any) -> _Form:
    """What a value can be, whatever its length."""
    if isinstance(value, tuple | list):
        if not any(_is_group(one) for one in value):
            return "flat"
        return "tuple" if isinstance(value, tuple) else "list"
    if isinstance(value, Mapping) or hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
        return "array"
    return "other"


def _is_group(value: Any) -> bool:
    return isinstance(value, tuple | list | Mapping) or (hasattr(value, "__array__") and np.ndim(value) > 0)


def _rows_of_numbers(value: tuple[Any, ...]) -> bool:
    """Whether a tuple holds only rows of plain numbers, as a small table written by hand does."""
    return all(isinstance(one, tuple | list) and _form(one) == "flat" for one in value)


def _kind(value: Any) -> str:
    """A value in a few words."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)} {'groups' if _form(value) in ('tuple', 'list') else 'values'}"
    return f"a {type(value).__name__}"
