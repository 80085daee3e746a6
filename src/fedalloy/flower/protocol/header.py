"""The header of every message: JSON that says which format and which fedalloy wrote it. Nothing heavy is imported here.

What Python's reader lets pass and a header never holds is refused: names that occur twice, NaN and infinities, numbers
of thousands of digits, values too deep inside others, and texts that are no Unicode.
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

FORMAT = 3
"""Of messages; raised when an older reader could misunderstand a newer writer."""
RECORD, HEADER, PARTS = "fedalloy", "header", "parts"
"""Flower's record that holds the header, the header in it, and the list of parts in the header."""
_MOST_HEADER = 4 << 20
_MOST_DIGITS = 4000
_DEEPEST = 32


class Malformed(FedalloyError):
    """What arrived cannot be used: it is no message of its kind, says what cannot be, or is larger than allowed."""


class Refused(FedalloyError):
    """A node will not take part, whatever happens: asking again is of no use."""


class Unwell(Malformed):
    """A node could not do what it was asked to; another time it may."""


class LeavesLost(Unwell):
    """A node has lost the leaves that stay with its client: sent again, it can go on."""


def signed(**said: Any) -> dict[str, Any]:
    """A header that says what it says, and who wrote it in which format."""
    return {"format": FORMAT, "fedalloy": fedalloy.__version__, **said}


def plain_record(header: Mapping[str, Any], beside: Mapping[str, bytes] | None = None) -> RecordDict:
    """A header as the record that Flower carries; one that lists no parts has none."""
    from flwr.app import ConfigRecord, RecordDict

    text = json.dumps({**header, PARTS: header.get(PARTS, {})}, separators=(",", ":"))
    return RecordDict({RECORD: ConfigRecord({HEADER: text, **(beside or {})})})


def read_header(content: RecordDict) -> dict[str, Any]:
    """The header of what Flower brought, or :class:`Malformed`."""
    record = content.config_records.get(RECORD)
    text = record.get(HEADER) if record is not None else None
    if not isinstance(text, str) or len(text) > _MOST_HEADER:
        raise Malformed("it has no header of fedalloy's")
    return strict_object(text)


def strict_object(text: str) -> dict[str, Any]:
    """The object that a header is, or :class:`Malformed`.

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
    raise Malformed(f"its header holds {name}, which is no number")


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
    """JSON can escape half a character, which no validator or file takes."""
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise Malformed("its header holds a text that is no Unicode (a lone surrogate)") from None


def _check_depth(value: Any) -> None:
    """Level by level, so that the check itself cannot go too deep."""
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
    raise Malformed(f"its header has values inside values more than {_DEEPEST} times")
