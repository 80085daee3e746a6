"""Atomic writes: a file exists completely or not at all, even after a crash of the machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

BINARY: int = getattr(os, "O_BINARY", 0)
"""The flag with which Windows leaves line ends as they are."""
_WINDOWS = os.name == "nt"


def write_atomically(path: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a temporary file beside ``path``, sync it to disk, then rename it to ``path``."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        fill(temporary)
        # ``fill`` may have replaced the file by one with private permissions: restore those of the user's umask.
        temporary.chmod(mode)
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a small text file atomically."""
    write_atomically(path, lambda temporary: _fill_text(temporary, text))


def overwrite_text(path: Path, text: str) -> None:
    """Overwrite a file in place, for a full disk; not atomic."""
    content = text.encode()
    file = os.open(path, os.O_WRONLY | BINARY)
    try:
        # Pad with blanks to the old length before truncating: a concurrent reader sees nothing of the old text.
        os.write(file, content.ljust(os.fstat(file).st_size))
        os.ftruncate(file, len(content))
        os.fsync(file)
    finally:
        os.close(file)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and sync their names to disk: a crash must not lose a folder whose files are
    synced."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)


def sync(path: Path) -> None:
    """Sync a file, or the names inside a folder, to disk. Windows opens no folder, and syncs what may be written."""
    if _WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if _WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leftovers(folder: Path) -> Iterable[Path]:
    """Temporary files of killed processes: ours, and those of the safetensors writer."""
    return [*folder.glob(".*.tmp"), *folder.glob(".tmp*")]


def _fill_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")  # the same bytes on every system
