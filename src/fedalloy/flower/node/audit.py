"""The audit log of a node: everything that was asked of it, and what it answered or refused, in the order it happened.

``audit.jsonl`` in the node's store is only ever appended to. Every line holds the hash of the line before, so that a
line that was changed, removed or inserted later breaks the chain (:func:`verify`). Lines removed from the end do not:
the operator notes the last hash from time to time and checks that it is still there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import lock_descriptor

from fedalloy.core.errors import CheckpointError

FILE = "audit.jsonl"
START = "0" * 64
"""What the first line has in place of a hash before it."""
_TAIL = 1 << 16
_POLL = 0.01


@dataclass(frozen=True)
class Audit:
    """The audit log of a store."""

    store: Path
    clock: Callable[[], float] = time.time

    @property
    def file(self) -> Path:
        """The log."""
        return self.store / FILE

    def note(self, entry: Mapping[str, Any]) -> str:
        """Append an entry, on disk before this returns; its hash. ``OSError`` if it cannot be written."""
        self.store.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "rb+") as log:
            lock_descriptor(log.fileno(), poll_interval=_POLL)
            before = _last_hash(log)
            row = {"time": round(self.clock(), 3), **entry, "before": before}
            line = {**row, "hash": _hash(row)}
            log.write(_text(line).encode() + b"\n")
            log.flush()
            os.fsync(log.fileno())
        return str(line["hash"])


def verify(store: Path, known: str = "") -> tuple[int, str]:
    """The number of entries of a log and its last hash; :class:`CheckpointError` names the first line that does not
    belong there. A hash that was ``known`` before must still be in the log. Half a line at the end, from a crash or a
    full disk while it was written, is no entry: its answer was not sent, and the next entry takes its place."""
    expected, count, found = START, 0, known in ("", START)
    file = store / FILE
    try:
        with file.open(encoding="utf-8") as lines:
            for text in lines:
                if text.endswith("\n"):
                    count += 1
                    expected = _checked(text, expected, f"{file}, line {count}")
                    found = found or expected == known
    except FileNotFoundError:
        pass
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} is not text: {error}") from None
    if not found:
        raise CheckpointError(f"{file} does not hold the entry {known}: entries were removed from its end")
    return count, expected


def approved_once(store: Path) -> dict[str, str]:
    """The studies that were ever approved, by fingerprint, with the last name they had."""
    found: dict[str, str] = {}
    with contextlib.suppress(FileNotFoundError), (store / FILE).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                entry = json.loads(line)
                found[str(entry["approved"])] = str(entry["name"])
    return found


def _checked(text: str, expected: str, where: str) -> str:
    """The hash of a line that follows the one with the hash ``expected``."""
    try:
        line = json.loads(text)
        told = line.pop("hash")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{where} is no entry of an audit log") from None
    if line.get("before") != expected:
        raise CheckpointError(f"{where} does not follow the line before it: an entry was removed, inserted or moved")
    if told != _hash(line):
        raise CheckpointError(f"{where} was changed after it was written")
    return str(told)


def _hash(row: Mapping[str, Any]) -> str:
    return hashlib.sha256(_text(row).encode()).hexdigest()


def _text(row: Mapping[str, Any]) -> str:
    return json.dumps(row, sort_keys=True, separators=(",", ":"))


def _last_hash(log: Any) -> str:
    """The hash of the last line. Half a line, from a crash while it was written, is cut off: its answer was not
    sent."""
    size = log.seek(0, os.SEEK_END)
    tail = _last_lines(log, size)
    torn = len(tail) - (tail.rfind(b"\n") + 1)
    if torn:
        log.truncate(size - torn)
        tail = tail[: len(tail) - torn]
    if not tail:
        return START
    try:
        return str(json.loads(tail.splitlines()[-1])["hash"])
    except (ValueError, KeyError, TypeError):
        return START


def _last_lines(log: Any, size: int) -> bytes:
    """The end of a log, with its last whole line whatever the length of that: two line ends, or everything."""
    length, tail = _TAIL, b""
    while len(tail) < size and tail.count(b"\n") < 2:
        log.seek(max(0, size - length))
        tail, length = log.read(), 2 * length
    return tail
