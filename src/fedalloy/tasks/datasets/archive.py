"""Arrays of an ``.npz`` or ``.npy`` file, read without trusting its headers.

Numpy allocates the memory that a header declares before it checks the file's size, and evaluates some headers as Python
literals. Here nothing is allocated before archive, header and byte counts agree.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedalloy.core.errors import DataError

_MOST_HEADER = 10_000
_PACKED = 1100
"""The largest possible compression ratio of files that ``numpy.savez_compressed`` writes."""
_READERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def array_names(path: Path) -> tuple[str, ...]:
    """The names of the arrays of an archive; nothing of a file that is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return tuple(info.filename.removesuffix(".npy") for info in archive.infolist())
    except (OSError, ValueError, zipfile.BadZipFile):
        return ()


def read_arrays(path: Path, names: Iterable[str] | None = None) -> dict[str, NDArray[Any]]:
    """Some arrays of an archive (default: all of them), each a writable copy in memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            there = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            wanted = list(there) if names is None else list(names)
            missing = [name for name in wanted if name not in there]
            if missing:
                raise DataError(
                    f"{path} has no array {' and '.join(missing)}; it holds {', '.join(there) or 'nothing'}"
                )
            return {name: _array(archive, there[name], f"{path}: array '{name:.40}'") for name in wanted}
    except DataError:
        raise
    except (OSError, ValueError, RuntimeError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as cause:
        raise DataError(f"{path} is not a plain .npz file of numbers: {cause}") from cause


def read_array(path: Path) -> NDArray[Any]:
    """The array of an ``.npy`` file, a writable copy in memory."""
    try:
        content = path.read_bytes()
    except OSError as cause:
        raise DataError(f"{path} cannot be read: {cause}") from cause
    where = str(path)
    shape, by_columns, dtype, begin = read_npy_header(content[: _MOST_HEADER + 12], where)
    _check_bytes(dtype, shape, len(content) - begin, where)
    values: NDArray[Any] = np.frombuffer(bytearray(content[begin:]), dtype, prod(shape))
    return values.reshape(shape, order="F" if by_columns else "C")


def _check_bytes(dtype: np.dtype[Any], shape: tuple[int, ...], there: int, where: str) -> None:
    if dtype.hasobject:
        raise DataError(f"{where} holds Python objects, not numbers; save it as numbers (allow_pickle stays off)")
    if there != prod(shape) * dtype.itemsize:
        raise DataError(f"{where} needs {prod(shape) * dtype.itemsize} bytes, but has {there}")


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> NDArray[Any]:
    if info.file_size > max(1, _PACKED * info.compress_size):
        raise DataError(
            f"{where} declares {info.file_size} bytes, which its {info.compress_size} packed ones cannot hold"
        )
    with archive.open(info) as packed:
        start = packed.read(min(info.file_size, _MOST_HEADER + 12))
        shape, by_columns, dtype, begin = read_npy_header(start, where)
        _check_bytes(dtype, shape, info.file_size - begin, where)
        data = bytearray(start[begin:])
        data += packed.read()
    values: NDArray[Any] = np.frombuffer(data, dtype, prod(shape)) if dtype.itemsize else np.empty(shape, dtype)
    return values.reshape(shape, order="F" if by_columns else "C")


def read_npy_header(
    start: bytes, where: str, most: int = _MOST_HEADER
) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Shape, order and dtype from an array's header of at most ``most`` bytes, and the offset of the data."""
    stream = io.BytesIO(start)
    try:
        read = _READERS[npy.read_magic(stream)]
        shape, by_columns, dtype = read(stream, max_header_size=most)
    except KeyError:
        raise DataError(f"{where} is of an unknown version of numpy's format") from None
    except Exception as error:  # numpy evaluates it as a Python literal, which raises many kinds of errors
        raise DataError(f"{where} cannot be read: {error!s:.200}") from None
    if not all(isinstance(length, int) and length >= 0 for length in shape):
        raise DataError(f"{where} cannot be read: its shape {shape!s:.100} is impossible")
    return shape, bool(by_columns), dtype, stream.tell()
