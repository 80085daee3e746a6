"""A small TOML writer, so that a bare install can write recipes (the standard library only reads them)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fedalloy.core.errors import SpecError

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}
# What must be escaped in a basic string: control characters. The tab need not be, but is easier to read escaped.
_UNSAFE = re.compile(r'[\\"\x00-\x1f\x7f]')


def dumps(value: Mapping[str, Any]) -> str:
    """TOML text of nested dicts; plain values first, then tables; keys whose value is None are left out.

    >>> print(dumps({"run": {"rounds": 3, "target": None}, "wire": [{"kind": "clip"}]}), end="")
    [run]
    rounds = 3
    <BLANKLINE>
    [[wire]]
    kind = "clip"
    """
    return "\n".join(_table(value, ())).strip("\n") + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    """The lines of one table: its values, then its tables, since a value after a table would belong to that table."""
    present = {_text_key(key, path): item for key, item in table.items() if item is not None}
    for key, item in present.items():
        if not _is_table(item) and not _is_tables(item):
            yield f"{_key(key)} = {_value(item, (*path, key))}"
    for key, item in present.items():
        below = (*path, key)
        if _is_table(item):
            yield from ("", f"[{_header(below)}]", *_table(item, below))
        elif _is_tables(item):
            for element in item:
                yield from ("", f"[[{_header(below)}]]", *_table(element, below))


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_tables(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(isinstance(item, Mapping) for item in value)


def _value(value: Any, path: tuple[str, ...]) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int():
            return str(int(value))
        case float():
            return _float(value)
        case str():
            return _string(value, path)
        case list() | tuple():
            return f"[{', '.join(_value(item, path) for item in value)}]"
        case Mapping():
            present = {_text_key(key, path): item for key, item in value.items() if item is not None}
            return "{" + ", ".join(f"{_key(key)} = {_value(item, (*path, key))}" for key, item in present.items()) + "}"
    raise SpecError(
        f"'{'.'.join(path)}' is {value!r} ({type(value).__name__}), which TOML cannot represent; "
        "allowed: str, int, float, bool, lists and dicts of those, and None as the value of a key"
    )


def _float(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def _string(value: str, path: tuple[str, ...]) -> str:
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise SpecError(f"'{'.'.join(path)}' holds {value!r}, which is not valid Unicode; remove the lone surrogate")
    return f'"{_UNSAFE.sub(_escape, value)}"'


def _escape(match: re.Match[str]) -> str:
    return _ESCAPES.get(match[0], f"\\u{ord(match[0]):04X}")


def _text_key(key: Any, path: tuple[str, ...]) -> str:
    if not isinstance(key, str):
        raise SpecError(f"'{'.'.join(path)}' has the key {key!r}; the keys of a TOML table are strings")
    return key


def _key(key: str) -> str:
    return key if _BARE.fullmatch(key) else _string(key, (key,))


def _header(path: tuple[str, ...]) -> str:
    return ".".join(_key(key) for key in path)
