"""Changing a recipe before it is checked: ``--set a.b=value`` and the ``set`` tables of a comparison."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from fedalloy.core.errors import SpecError
from fedalloy.tasks.sources.opening import spec_of

Data = dict[str, Any]


def literal(text: str) -> Any:
    """A value in TOML notation; any other text is taken as a string.

    >>> literal("0.1"), literal("[1, 2]"), literal("true"), literal("fedprox")
    (0.1, [1, 2], True, 'fedprox')
    """
    if "\n" in text:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def assign(data: Mapping[str, Any], assignments: list[str]) -> Data:
    """The recipe after ``a.b=value`` for each assignment.

    >>> assign({"run": {"rounds": 5}}, ["run.rounds=9", "algorithm.name=fedprox"])
    {'run': {'rounds': 9}, 'algorithm': {'name': 'fedprox'}}
    """
    changed = copy.deepcopy(dict(data))
    for text in assignments:
        path, equals, value = text.partition("=")
        if not equals or not path.strip():
            raise SpecError(f"'{text}' sets nothing: write a.b=value, for example run.rounds=20")
        put(changed, path.strip(), literal(value.strip()))
    return changed


def merge(data: Mapping[str, Any], changes: Mapping[str, Any]) -> Data:
    """The recipe after a table of changes, whose keys may be dotted or nested."""
    changed = copy.deepcopy(dict(data))
    for path, value in leaves(changes):
        put(changed, path, value)
    return changed


def leaves(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths and values of nested tables.

    >>> list(leaves({"run": {"rounds": 3}, "algorithm.mu": 0.1}))
    [('run.rounds', 3), ('algorithm.mu', 0.1)]
    """
    for key, value in changes.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


def put(data: Data, path: str, value: Any) -> None:
    """Set one value; missing tables on the path are created, a number selects an entry of a list."""
    *way, last = path.split(".")
    place: Any = data
    for step in way:
        place = _inside(place, step, path)
    if isinstance(place, list):
        place[_position(place, last, path)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise SpecError(f"'{path}' cannot be set: '{'.'.join(way)}' is {place!r}, not a table")


def _inside(place: Any, step: str, path: str) -> Any:
    if isinstance(place, list):
        return place[_position(place, step, path)]
    if not isinstance(place, dict):
        raise SpecError(f"'{path}' cannot be set: there is {place!r} before '{step}', not a table")
    found = place.setdefault(step, {})
    if isinstance(found, str) and path.split(".")[0] == "task":
        # dataset = "mnist" is short for { kind = "mnist" }, so that its arguments can be set.
        found = place[step] = _as_table(found, step)
    return found


def _as_table(name: str, step: str) -> dict[str, Any]:
    """A name as a table; that of a dataset may also be a folder or a function."""
    spec = spec_of(name) if step == "dataset" else name
    return dict(spec) if isinstance(spec, dict) else {"kind": name}


def _position(entries: list[Any], step: str, path: str) -> int:
    if not step.isdecimal() or int(step) >= len(entries):
        raise SpecError(f"'{path}' cannot be set: '{step}' is not an entry of a list of {len(entries)}; count from 0")
    return int(step)
