"""What the files of a run folder may hold: types and bounds of what readers rely on.

A folder may come from an untrusted source. Everything that is read is checked here once, so that pages, tables and
resumed runs need not check again. Columns and keys that are not named here may hold any plain value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

MOST_CLIENTS, MOST_ROUNDS = 10_000_000, 1_000_000_000
"""Larger numbers are refused as client ids and rounds, because readers allocate memory for all smaller ones."""
_LARGEST, _DEEPEST = 1e300, 20
_NUMBERS = {int, float, type(None)}
Check = Callable[[Any], bool]


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value holds only finite numbers, texts, and lists and tables that are not nested too deeply."""
    if isinstance(value, dict):
        return depth < _DEEPEST and all(text(name) and is_plain(one, depth + 1) for name, one in value.items())
    if isinstance(value, list):
        return numbers(value) or (depth < _DEEPEST and all(is_plain(one, depth + 1) for one in value))
    return number(value) or value is None or isinstance(value, bool) or text(value)


def number(value: Any) -> bool:
    """A finite number within the range of all readers."""
    return type(value) in (int, float) and -_LARGEST < value < _LARGEST


def numbers(value: Any) -> bool:
    """A list of numbers and nulls."""
    if type(value) is not list or not set(map(type, value)) <= _NUMBERS:
        return False
    return all(one is None or -_LARGEST < one < _LARGEST for one in value)


def any_value(value: Any) -> bool:
    """Anything."""
    return True


def text(value: Any) -> bool:
    """A string that can be written to a file: JSON allows lone surrogates, UTF-8 does not."""
    if not isinstance(value, str):
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


def within(most: int) -> Check:
    """A whole number from 0 to below ``most``."""
    return lambda value: type(value) is int and 0 <= value < most


def maybe(check: Check) -> Check:
    """The same, or null."""
    return lambda value: value is None or check(value)


def each(check: Check) -> Check:
    """A list of such."""
    return lambda value: type(value) is list and all(map(check, value))


def table(check: Check) -> Check:
    """A table of such, by name."""
    return lambda value: isinstance(value, dict) and all(map(text, value)) and all(map(check, value.values()))


def counts(most: int) -> Check:
    """A list of whole numbers from 0 to below ``most``."""

    def check(value: Any) -> bool:
        whole = type(value) is list and set(map(type, value)) <= {int}
        return whole and (not value or (min(value) >= 0 and max(value) < most))

    return check


def _drops(value: Any) -> bool:
    """Reasons by client."""
    if not isinstance(value, dict) or not all(map(text, value.values())):
        return False
    return all(len(who) < 9 and who.isascii() and who.isdigit() for who in value)


_ROUND, _SCORES = within(MOST_ROUNDS), table(maybe(number))
ROW: dict[str, Check] = {
    "round": _ROUND,
    **dict.fromkeys(("ids", "absent", "late", "resent"), counts(MOST_CLIENTS)),
    "weights": lambda value: numbers(value) or table(numbers)(value),
    "dropped": _drops,
    **dict.fromkeys(("train_loss", "bytes_up", "bytes_down", "simulated_seconds", "mix", "memory"), maybe(number)),
    "device_memory": maybe(number),
    "info": table(is_plain),
    **dict.fromkeys(("evaluation", "evaluation_global"), table(_SCORES)),
    "evaluation_mix": table(table(lambda value: maybe(number)(value) or numbers(value) or _SCORES(value))),
    "global": table(maybe(number)),
    **dict.fromkeys(("model", "split"), text),
    "parquet": lambda value: text(value) or numbers(value),
    "clients": lambda value: within(MOST_CLIENTS)(value) or is_plain(value),
}
"""The columns of all three streams; ``round`` is in every row."""
STATUS: dict[str, Check] = {"state": text, "round": _ROUND, "reason": text}
MANIFEST: dict[str, Check] = {
    "clients": within(MOST_CLIENTS),
    "names": each(text),
    "sizes": counts(1 << 53),
    "class_counts": each(counts(1 << 53)),
    "digest": text,
}
_LENGTHS = table(within(1 << 62))
SAVED: dict[str, Check] = {
    "round": _ROUND,
    "lengths": lambda value: _LENGTHS(value) and {"rounds", "clients"} <= value.keys(),
    "server": table(any_value),
    "clients": lambda value: table(table(any_value))(value) and _drops(dict.fromkeys(value, "")),
    "extra": table(any_value),
}
"""What a checkpoint must hold."""


def is_row(value: Any) -> bool:
    """Whether a value can be a row of a stream."""
    return "round" in value and row_fault(value) is None


def row_fault(row: dict[str, Any]) -> str | None:
    """What is wrong with a row; in a row of client scores every further column is a list of numbers.

    >>> row_fault({"round": 1, "model": "global", "ids": [0], "accuracy": "high"})
    "'accuracy'"
    """
    return fault(row, ROW, numbers if "model" in row or "split" in row else is_plain)


def fault(value: Any, known: Mapping[str, Check], others: Check = is_plain) -> str | None:
    """The name of a table's first invalid entry; None if all are valid.

    >>> fault({"round": -1}, ROW), fault({"round": 1, "own": {"x": 2}}, ROW)
    ("'round'", None)
    """
    if not isinstance(value, dict):
        return "it is not a table"
    wrong = next((name for name, one in value.items() if not (text(name) and known.get(name, others)(one))), None)
    return None if wrong is None else ascii(wrong[:40])
