"""One bit per parameter: the scaled sign with error feedback (Karimireddy et al. 2019, arXiv:1901.09847)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.registry import register
from fedalloy.core.types import Tree
from fedalloy.methods.wires.feedback import ErrorFeedback, check_packed, flatten, unflatten, width


@register("wire", "scaled_sign")
@dataclass(frozen=True)
class ScaledSign(ErrorFeedback):
    """``sign(x) |x|_1 / d`` over the whole model of d parameters; the client adds the error to its next update.

    On the wire: one number and one bit per parameter. An entry that is exactly zero stays zero, as published, which one
    bit cannot encode: if there are such entries, d more bits mark them, and only the others have a sign bit.
    When to use it: slow uplinks, updates whose entries are of similar size.

    >>> import torch
    >>> ScaledSign().compress(torch.tensor([1.0, -3.0, 0.5, 1.5]))
    tensor([ 1.5000, -1.5000,  1.5000,  1.5000])
    >>> ScaledSign().compressed_bytes(100_001, width=4), ScaledSign().compressed_bytes(100_001, width=4, zeros=1)
    (12505, 25005)
    """

    def compress(self, vector: Tensor) -> Tensor:
        return vector.sign() * vector.abs().mean()

    def compressed_bytes(self, length: int, width: int, zeros: int = 0) -> int:
        """Bytes on the wire of ``length`` numbers of ``width`` bytes, ``zeros`` of which are zero."""
        return _bytes_of(length - zeros) + (_bytes_of(length) if zeros else 0) + width

    def pack(self, leaves: Tree) -> Tree:
        vector = flatten(leaves)
        there = vector != 0
        packed = {"scales": _scales(leaves), "signs": _to_bits(vector[there] > 0)}
        return packed if bool(there.all()) else {**packed, "there": _to_bits(there)}

    def unpack(self, packed: Tree, like: Tree) -> Tree:
        vector = torch.zeros_like(flatten(like))
        there = torch.ones(len(vector), dtype=torch.bool, device=vector.device)
        expected = {"scales": (vector.dtype, len(_kinds(like)))}
        if "there" in packed:
            expected["there"] = (torch.uint8, _bytes_of(len(vector)))
            check_packed({"there": packed["there"]}, there=expected["there"])
            there = _from_bits(packed["there"], len(vector)).to(vector.device)
        count = int(there.sum())
        check_packed(packed, **expected, signs=(torch.uint8, _bytes_of(count)))
        signs = _from_bits(packed["signs"], count).to(vector) * 2 - 1
        scales = dict(zip(_kinds(like), packed["scales"].to(vector), strict=True))
        cut = unflatten(vector.masked_scatter(there, signs), like)
        return {name: torch.where(leaf == 0, leaf, leaf * scales[leaf.dtype].to(leaf.dtype))
                for name, leaf in cut.items()}  # fmt: skip

    def packed_bytes(self, leaves: Tree) -> Tensor:
        there = torch.cat([leaf.flatten(1) != 0 for leaf in leaves.values()], 1)
        length, size = there.shape[1], width(leaves) * len(_kinds(leaves))
        zeros = (length - there.sum(1)).tolist()
        return torch.tensor([self.compressed_bytes(length, size, some) for some in zeros], dtype=torch.float64)


def _kinds(leaves: Tree) -> list[torch.dtype]:
    """The dtypes of the leaves, usually one. Each has its own scale, because rounding differs."""
    return list(dict.fromkeys(leaf.dtype for leaf in leaves.values()))


def _scales(leaves: Tree) -> Tensor:
    sizes = {kind: [leaf.abs().max() for leaf in leaves.values() if leaf.dtype == kind and leaf.numel()]
             for kind in _kinds(leaves)}  # fmt: skip
    dtype, device = flatten(leaves).dtype, next(iter(leaves.values())).device
    found = [torch.stack(some).max() if some else torch.zeros((), device=device) for some in sizes.values()]
    return torch.stack([one.to(dtype) for one in found])


def _bytes_of(bits: int) -> int:
    return -(-bits // 8)


def _to_bits(flags: Tensor) -> Tensor:
    """Eight flags per byte, the first in the lowest bit."""
    padded = torch.zeros(8 * _bytes_of(len(flags)), dtype=torch.uint8, device=flags.device)
    padded[: len(flags)] = flags
    return (padded.reshape(-1, 8) << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(1, dtype=torch.uint8)


def _from_bits(packed: Tensor, count: int) -> Tensor:
    flags = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    return flags.reshape(-1)[:count].bool()
