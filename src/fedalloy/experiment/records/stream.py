"""A file of JSON objects, one per line: rows are only appended, and cut off when a run resumes."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records.atomic import BINARY

# Flushed at this size: whole lines in one call, so that a reader sees whole lines.
_BUFFER = 1 << 16


class Stream:
    """Appends rows to a file. It has its own buffer instead of the interpreter's, so that a forked worker that exits
    does not write the parent's rows a second time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | BINARY, 0o666)
        self._buffer = bytearray()
        self._unsynced = False

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; it reaches the file at the next flush."""
        self._buffer += encode(row).encode("ascii")
        self._buffer += b"\n"
        if len(self._buffer) >= _BUFFER:
            self.flush()

    def write(self, lines: bytes) -> None:
        """Add whole lines that were encoded before."""
        self._buffer += lines

    def flush(self) -> None:
        """Write everything to the operating system."""
        while self._buffer:
            written = os.write(self._file, self._buffer)
            del self._buffer[:written]
            self._unsynced = True

    def sync(self) -> int:
        """Sync everything to disk; returns the length of the file in bytes."""
        self.flush()
        if self._unsynced:
            os.fsync(self._file)
            self._unsynced = False
        return os.fstat(self._file).st_size

    def cut(self, length: int) -> None:
        """Drop everything after the first ``length`` bytes, buffered rows too."""
        self._buffer.clear()
        os.ftruncate(self._file, length)
        os.fsync(self._file)

    def close(self) -> None:
        """Flush and close the file."""
        try:
            self.flush()
        finally:
            os.close(self._file)


def encode(row: Mapping[str, Any]) -> str:
    """One row as compact JSON: keys in the given order, shortest floats, NaN and infinity as null, tensors
    and arrays as lists.

    >>> encode({"round": 1, "loss": float("nan"), "weights": (0.1, 0.9)})
    '{"round":1,"loss":null,"weights":[0.1,0.9]}'
    """
    try:
        try:
            return _encoded(row)
        except ValueError:  # a number that is not finite; rare, so rows are searched only then
            return _encoded(_finite(row))
    except TypeError as error:
        raise SpecError(f"a record cannot hold this: {error}. Allowed: {_ALLOWED}") from error


_ALLOWED = "numbers, strings, bool, None, tensors, arrays, and lists and dicts of those"


def length_through(path: Path, round: int) -> int:
    """The length of a stream up to the first row of a later round or the first broken line."""
    length = 0
    with path.open("rb") as lines:
        for line in lines:
            row = decode(line)
            if row is None or not isinstance(row.get("round"), int) or row["round"] > round:
                break
            length += len(line)
    return length


def decode(line: bytes) -> dict[str, Any] | None:
    """The row of one line, or None when the line is incomplete or broken.

    >>> decode(b'{"round":1}\\n'), decode(b'{"round":')
    ({'round': 1}, None)
    """
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _as_list(value: Any) -> Any:
    """Tensors, arrays and their scalars, recognised by their common method so that no library is imported here."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{value!r} is a {type(value).__name__}")


_encoder = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_as_list)
# What ``encode`` of the encoder makes for every row.
_make: Any = getattr(json.encoder, "c_make_encoder", None)
_chunks: Any = _make and _make(
    None, _as_list, json.encoder.encode_basestring_ascii, None, ":", ",", False, False, False
)


def _encoded(row: Mapping[str, Any]) -> str:
    return "".join(_chunks(row, 0)) if _chunks else _encoder.encode(row)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return _finite(value.tolist()) if hasattr(value, "tolist") else value
