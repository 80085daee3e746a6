"""The header of every message: JSON with the format and the version of fedalloy. Nothing heavy is imported here.

Some things that Python's JSON parser accepts are refused: duplicate names, NaN and infinities, numbers with thousands
of digits, deep nesting, and invalid Unicode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import fedalloy
from fedalloy.core.errors import FedalloyError

if TYPE_CHECKING:
    from flwr.app import RecordDict

FORMAT = 4
"""The format of messages; increased when an older reader could misread a newer message."""
RECORD, HEADER, PARTS = "fedalloy", "header", "parts"
"""Flower's record that holds the header, the header in it, and the list of parts in the header."""
_MOST_HEADER = 4 << 20
_MOST_DIGITS = 4000
_DEEPEST = 32


class Malformed(FedalloyError):
    """A message cannot be used: it has the wrong form, holds invalid values, or is larger than allowed."""


class Refused(FedalloyError):
    """A node refuses to take part; asking again does not help."""


class Unwell(Malformed):
    """A node could not carry out an order; it may succeed another time."""


class LeavesLost(Unwell):
    """A node has lost its client's local leaves: it can continue when they are sent again."""


def signed(**said: Any) -> dict[str, Any]:
    """A header with these values, the format and the version."""
    return {"format": FORMAT, "fedalloy": fedalloy.__version__, **said}


def plain_record(header: Mapping[str, Any], beside: Mapping[str, bytes] | None = None) -> RecordDict:
    """A header as a Flower record; without a list of parts it has none."""
    from flwr.app import ConfigRecord, RecordDict

    text = json.dumps({**header, PARTS: header.get(PARTS, {})}, separators=(",", ":"))
    return RecordDict({RECORD: ConfigRecord({HEADER: text, **(beside or {})})})


def read_header(content: RecordDict) -> dict[str, Any]:
    """The header of a received record, or :class:`Malformed`."""
    record = content.config_records.get(RECORD)
    text = record.get(HEADER) if record is not None else None
    if not isinstance(text, str) or len(text) > _MOST_HEADER:
        raise Malformed("it has no fedalloy header")
    return strict_object(text)


def strict_object(text: str) -> dict[str, Any]:
    """The JSON object of a header, or :class:`Malformed`.

    >>> strict_object('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    fedalloy.flower.protocol.header.Malformed: its header has the name 'a' twice
    """
    try:
        found = json.loads(text, object_pairs_hook=_once, parse_constant=_refuse, parse_int=_whole, parse_float=_finite)
    except (ValueError, RecursionError):
        raise Malformed("its header is not JSON") from None
    if not isinstance(found, dict):
        raise Malformed("its header is not an object")
    _check_depth(found)
    if "\\ud" in text or "\\uD" in text:
        _check_texts(found)
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise Malformed(f"its header has the name '{twice:.40}' twice")
    return found


def _refuse(name: str) -> NoReturn:
    raise Malformed(f"its header holds {name}, which is not a number")


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise Malformed(f"its header holds a number of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits) if len(digits) <= _MOST_DIGITS else math.inf
    if not math.isfinite(value):
        raise Malformed("its header holds a number that is too large")
    return value


def _check_texts(found: dict[str, Any]) -> None:
    """Refuse lone surrogates, which JSON can escape but no validator or file accepts."""
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise Malformed("its header holds invalid Unicode (a lone surrogate)") from None


def _check_depth(value: Any) -> None:
    """Level by level, without recursion, so that the check itself cannot overflow the stack."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            inner
            for one in level
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return
    raise Malformed(f"its header is nested more than {_DEEPEST} levels deep")
