"""One bit per parameter: the scaled sign with error feedback (Karimireddy et al. 2019, arXiv:1901.09847)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedalloy.core.registry import register
from fedalloy.wire.feedback import ErrorFeedback


@register("wire", "scaled_sign")
@dataclass(frozen=True)
class ScaledSign(ErrorFeedback):
    """``sign(x) |x|_1 / d`` over the whole model of d parameters; what the sign misses waits at the client.

    On the wire: one bit per parameter and one number. An entry that is exactly zero stays zero, as published; such
    entries are counted with the same bit.
    When to use it: slow uplinks, updates whose entries are of similar size.

    >>> import torch
    >>> ScaledSign().compress(torch.tensor([1.0, -3.0, 0.5, 1.5]))
    tensor([ 1.5000, -1.5000,  1.5000,  1.5000])
    >>> ScaledSign().compressed_bytes(100_001, width=4)
    12505
    """

    def compress(self, vector: Tensor) -> Tensor:
        return vector.sign() * vector.abs().mean()

    def compressed_bytes(self, length: int, width: int) -> int:
        return -(-length // 8) + width
