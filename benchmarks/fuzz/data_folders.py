"""Data folders: untrusted files of clients, or of a node."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import numpy as np

from benchmarks.fuzz.driving import Way
from benchmarks.fuzz.mutating import Case


@functools.cache
def examples() -> list[Case]:
    """Two clients as ``.npz``, one of each kind of file, and labels of other types."""
    x, y = np.arange(24, dtype=np.float32).reshape(8, 3), np.arange(8) % 2
    plain = {"a.npz": _npz(x, y), "b.npz": _npz(x[:3], y[:3])}
    both = {"a.npz": _npz(x, y), "b.parquet": _parquet(x, y)}
    regression = {"a.npz": _npz(x, x[:, 0]), "b.npz": _npz(x[:4], x[:4, 1])}
    return [plain, both, regression, {"only.npz": _npz(x.reshape(8, 1, 3, 1), y)}]


def _npz(x: np.ndarray, y: np.ndarray) -> bytes:
    made = io.BytesIO()
    np.savez(made, x=x, y=y)
    return made.getvalue()


def _parquet(x: np.ndarray, y: np.ndarray) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    made = io.BytesIO()
    columns = {f"f{place}": x[:, place] for place in range(x.shape[1])} | {"y": y}
    pyarrow.parquet.write_table(pa.table(columns), made)
    return made.getvalue()


def read(case: Case, folder: Path) -> str:
    """The folder as a task that could be trained on."""
    from fedalloy.tasks.assembly import make_task

    place = folder / "data"
    place.mkdir()
    for name, data in case.items():
        (place / name).write_bytes(data)
    task = make_task({"kind": "folder", "path": str(place)}, "logistic", loss=None)
    if not bool(task.train.x.isfinite().all()):
        raise AssertionError("features that are not finite were accepted")
    return "fine"


WAY = Way("data-folders", examples, read, 1000)
