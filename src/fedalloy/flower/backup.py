"""Backup and restore of a server: settings, certificates, node keys, the SuperLink's database, and its runs' folders.

A backup may be made while the server works. The database is copied by SQLite itself. A run's checkpoints are copied
before its records, because records only grow and a checkpoint never refers to rows that are not written yet: what
is copied is a run that was interrupted, and continues as one. The archive is a tar file that its owner alone can read,
since it holds private keys; its last member lists every file with its SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sqlite3
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.records.reading import is_run
from fedalloy.flower.database import note_moved, run_entries
from fedalloy.flower.layout import RUNNING, ServerPlace
from fedalloy.flower.session import ServerSession

CONTENTS = "backup.json"
FORMAT = 1
_TRIES = 5
_LEFT_OUT = frozenset(("flwr", "logs", RUNNING, "state.db", "state.db-wal", "state.db-shm", "state.db-journal"))
"""In a server's folder: what is written again at every start, and the database, which is copied in its own way."""
_NOT_OF_A_RUN = frozenset(("lock", "stop", "index.sqlite", "federation"))
_CHUNK = 1 << 20


@dataclass
class Archive:
    """A backup that is being written."""

    tar: tarfile.TarFile
    files: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Where the archive is written."""
        return Path(str(self.tar.name)).parent

    def add(self, file: Path, name: str) -> None:
        """Add a file as long as it is now: one that grows meanwhile is cut there."""
        with file.open("rb") as source:
            told = self.tar.gettarinfo(arcname=name, fileobj=source)
            told.uid = told.gid = 0
            told.uname = told.gname = ""
            reader = _Hashing(source)
            self.tar.addfile(told, reader)
        self.files[name] = reader.digest.hexdigest()

    def add_folder(self, name: str) -> None:
        """Add a folder, which may be empty."""
        told = tarfile.TarInfo(name)
        told.type, told.mode, told.mtime = tarfile.DIRTYPE, 0o755, int(time.time())
        self.tar.addfile(told)

    def finish(self, about: dict[str, Any]) -> None:
        """Add the list of contents."""
        text = json.dumps({**about, "files": self.files}, indent=1).encode()
        told = tarfile.TarInfo(CONTENTS)
        told.size, told.mtime, told.mode = len(text), int(time.time()), 0o600
        self.tar.addfile(told, io.BytesIO(text))


@dataclass
class _Hashing:
    """A file that is read once, and hashed on the way."""

    source: Any
    digest: Any = field(default_factory=hashlib.sha256)

    def read(self, size: int = -1) -> bytes:
        found: bytes = self.source.read(size)
        self.digest.update(found)
        return found


def back_up(folder: Path, output: Path) -> dict[str, str]:
    """Write a backup of a server's folder; the runs in it by name, and where they are."""
    place = ServerPlace.read(folder)
    if output.exists():
        raise SpecError(f"{output} exists and is not overwritten; choose another name")
    if place.folder.resolve() in output.resolve().parents:
        raise SpecError(
            f"{output} is in the server's own folder, so every later backup would hold it; write it elsewhere"
        )
    if not output.parent.is_dir():
        raise SpecError(f"there is no folder {output.parent}; make it, or write the backup elsewhere")
    runs = _runs(place)
    draft = output.with_name(f".{output.name}.draft-{os.getpid()}")
    draft.touch(mode=0o600)
    try:
        with tarfile.open(draft, "w") as tar:
            archive = Archive(tar)
            for name, run in runs.items():
                _add_run(archive, run, name)
            _add_server(archive, place, set(runs.values()))
            archive.finish({
                "format": FORMAT, "created": time.time(), "versions": _versions(), "runs": _texts(runs),
                "sessions": _sessions(place, runs),
            })  # fmt: skip
        draft.rename(output)
    except (OSError, sqlite3.Error) as error:
        raise CheckpointError(f"the backup {output} cannot be written: {error}") from None
    finally:
        draft.unlink(missing_ok=True)
    return _texts(runs)


