"""Compression with error feedback (Karimireddy et al. 2019, arXiv:1901.09847)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.packing import Packing, Packings
from fedalloy.core.protocols import Shared, Wire
from fedalloy.core.types import Payload, State, Tree


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Wire, Packing):
    """Send ``C(x + e)`` instead of ``x`` and keep ``e <- x + e - C(x + e)`` for the client's next round.

    The whole ``part`` is compressed as one flat vector; other parts, such as buffers, are sent unchanged. ``like``
    names the shared part that has the same shapes. Subclasses define the compression and the packed form. After another
    compressor on the same part, this one's packed form is sent.
    """

    stateful: ClassVar[bool] = True

    part: str = "delta"
    like: str = "params"

    @abstractmethod
    def compress(self, vector: Tensor) -> Tensor:
        """The vector as the server will see it."""

    @property
    def changes(self) -> frozenset[str]:
        return frozenset({self.part})

    def packings(self, before: Packings) -> Packings:
        return {**before, self.part: self}

    def init_client(self, shared: Shared, key: Key) -> State:
        return {"residual": tree.zeros_like(shared[self.like])}

    def encode(self, payload: Payload, mine: State, draws: Tree) -> tuple[Payload, State]:
        wanted = tree.add(payload[self.part], mine["residual"])
        sent = unflatten(self.compress(flatten(wanted)), wanted)
        return {**payload, self.part: sent}, {"residual": tree.subtract(wanted, sent)}


def flatten(leaves: Tree) -> Tensor:
    """All numbers as one vector, in the common promoted dtype."""
    return torch.cat([leaf.reshape(-1) for leaf in leaves.values()])


def unflatten(vector: Tensor, like: Tree) -> Tree:
    """The vector split into leaves again, with their shapes and dtypes."""
    parts = vector.split([leaf.numel() for leaf in like.values()])
    return {
        name: part.reshape(leaf.shape).to(leaf.dtype) for (name, leaf), part in zip(like.items(), parts, strict=True)
    }


def width(leaves: Tree) -> int:
    """Bytes per number of the flat vector."""
    return reduce(torch.promote_types, (leaf.dtype for leaf in leaves.values())).itemsize


def check_packed(packed: Tree, **expected: tuple[torch.dtype, int]) -> None:
    """Refuse tensors that are not vectors of these names, dtypes and lengths."""
    if packed.keys() != expected.keys():
        raise ValueError(f"its packed tensors are {', '.join(sorted(packed))} instead of {', '.join(sorted(expected))}")
    for name, (dtype, length) in expected.items():
        if packed[name].dtype != dtype or packed[name].shape != (length,):
            raise ValueError(
                f"its packed '{name}' holds {packed[name].dtype} of shape {tuple(packed[name].shape)} instead of "
                f"{dtype} of shape ({length},)"
            )
