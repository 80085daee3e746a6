"""Synthetic samples as files: arrays, a table, pictures."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
from torch import Tensor

from fedalloy.studies.synthetic.pictures import Bounds, class_grid, is_picture, write_png


def export(x: Tensor, y: Tensor, folder: Path, bounds: Bounds | None) -> list[Path]:
    """Write ``samples.npz`` (x, y and bounds, empty where none are declared) and a preview: ``grid.png``, one row
    per class, for pictures, ``samples.csv`` for rows. Returns the paths that were written."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = folder / "samples.npz"
    # Empty bounds mean that values are not limited.
    np.savez_compressed(arrays, x=x.cpu().numpy(), y=y.cpu().numpy(), bounds=np.array(bounds or ()))
    if is_picture(tuple(x.shape[1:]), bounds) and bounds is not None:
        picture = folder / "grid.png"
        write_png(picture, class_grid(x, y, bounds))
        return [arrays, picture]
    return [arrays, _table(x, y, folder / "samples.csv")]


def _table(x: Tensor, y: Tensor, path: Path) -> Path:
    """One line per example: its label, then its features."""
    rows = x.reshape(len(x), -1)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["label", *(f"x{number}" for number in range(rows.shape[1]))])
        writer.writerows([label, *values] for label, values in zip(y.tolist(), rows.tolist(), strict=True))
    return path
