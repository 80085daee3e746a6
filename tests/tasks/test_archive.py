"""Archives of arrays: nothing is believed that the bytes do not bear out."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest

from fedalloy.core.errors import DataError
from fedalloy.tasks.datasets.archive import read_arrays

X = np.arange(12, dtype=np.float32).reshape(3, 4)


def write(path: Path, **pieces: bytes | np.ndarray) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, piece in pieces.items():
            archive.writestr(f"{name}.npy", piece if isinstance(piece, bytes) else npy(piece))
    return path


def npy(value: np.ndarray) -> bytes:
    made = io.BytesIO()
    np.save(made, value)
    return made.getvalue()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("value", [X, np.asfortranarray(X), X[:0], np.array(3), np.array([True]), X.astype(">f8")])
def test_what_numpy_writes_is_read(tmp_path, save, value):
    save(tmp_path / "a.npz", x=value, y=X)
    found = read_arrays(tmp_path / "a.npz", ("x",))
    assert list(found) == ["x"]
    np.testing.assert_array_equal(found["x"], value)
    assert found["x"].dtype == value.dtype
    assert list(read_arrays(tmp_path / "a.npz")) == ["x", "y"]


def test_a_header_that_declares_more_than_there_is_asks_for_no_memory(tmp_path):
    lying = npy(X).replace(b"(3, 4), }" + b" " * 12, b"(3, 4000000000000), }")
    assert len(lying) == len(npy(X))
    with pytest.raises(DataError, match="needs 48000000000000 bytes, but has 48"):
        read_arrays(write(tmp_path / "a.npz", x=lying), ("x",))


@pytest.mark.parametrize(
    ("piece", "said"),
    [
        (b"", "cannot be read"),
        (b"\x93NUMPY\x09\x00", "unknown version"),
        (npy(X).replace(b"(3, 4)", b"(3, -"), "cannot be read"),
        (npy(X)[:-1], "bytes, but has"),
        (npy(X).replace(b"'<f4'", b"'|O'  "), "Python objects"),
    ],
)
def test_what_is_no_array_is_refused(tmp_path, piece, said):
    with pytest.raises(DataError, match=said):
        read_arrays(write(tmp_path / "a.npz", x=piece), ("x",))


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"")
    with pytest.raises(DataError, match=r"not a plain \.npz file"):
        read_arrays(tmp_path / "a.npz", ("x",))
    with pytest.raises(DataError, match="no array y; it holds x"):
        read_arrays(write(tmp_path / "b.npz", x=X), ("x", "y"))
