"""Synthetic examples by class and round, as one small PNG per cell.

A run that makes pictures keeps snapshots (``fedalloy.experiment.records.snapshots``): ``x`` is ``[n, height, width]``,
``[n, channels, height, width]`` or ``[n, height, width, channels]`` in any range, ``y`` the class of each.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedalloy.experiment.records import snapshots
from fedalloy.report.data.plain import Chart, pick
from fedalloy.results.summaries import RunSummary

Array = np.ndarray[Any, Any]
MOST_ROUNDS, MOST_CLASSES, PER_CELL = 6, 12, 4


def pictures(summary: RunSummary) -> Chart | None:
    """The picture grid of one run, read from its folder."""
    if summary.outcome.folder is None:
        return None
    folder = summary.outcome.folder
    kept = snapshots.rounds(folder)
    found = {}
    for round in (kept[place] for place in pick(len(kept), MOST_ROUNDS)):
        x, y = snapshots.load(folder, round)
        found[round] = (x.float().numpy(), y.numpy())
    if not found:
        return None
    return grid(found) | {
        "id": f"pictures-{summary.name}-{summary.seed}",
        "title": f"{summary.name}, seed {summary.seed}",
    }


def grid(by_round: Mapping[int, tuple[Array, Array]]) -> Chart:
    """Pictures ``[n, ...]`` and classes ``[n]`` by round as cells: one row per class, one column per round."""
    classes = sorted({int(one) for _, y in by_round.values() for one in y})[:MOST_CLASSES]
    low, high = _range([x for x, _ in by_round.values()])
    cells = []
    for round, (x, y) in by_round.items():
        for one in classes:
            mine = [picture(each, low, high) for each in x[y == one][:PER_CELL]]
            if mine:
                cells.append({"round": int(round), "class": one, "image": data_uri(np.concatenate(mine, 1))})
    return {"kind": "pictures", "rounds": [int(round) for round in by_round], "classes": classes, "cells": cells,
            "note": f"The first {PER_CELL} synthetic examples of each class."}  # fmt: skip


def picture(values: Array, low: float, high: float) -> Array:
    """One example as ``[height, width, channels]`` of bytes; a flat vector becomes a square."""
    if values.ndim == 1:
        side = int(np.ceil(np.sqrt(len(values))))
        values = np.pad(values, (0, side * side - len(values))).reshape(side, side)
    if values.ndim == 2:
        values = values[..., None]
    elif values.shape[0] in (1, 3) and values.shape[-1] not in (1, 3):
        values = np.moveaxis(values, 0, -1)
    scaled = (values.astype(np.float64) - low) / max(high - low, 1e-12)
    return (np.clip(np.nan_to_num(scaled), 0, 1) * 255).round().astype(np.uint8)


def data_uri(pixels: Array) -> str:
    """Bytes ``[height, width, 1 or 3]`` as a PNG in a data URI."""
    height, width, channels = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, width * channels)], 1)
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes(), 9)), (b"IEND", b"")]
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, chunks))).decode()


def _chunk(chunk: tuple[bytes, bytes]) -> bytes:
    kind, body = chunk
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def _range(arrays: Sequence[Array]) -> tuple[float, float]:
    """The values shown as black and white, the same for all pictures; outliers are ignored."""
    everything = np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])
    known = everything[np.isfinite(everything)]
    return (float(np.quantile(known, 0.01)), float(np.quantile(known, 0.99))) if len(known) else (0.0, 1.0)
