"""Examples as pictures: pixels, grids of tiles, their development over rounds, and PNG files written with only the
standard library."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records import snapshots
from fedalloy.tasks.models.convolutional import image_shape

Bounds = tuple[float, float]
_GAP = 2
_SMALLEST_TILE = 28
_GREY, _COLOUR = 0, 2


def is_picture(shape: tuple[int, ...], bounds: Bounds | None) -> bool:
    """Whether examples of this shape are pictures: they have a range of values, and one or three channels.

    >>> is_picture((64,), (0.0, 1.0)), is_picture((64,), None), is_picture((13,), (0.0, 1.0))
    (True, False, False)
    """
    if bounds is None:
        return False
    try:
        return image_shape(shape)[0] in (1, 3)
    except SpecError:
        return False


def as_pixels(x: Tensor, bounds: Bounds) -> Tensor:
    """Bytes ``[N, height, width, channels]``: the lowest value is black, the highest white, others are cut off.

    >>> as_pixels(torch.tensor([[[[-1.0, 0.0, 1.0, 9.0]]]]), (-1.0, 1.0)).flatten().tolist()
    [0, 128, 255, 255]
    """
    images = x.reshape(len(x), *image_shape(tuple(x.shape[1:])))
    unit = ((images.double() - bounds[0]) / (bounds[1] - bounds[0])).clamp(0, 1)
    return (unit * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu()


def class_grid(x: Tensor, y: Tensor, bounds: Bounds, most: int = 10) -> Tensor:
    """One row per class, up to ``most`` examples each, as one picture ``[H, W, channels]``."""
    pixels, labels = as_pixels(x, bounds), y.cpu()
    return tiled([list(pixels[labels == label][:most]) for label in labels.unique().tolist()])


def tiled(rows: list[list[Tensor]]) -> Tensor:
    """Rows of pictures of one size on a white background; small pictures are enlarged by whole pixels."""
    if not rows or not rows[0]:
        raise SpecError("there is nothing to draw: no examples were given")
    height, width, channels = rows[0][0].shape
    zoom = max(1, _SMALLEST_TILE // max(height, width))
    high, wide = height * zoom + _GAP, width * zoom + _GAP
    sheet = torch.full((high * len(rows) + _GAP, wide * max(map(len, rows)) + _GAP, channels), 255, dtype=torch.uint8)
    for line, row in enumerate(rows):
        for column, tile in enumerate(row):
            large = tile.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1)
            top, left = line * high + _GAP, column * wide + _GAP
            sheet[top : top + high - _GAP, left : left + wide - _GAP] = large
    return sheet


def write_png(path: Path, picture: Tensor) -> None:
    """Bytes ``[H, W, 1 or 3]`` as a PNG file."""
    height, width, channels = picture.shape
    if channels not in (1, 3):
        raise SpecError(f"a picture of {channels} channels: allowed are 1 (grey) and 3 (colour)")
    header = struct.pack(">IIBBBBB", width, height, 8, _GREY if channels == 1 else _COLOUR, 0, 0, 0)
    # Every line begins with the number of its filter; 0 is none.
    lines = torch.cat([torch.zeros(height, 1, dtype=torch.uint8), picture.reshape(height, -1)], dim=1)
    body = zlib.compress(lines.contiguous().numpy().tobytes(), 9)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", body) + _chunk(b"IEND", b""))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def growth_grid(samples: list[tuple[Tensor, Tensor]], bounds: Bounds | None) -> Tensor:
    """One row per class, one column per round: always the first sample of the class."""
    shape = tuple(samples[0][0].shape[1:])
    if bounds is None or not is_picture(shape, bounds):
        raise SpecError(
            f"examples of shape {shape} without a declared range are not pictures: use `fedalloy synth export`"
        )
    moments = [_first_of_each(as_pixels(x, bounds), y) for x, y in samples]
    return tiled([[moment[label] for moment in moments if label in moment] for label in sorted(moments[-1])])


def kept_rounds(run: Path, most: int) -> list[int]:
    """At most ``most`` of the rounds whose samples a run kept, evenly spaced, the last one included."""
    return evenly(snapshots.rounds(run), most)


def evenly(rounds: list[int], most: int) -> list[int]:
    """First, last and evenly spaced ones between; only the last if ``most`` is 1.

    >>> evenly([10, 20, 30, 40, 50], 3)
    [10, 30, 50]
    """
    if len(rounds) <= most or most == 1:
        return rounds[-most:]
    places = torch.linspace(0, len(rounds) - 1, most).round().long().tolist()
    return [rounds[place] for place in places]


def _first_of_each(pixels: Tensor, y: Tensor) -> dict[int, Tensor]:
    labels = y.cpu().tolist()
    return {label: pixels[labels.index(label)] for label in sorted(set(labels))}
