"""How a run's samples grew: pictures of every class over rounds."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records import snapshots
from fedalloy.studies.synthetic.pictures import Bounds, as_pixels, is_picture, tiled


def growth_grid(samples: list[tuple[Tensor, Tensor]], bounds: Bounds | None) -> Tensor:
    """One row per class, one column per moment: the same sample of the class (its first) each time."""
    shape = tuple(samples[0][0].shape[1:])
    if bounds is None or not is_picture(shape, bounds):
        raise SpecError(
            f"examples of shape {shape} without a declared range are no pictures: use `fedalloy synth export`"
        )
    moments = [_first_of_each(as_pixels(x, bounds), y) for x, y in samples]
    return tiled([[moment[label] for moment in moments if label in moment] for label in sorted(moments[-1])])


def kept_rounds(run: Path, most: int) -> list[int]:
    """At most so many of the rounds a run kept samples of, evenly chosen, the last one among them."""
    return evenly(snapshots.rounds(run), most)


def evenly(rounds: list[int], most: int) -> list[int]:
    """First, last and what lies evenly between; the last alone where one is enough.

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
