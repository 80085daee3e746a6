"""Clipping of updates by their Euclidean norm (McMahan et al. 2018, arXiv:1710.06963)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedalloy.core import tree
from fedalloy.core.packing import Packings
from fedalloy.core.protocols import Wire
from fedalloy.core.registry import register
from fedalloy.core.types import Payload, State, Tree


@register("wire", "clip")
@dataclass(frozen=True)
class Clip(Wire):
    """``x min(1, norm / |x|)`` over all leaves of the update; shorter updates stay as they are.

    When to use it: directly before ``noise``, or against clients whose updates explode.

    >>> import torch
    >>> Clip(norm=1.0).encode({"delta": {"w": torch.tensor([3.0, 4.0])}}, {}, {})[0]
    {'delta': {'w': tensor([0.6000, 0.8000])}}
    """

    clips: ClassVar[bool] = True

    norm: float = 1.0
    part: str = "delta"

    def __post_init__(self) -> None:
        if not self.norm > 0:
            raise ValueError(f"norm must be above 0, got {self.norm}")

    @property
    def changes(self) -> frozenset[str]:
        return frozenset({self.part})

    def packings(self, before: Packings) -> Packings:
        """Unchanged: one factor for all entries keeps zeros zero and equal magnitudes equal."""
        return before

    def encode(self, payload: Payload, mine: State, draws: Tree) -> tuple[Payload, State]:
        update = payload[self.part]
        factor = (self.norm / tree.norm(update)).clamp(max=1.0)
        clipped = tree.map_leaves(lambda leaf: leaf * factor.to(leaf.dtype), update)
        return {**payload, self.part: clipped}, mine
