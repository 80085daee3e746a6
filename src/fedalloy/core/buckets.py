"""Lengths of batches of sequences: padding that no sequence of a batch needs is cut off before a step.

Data have one padded length. With buckets, a batch is cut to the smallest of a few lengths that holds all its sequences,
so that short ones take less time. Which length that is depends on the client's own batch alone, so that every engine
computes, and draws, the same; clients that run together are grouped by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.errors import SpecError
from fedalloy.core.inputs import Inputs

if TYPE_CHECKING:
    from fedalloy.core.blocks import Prepared


@dataclass(frozen=True)
class Buckets:
    """The allowed ``lengths``, ascending, and the input ``mask`` that is 0 at padding, which is at the end."""

    lengths: tuple[int, ...]
    mask: str = "attention_mask"

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1 or sorted(set(self.lengths)) != list(self.lengths):
            raise SpecError(f"buckets must be lengths of 1 or more in ascending order, got {list(self.lengths)}")

    def check(self, x: Inputs) -> None:
        """Refuse examples that do not say what is padding."""
        if not isinstance(x, Mapping) or self.mask not in x or x[self.mask].dim() != 2:
            given = ", ".join(x) if isinstance(x, Mapping) else "one tensor"
            raise SpecError(
                f"buckets cut off padding, and the input '{self.mask}' ([N, length], 0 at padding) says where it is; "
                f"these examples are {given}: give them by name, with '{self.mask}'"
            )

    def cut(self, x: Inputs, y: Inputs, length: int, axis: int = 1) -> tuple[Inputs, Inputs]:
        """The batch with ``length`` places on the axis of sequences: in every input, and in targets, that are as long
        as the mask."""
        whole = x[self.mask].shape[axis]
        if length >= whole:
            return x, y

        def shorter(leaf: Tensor) -> Tensor:
            return leaf.narrow(axis, 0, length) if leaf.dim() > axis and leaf.shape[axis] == whole else leaf

        return inputs.each(shorter, x), inputs.each(shorter, y)

    def of_batches(self, block: Prepared) -> Tensor:
        """The length of every batch, ``[S, C]``; sequences longer than all buckets keep theirs."""
        mask = block.data.x[self.mask]
        places = torch.arange(1, mask.shape[1] + 1, device=mask.device)
        used = mask.index_select(0, block.rows.reshape(-1)).ne(0) * places
        longest = (used.amax(1).reshape(block.rows.shape) * block.mask).amax(2).cpu()
        known = torch.tensor([*(one for one in self.lengths if one < mask.shape[1]), mask.shape[1]])
        return known[torch.bucketize(longest, known)]
