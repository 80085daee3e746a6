"""Parses requests of the page; an invalid one is a ``ValueError`` that names what is valid."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, urlsplit

Query = dict[str, list[str]]
LARGEST = 2**53 - 1
"""The largest integer that JavaScript represents exactly."""
_MOST_FIELDS = 100


def taken_apart(target: str) -> tuple[str, Query]:
    """Path and query fields of a request target.

    >>> taken_apart("/api/run?run=a%2Fb")
    ('/api/run', {'run': ['a/b']})
    """
    where = urlsplit(target)
    return where.path, parse_qs(where.query, keep_blank_values=True, max_num_fields=_MOST_FIELDS)


def whole_number(text: str, what: str) -> int:
    """A number of rows, rounds or changes: digits only.

    >>> whole_number("12", "round")
    12
    >>> whole_number("1e400", "round")
    Traceback (most recent call last):
    ValueError: round must be a whole number from 0 to 9007199254740991
    """
    # Check the length first: Python is slow for thousands of digits, or refuses them with its own message.
    if not (text.isascii() and text.isdigit() and len(text) <= 16 and int(text) <= LARGEST):
        raise ValueError(f"{what} must be a whole number from 0 to {LARGEST}")
    return int(text)


def cursor(text: str) -> tuple[str, int]:
    """``ID:ROWS`` as a pair.

    >>> cursor("fedavg/seed-1:30")
    ('fedavg/seed-1', 30)
    """
    run, _, rows = text.rpartition(":")
    return run, whole_number(rows, "rows")


def run_in(body: str) -> str:
    """The run that a body ``{"run": ID}`` names."""
    try:
        asked = json.loads(body)
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    if not isinstance(asked, dict) or not isinstance(asked.get("run"), str):
        raise ValueError('send {"run": ID}')
    return str(asked["run"])
