"""Pads images to a square whose side is a power of two, for networks that halve and double it, and crops the result."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from fedalloy.core.errors import SpecError

SIDES = (8, 16, 32, 64)


class Frame(nn.Module):
    """Centres a ``height x width`` image in a square of ``side``, padded with ``ground``; ``cut`` undoes it.

    >>> import torch
    >>> frame = Frame(2, 3, ground=-1.0)
    >>> frame.side, frame.cut(frame(torch.ones(1, 1, 2, 3))).shape
    (8, torch.Size([1, 1, 2, 3]))
    """

    def __init__(self, height: int, width: int, ground: float) -> None:
        super().__init__()
        self.side = next((side for side in SIDES if side >= max(height, width)), 0)
        if not self.side:
            raise SpecError(f"images of {height} x {width} are too large: allowed are sides up to {SIDES[-1]}")
        self.height, self.width, self.ground = height, width, ground
        self.top, self.left = (self.side - height) // 2, (self.side - width) // 2

    def forward(self, x: Tensor) -> Tensor:
        """``[N, C, height, width]`` to ``[N, C, side, side]``."""
        below, right = self.side - self.height - self.top, self.side - self.width - self.left
        return functional.pad(x, (self.left, right, self.top, below), value=self.ground)

    def cut(self, x: Tensor) -> Tensor:
        """``[N, C, side, side]`` back to ``[N, C, height, width]``."""
        return x[..., self.top : self.top + self.height, self.left : self.left + self.width]
