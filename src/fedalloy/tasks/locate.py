"""Finds data files and checks their checksums.

First the folder named by ``FEDALLOY_DATA``, then the user cache (``$XDG_CACHE_HOME/fedalloy/data``, which
is ``~/.cache/fedalloy/data`` when the variable is not set). Each dataset declares its own files and
checksums; this module names no dataset.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedalloy.core import registry
from fedalloy.core.errors import DataError, nearest

Verdict = Literal["ok", "missing", "changed", "unknown"]
RECORD = "fetched.json"
"""In a folder of data: the checksums of what was fetched or made there."""


@dataclass(frozen=True)
class KnownFile:
    """A file that a dataset declares: its checksum, the dataset, and how to get the file."""

    filename: str
    sha256: str
    dataset: str
    hint: str


@dataclass(frozen=True)
class Check:
    """The result of checking a file: ``path`` and ``found`` (its checksum) are None if it is missing."""

    filename: str
    verdict: Verdict
    expected: str
    path: Path | None = None
    found: str | None = None


def folders() -> tuple[Path, ...]:
    """The folders that are searched, in order."""
    named = os.environ.get("FEDALLOY_DATA")
    ours = cache_folder() / "data"
    return (Path(named).expanduser(), ours) if named else (ours,)


def cache_folder() -> Path:
    """The user's cache for fedalloy."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fedalloy"


def look(filename: str) -> Path | None:
    """The first folder's copy of a file, or None."""
    return next((path for folder in folders() if (path := folder / filename).is_file()), None)


def find(filename: str, hint: str = "") -> Path:
    """The path of a data file, or an error with the searched folders and how to get the file."""
    path = look(filename)
    if path is None:
        searched = ", ".join(str(folder) for folder in folders())
        advice = hint or "put it into one of these folders"
        raise DataError(
            f"data file '{filename}' was not found in {searched}; {advice} (FEDALLOY_DATA names the folder)"
        )
    return path


def known() -> dict[str, KnownFile]:
    """All files that registered datasets declare."""
    table: dict[str, KnownFile] = {}
    for name, loader in registry.everything("dataset").items():
        for filename, sha256 in getattr(loader, "files", {}).items():
            table[filename] = KnownFile(filename, sha256, name, getattr(loader, "hint", ""))
    return table


def check(filename: str) -> Check:
    """Compare a file with the checksum its dataset declares, or with the one recorded when it was fetched."""
    table = known()
    if filename not in table:
        raise DataError(f"no dataset declares a file '{filename}': {nearest(filename, table)}")
    expected, path = table[filename].sha256, look(filename)
    if path is None:
        return Check(filename, "missing", expected)
    found, first = checksum(path), recorded(path.parent).get(filename, {}).get("sha256")
    if not expected and first is None:
        return Check(filename, "unknown", "", path, found)
    return Check(filename, "ok" if found in (expected, first) else "changed", expected or str(first), path, found)


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def recorded(folder: Path) -> dict[str, dict[str, str]]:
    """What was fetched into a folder or made there: checksums and addresses by file."""
    path = folder / RECORD
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as cause:
        raise DataError(
            f"{path} cannot be read ({cause}); delete it to forget the checksums of earlier downloads"
        ) from cause
    return found if isinstance(found, dict) else {}


def record(folder: Path, filename: str, facts: dict[str, str]) -> None:
    """Remember a file; an entry is never changed."""
    known = recorded(folder)
    if filename not in known:
        text = json.dumps({**known, filename: facts}, indent=1, sort_keys=True)
        (folder / f"{RECORD}.part").write_text(text + "\n", encoding="utf-8")
        (folder / f"{RECORD}.part").replace(folder / RECORD)
