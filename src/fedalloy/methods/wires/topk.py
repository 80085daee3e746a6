"""Only the largest entries are sent: top-k with error feedback (Stich et al. 2018, arXiv:1809.07599)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.fraction import fraction_of
from fedalloy.core.registry import register
from fedalloy.core.types import Tree
from fedalloy.methods.wires.feedback import ErrorFeedback, check_packed, flatten, unflatten, width

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@register("wire", "topk")
@dataclass(frozen=True)
class TopK(ErrorFeedback):
    """The ``k = max(floor(ratio d), 1)`` entries of largest magnitude; the client adds the rest to its next update.

    On the wire: k values and k positions, each in the smallest integer of 1, 2, 4 or 8 bytes that can index d entries.
    When to use it: slow uplinks, updates with few large entries.

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
        """How many of ``length`` entries are sent."""
        return max(int(fraction_of(length, self.ratio)), 1)

    def compress(self, vector: Tensor) -> Tensor:
        places = vector.abs().topk(self.kept(len(vector)), sorted=False).indices
        return torch.zeros_like(vector).scatter(0, places, vector.gather(0, places))

    def compressed_bytes(self, length: int, width: int) -> int:
        """Bytes on the wire of a vector of ``length`` numbers of ``width`` bytes."""
        return self.kept(length) * (width + _place_size(length))

    def pack(self, leaves: Tree) -> Tree:
        vector = flatten(leaves)
        places = vector.abs().topk(self.kept(len(vector)), sorted=False).indices.sort().values
        return {"values": vector[places], "places": places.to(_INTEGERS[_place_size(len(vector))])}

    def unpack(self, packed: Tree, like: Tree) -> Tree:
        vector = torch.zeros_like(flatten(like))
        kept, size = self.kept(len(vector)), _place_size(len(vector))
        check_packed(packed, values=(vector.dtype, kept), places=(_INTEGERS[size], kept))
        places = packed["places"].long().to(vector.device) % 256**size if size < 8 else packed["places"].long()
        if not bool((places[1:] > places[:-1]).all()) or not 0 <= int(places[0]) <= int(places[-1]) < len(vector):
            raise ValueError(f"its packed 'places' are not ascending positions below {len(vector)}")
        return unflatten(vector.scatter(0, places.to(vector.device), packed["values"].to(vector.device)), like)

    def packed_bytes(self, leaves: Tree) -> Tensor:
        clients = len(next(iter(leaves.values())))
        one = self.compressed_bytes(tree.count(leaves) // clients, width(leaves))
        return torch.full((clients,), float(one), dtype=torch.float64)


def _place_size(length: int) -> int:
    return next(size for size in _INTEGERS if length <= 256**size)
