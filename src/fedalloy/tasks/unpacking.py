"""Files that others packed, read with a limit: what they unpack to is counted, and nothing is written to disk."""

from __future__ import annotations

import gzip
import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from fedalloy.core.errors import DataError
from fedalloy.tasks.datasets.base import third_party

MOST_MB = 2048
"""Megabytes that the originals of a data set may unpack to, unless the user raises the limit."""
_MEGABYTE = 1 << 20
_BLOCK = 1 << 18
_GZIP = b"\x1f\x8b"
_ZIP = b"PK\x03\x04"


class Allowance:
    """How many bytes may still be unpacked."""

    def __init__(self, megabytes: float = MOST_MB) -> None:
        if megabytes <= 0:
            raise DataError(f"the limit of unpacked data is {megabytes} MB; allowed is more than 0")
        self.megabytes, self.left = megabytes, int(megabytes * _MEGABYTE)

    def take(self, count: int, path: Path) -> None:
        """Count some bytes; refuse more than are allowed."""
        self.left -= count
        if self.left < 0:
            raise DataError(
                f"{path} unpacks to more than {self.megabytes:g} MB, so it is not read further: it may be damaged, or "
                "made to fill the memory. If it is right, raise the limit: --max-unpacked-mb"
            )


class _Counted(io.RawIOBase):
    """A stream whose bytes are counted as they are read."""

    def __init__(self, stream: IO[bytes], path: Path, allowance: Allowance) -> None:
        self._stream, self._path, self._allowance = stream, path, allowance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        block = self._stream.read(min(len(buffer), _BLOCK))
        self._allowance.take(len(block), self._path)
        buffer[: len(block)] = block
        return len(block)


@dataclass(frozen=True)
class Originals:
    """The original files of a data set by name, and how much they may unpack to."""

    files: Mapping[str, Path]
    allowance: Allowance = field(default_factory=Allowance)

    def one(self, *endings: str) -> Path | None:
        """The first file whose name ends like this."""
        return next((path for name, path in self.files.items() if name.lower().endswith(endings)), None)

    def called(self, *words: str) -> Path | None:
        """The first file whose name has all of these words."""
        return next((path for name, path in self.files.items() if all(word in name for word in words)), None)

    def content(self, path: Path) -> bytes:
        """A file, unpacked if it is compressed by gzip."""
        with _opened(path) as stream, self._counted(stream, path) as counted:
            return counted.read()

    def archived(self, path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        """Those members of a tar or zip archive whose name is wanted, in their order."""
        return self._zipped(path, wanted) if _begins(path, _ZIP) else self._taped(path, wanted)

    def lines(self, path: Path, wanted: Callable[[str], bool], encoding: str) -> Iterator[str]:
        """The lines of the first member of a zip archive that is wanted, or of a plain or gzipped file."""
        with _member(path, wanted) as stream, self._counted(stream, path) as counted:
            yield from io.TextIOWrapper(counted, encoding, newline="")

    def table(self, path: Path, names: Sequence[str]) -> dict[str, list[Any]]:
        """Some columns of a parquet file, whose size is declared in it."""
        parquet = third_party("pyarrow.parquet", "pyarrow", "reading files of the hub")
        about = parquet.ParquetFile(path).metadata
        self.allowance.take(sum(about.row_group(k).total_byte_size for k in range(about.num_row_groups)), path)
        table = parquet.read_table(path, columns=list(names))
        return {name: table.column(name).to_pylist() for name in names}

    def _counted(self, stream: IO[bytes], path: Path) -> io.BufferedReader:
        return io.BufferedReader(_Counted(stream, path, self.allowance), _BLOCK)

    def _zipped(self, path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if not member.is_dir() and wanted(member.filename):
                    with archive.open(member) as stream, self._counted(stream, path) as counted:
                        yield member.filename, counted.read()

    def _taped(self, path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
        """Read from the beginning to the end, so that members that are passed over are counted too."""
        with (
            _opened(path) as stream, self._counted(stream, path) as counted, _tape(counted, path) as archive,
        ):  # fmt: skip
            for member in archive:
                if not member.isreg() or not wanted(member.name):
                    continue
                if member.issparse():  # holes have a size, but no bytes that could be counted
                    raise DataError(f"{path}: {member.name} is a sparse file, which has no place in data")
                file = archive.extractfile(member)
                yield member.name, b"" if file is None else file.read()


def is_for_testing(path: Path) -> bool:
    """Whether one of LEAF's files is the part for testing: the word is in its name, or it is in the folder ``test``."""
    words = re.split(r"[^a-z]+", path.stem.lower())
    return "test" in words or (path.parent.name == "test" and "train" not in words)


def base_name(member: str) -> str:
    """The last part of a member's name."""
    return PurePosixPath(member).name


def _begins(path: Path, magic: bytes) -> bool:
    with path.open("rb") as stream:
        return stream.read(len(magic)) == magic


def _opened(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb") if _begins(path, _GZIP) else path.open("rb"))


def _tape(stream: io.BufferedReader, path: Path) -> tarfile.TarFile:
    try:
        return tarfile.open(fileobj=stream, mode="r|")
    except tarfile.ReadError as cause:
        raise DataError(f"{path} is neither a tar nor a zip archive: {cause}") from cause


def _member(path: Path, wanted: Callable[[str], bool]) -> IO[bytes]:
    if not _begins(path, _ZIP):
        return _opened(path)
    archive = zipfile.ZipFile(path)
    found = next((name for name in archive.namelist() if wanted(name)), None)
    if found is None:
        raise DataError(f"{path} has none of the files that are needed; it holds {', '.join(archive.namelist()[:10])}")
    return archive.open(found)
