"""Only the largest entries travel: top-k with error feedback (Stich et al. 2018, arXiv:1809.07599)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.fraction import fraction_of
from fedalloy.core.registry import register
from fedalloy.wire.feedback import ErrorFeedback


@register("wire", "topk")
@dataclass(frozen=True)
class TopK(ErrorFeedback):
    """The ``k = max(floor(ratio d), 1)`` entries of largest magnitude of the whole model; the rest waits at the client.

    On the wire: k values and k positions, each in the smallest integer of 1, 2, 4 or 8 bytes that can count to d.
    When to use it: slow uplinks, updates whose mass sits in few entries.

    >>> TopK(ratio=0.5).compress(torch.tensor([1.0, -3.0, 0.5, 2.0]))
    tensor([ 0., -3.,  0.,  2.])
    >>> TopK(ratio=0.01).compressed_bytes(100_000, width=4)
    8000
    """

    ratio: float = 1 / 64

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"ratio must lie in (0, 1], got {self.ratio}")

    def kept(self, length: int) -> int:
        """How many of so many entries travel."""
        return max(int(fraction_of(length, self.ratio)), 1)

    def compress(self, vector: Tensor) -> Tensor:
        places = vector.abs().topk(self.kept(len(vector)), sorted=False).indices
        return torch.zeros_like(vector).scatter(0, places, vector.gather(0, places))

    def compressed_bytes(self, length: int, width: int) -> int:
        place = next(size for size in (1, 2, 4, 8) if length <= 256**size)
        return self.kept(length) * (width + place)
