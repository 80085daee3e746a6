"""Augmentation of training examples: flips, crops and noise that are a pure function of the client's key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedalloy.core.arguments import build, checked
from fedalloy.core.errors import SpecError
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key


@checked("augment")
@dataclass(frozen=True)
class Augmentation:
    """What happens to every training example in every step, in this order.

    ``flip``: with probability one half it is mirrored, left to right (``horizontal``) or top to bottom (``vertical``).
    ``crop``: it is moved by up to so many pixels in each direction, and zeros fill the edge. ``noise``: this standard
    deviation of normal noise is added to every feature. Flips and crops are for images, whose last two axes are height
    and width; targets that are maps of the same size are flipped and moved with them, and their edge does not count.
    Evaluation sees the examples as they are.
    """

    flip: Literal["none", "horizontal", "vertical"] = "none"
    crop: int = 0
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.crop < 0 or self.noise < 0:
            raise SpecError(f"augment: crop and noise must be 0 or more, got {self.crop} and {self.noise}")

    def __bool__(self) -> bool:
        return self != Augmentation()

    def check(self, x: Inputs, y: Inputs, ignored: int | None) -> None:
        """Refuse examples that cannot be augmented in this way."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise SpecError("augment is for examples that are one tensor of real numbers")
        if (self.crop or self.flip != "none") and x.dim() < 4:
            raise SpecError(
                f"augment: flip and crop are for images, and examples have shape {tuple(x.shape[1:])}; noise is for all"
            )
        if self.crop and _is_map(x, y) and ignored is None:
            raise SpecError("augment: crop moves maps of classes too and needs a loss with ignore_index for their edge")

    def apply(self, x: Tensor, y: Tensor, draw: Tensor, ignored: int | None) -> tuple[Tensor, Tensor]:
        """The batch after augmentation. Draws depend on the place of an example in its batch, so padding at the end
        changes nothing."""
        key, mapped = Key(draw).fold("augment"), _is_map(x, y)
        if self.flip != "none":
            axis = -1 if self.flip == "horizontal" else -2
            turned = key.fold("flip").uniform(len(x), device=x.device) < 0.5
            x = torch.where(_like(turned, x), x.flip(axis), x)
            y = torch.where(_like(turned, y), y.flip(axis), y) if mapped else y
        if self.crop:
            moves = (key.fold("crop").uniform(len(x), 2, device=x.device) * (2 * self.crop + 1)).long() - self.crop
            x = _moved(x, moves, 0.0)
            y = _moved(y, moves, ignored or 0) if mapped else y
        if self.noise:
            x = x + self.noise * key.fold("noise").normal(*x.shape, dtype=x.dtype, device=x.device)
        return x, y


def as_augmentation(given: Augmentation | Mapping[str, Any] | None) -> Augmentation:
    """Augmentation as a value or a table.

    >>> as_augmentation({"crop": 2})
    Augmentation(flip='none', crop=2, noise=0.0)
    """
    if isinstance(given, Augmentation):
        return given
    made: Augmentation = build(Augmentation, dict(given or {}), "augment")
    return made


def _moved(images: Tensor, moves: Tensor, fill: float) -> Tensor:
    """Every image moved by its own number of rows and columns, ``[N, 2]``; ``fill`` stands where nothing was."""
    for place, axis in enumerate((-2, -1)):
        size = images.shape[axis]
        source = torch.arange(size, device=images.device) - moves[:, place].unsqueeze(1)
        inside = (source >= 0) & (source < size)
        shape = [len(images), *[1] * (images.dim() - 1)]
        shape[axis] = size
        index = source.clamp(0, size - 1).reshape(shape).expand(images.shape)
        images = torch.where(inside.reshape(shape), images.gather(axis, index), torch.full_like(images, fill))
    return images


def _is_map(x: Inputs, y: Inputs) -> bool:
    """Whether targets are maps of the same height and width as the images."""
    several = isinstance(x, Tensor) and isinstance(y, Tensor) and y.dim() >= 3
    return several and x.shape[-2:] == y.shape[-2:]


def _like(flags: Tensor, images: Tensor) -> Tensor:
    return flags.reshape(-1, *[1] * (images.dim() - 1))
