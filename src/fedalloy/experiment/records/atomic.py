"""Files that are either there in full or not at all, even when the machine stops in between."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path


def write_atomically(path: Path, fill: Callable[[Path], None]) -> None:
    """Let ``fill`` write a temporary neighbour of ``path``, bring it to the disk, then rename it into place."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        fill(temporary)
        # ``fill`` may have replaced the file by a private one of its own: keep what the user's umask allows.
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
    """Write into the room that a file has already, for a disk that has no other; not safe against a stop in between."""
    content = text.encode()
    file = os.open(path, os.O_WRONLY)
    try:
        # Blank up to the old length before the file is cut: whoever reads meanwhile finds no rest of the old text.
        os.pwrite(file, content.ljust(os.fstat(file).st_size), 0)
        os.ftruncate(file, len(content))
        os.fsync(file)
    finally:
        os.close(file)


def make_folder(path: Path) -> None:
    """A folder with all those above it; the names of new ones are brought to the disk, so that a machine that stops
    does not lose a folder whose files are safe."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        sync(folder.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names inside a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leftovers(folder: Path) -> Iterable[Path]:
    """Temporary files that a killed process left behind: ours, and those of the safetensors writer."""
    return [*folder.glob(".*.tmp"), *folder.glob(".tmp*")]


def _fill_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
