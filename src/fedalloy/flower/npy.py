"""Arrays in numpy's own format (``.npy``), read without believing their header.

The header says how many numbers follow, and numpy asks for the memory before it looks whether they are there: a few
bytes can ask for terabytes. Here nothing is made before the header, the bytes that arrived and what was expected agree.
"""

from __future__ import annotations

import io
from math import prod

import numpy as np
from numpy.lib import format as npy

from fedalloy.core.errors import DataError

_MOST_HEADER = 4096
_VERSIONS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def read_npy(data: bytes, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """The array in ``data``, which must have this shape and hold numbers of this kind (``f``, ``i``, ``u``, ``b``).

    >>> import io, numpy
    >>> file = io.BytesIO(); numpy.save(file, numpy.arange(3.0))
    >>> read_npy(file.getvalue(), (3,), "f")
    array([0., 1., 2.])
    """
    stream = io.BytesIO(data)
    declared, by_columns, dtype = _header(stream)
    if tuple(declared) != shape or dtype.kind != kind:
        raise DataError(f"an array holds {dtype!s:.40} of shape {declared!s:.100}, which is not what its label says")
    start, count = stream.tell(), prod(shape)
    if len(data) - start != count * dtype.itemsize:
        raise DataError(f"an array needs {count * dtype.itemsize} bytes, and {len(data) - start} arrived")
    values = np.frombuffer(data, dtype, count, start)
    return values.reshape(shape, order="F" if by_columns else "C")


def _header(stream: io.BytesIO) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, order and type as the header has them; nothing is allocated for them."""
    try:
        read = _VERSIONS[npy.read_magic(stream)]
        shape, by_columns, dtype = read(stream, max_header_size=_MOST_HEADER)
    except KeyError:
        raise DataError("an array cannot be read: it is of an unknown version of numpy's format") from None
    except Exception as error:  # numpy reads it as Python's own literals, whose errors are of many kinds
        raise DataError(f"an array cannot be read: {error!s:.200}") from None
    return shape, by_columns, dtype