def restore(archive: Path, folder: Path) -> dict[str, Any]:
    """Write the contents of a backup to a new folder, ``server`` and ``runs/NAME``; what is in it. Nothing is written
    unless every file is as it was."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SpecError(f"{folder} exists and is not empty: nothing was written. Choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with tarfile.open(archive) as tar:
            tar.extractall(draft, filter="data")
        about = _checked(draft, archive)
        (draft / CONTENTS).unlink()
        for run in about["runs"]:
            ServerSession.renew(draft / run)
        note_moved(draft / "server", {number: f"../{name}" for number, name in about.get("sessions", {}).items()})
        if folder.exists():
            folder.rmdir()
        draft.rename(folder)
    except tarfile.ReadError:
        raise CheckpointError(f"{archive} is no backup of a server, or was cut off") from None
    except (OSError, tarfile.TarError) as error:
        raise CheckpointError(f"{archive} cannot be restored: {error}") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return about


def _runs(place: ServerPlace) -> dict[str, Path]:
    """The folders of all runs that the server knows and that are still there, by their names in the backup."""
    found: dict[str, Path] = {}
    for run in dict.fromkeys(one.folder for one in run_entries(place) if one.folder and is_run(one.folder)):
        name, count = f"runs/{run.name}", 2
        while name in found:
            name, count = f"runs/{run.name}-{count}", count + 1
        found[name] = run
    return found


def _sessions(place: ServerPlace, runs: Mapping[str, Path]) -> dict[str, str]:
    """The names in the backup of the runs that Flower knows by number."""
    names = {run: name for name, run in runs.items()}
    return {one.number: names[one.folder] for one in run_entries(place) if one.folder in names}


def _add_run(archive: Archive, run: Path, name: str) -> None:
    """First how far it is, which must not be more than what follows, then the checkpoints; those that are replaced
    meanwhile are looked for again."""
    archive.add(run / "status.json", f"{name}/status.json")
    archive.add_folder(f"{name}/checkpoints")
    for _ in range(_TRIES):
        try:
            for file in sorted((run / "checkpoints").glob("round-*")):
                if f"{name}/checkpoints/{file.name}" not in archive.files:
                    archive.add(file, f"{name}/checkpoints/{file.name}")
            break
        except FileNotFoundError:
            continue
    else:
        raise CheckpointError(f"the checkpoints of {run} change faster than they can be copied; pause the run first")
    for file in _files(run, _NOT_OF_A_RUN | {"status.json", "checkpoints"}):
        archive.add(file, f"{name}/{file.relative_to(run)}")


def _add_server(archive: Archive, place: ServerPlace, runs: set[Path]) -> None:
    """The server's folder without runs that lie in it, and a copy of the database."""
    for file in _files(place.folder, _LEFT_OUT):
        if not any(run in file.parents for run in runs):
            archive.add(file, f"server/{file.relative_to(place.folder)}")
    if not place.database.exists():
        return
    # Beside the backup, where there is space for it: the system's temporary folder may be small, or in memory.
    with tempfile.TemporaryDirectory(prefix=".fedalloy-backup-", dir=archive.folder) as aside:
        copy = Path(aside) / place.database.name
        with (
            closing(sqlite3.connect(f"{place.database.as_uri()}?mode=ro", uri=True, timeout=60.0)) as source,
            closing(sqlite3.connect(copy)) as target,
        ):
            source.backup(target)
        archive.add(copy, f"server/{place.database.name}")


def _files(folder: Path, without: frozenset[str]) -> Iterator[Path]:
    """The files of a folder, without some of its members and without drafts, which are hidden."""
    for file in sorted(folder.rglob("*")):
        parts = file.relative_to(folder).parts
        if parts[0] not in without and not any(part.startswith(".") for part in parts) and file.is_file():
            yield file


def _checked(draft: Path, archive: Path) -> dict[str, Any]:
    """The list of contents, if it is that of this version and every file is as it says."""
    try:
        about: dict[str, Any] = json.loads((draft / CONTENTS).read_text(encoding="utf-8"))
        files = dict(about["files"])
    except (OSError, ValueError, KeyError, TypeError):
        raise CheckpointError(f"{archive} is no backup of a server, or was cut off") from None
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{archive} has the format {about.get('format')}, this fedalloy reads {FORMAT}")
    there = {str(PurePosixPath(one.relative_to(draft))) for one in draft.rglob("*") if one.is_file()} - {CONTENTS}
    wrong = sorted(there ^ files.keys()) or [name for name, known in files.items() if _digest(draft / name) != known]
    if wrong:
        raise CheckpointError(f"{archive} is damaged: {wrong[0]} is missing, additional or was changed")
    return about


def _digest(file: Path) -> str:
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _texts(runs: dict[str, Path]) -> dict[str, str]:
    return {name: str(run) for name, run in runs.items()}


def _versions() -> dict[str, str]:
    return {package: version(package) for package in ("fedalloy", "flwr")}
