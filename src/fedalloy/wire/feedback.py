"""Compression that forgets nothing: error feedback (Karimireddy et al. 2019, arXiv:1901.09847)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Shared, Wire
from fedalloy.core.types import Payload, State, Tree


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Wire):
    """Send ``C(x + e)`` instead of ``x`` and keep ``e <- x + e - C(x + e)`` for the client's next round.

    The whole ``part`` is compressed as one flat vector; other parts, the buffers among them, travel as they are.
    ``like`` names the shared part whose shapes it has. Says how the vector is compressed and how large it then is.
    """

    part: str = "delta"
    like: str = "params"

    @abstractmethod
    def compress(self, vector: Tensor) -> Tensor:
        """The vector as the server will see it."""

    @abstractmethod
    def compressed_bytes(self, length: int, width: int) -> int:
        """What a vector of so many numbers of ``width`` bytes takes on the wire."""

    @property
    def stateful(self) -> bool:
        return True

    def init_client(self, shared: Shared, key: Key) -> State:
        return {"residual": tree.zeros_like(shared[self.like])}

    def encode(self, payload: Payload, mine: State, draws: Tree) -> tuple[Payload, State]:
        wanted = tree.add(payload[self.part], mine["residual"])
        sent = _unflatten(self.compress(_flatten(wanted)), wanted)
        return {**payload, self.part: sent}, {"residual": tree.subtract(wanted, sent)}

    def bytes_sent(self, payload: Payload, plain: int) -> int:
        leaves = payload[self.part]
        width = max(leaf.element_size() for leaf in leaves.values())
        return plain - tree.nbytes(leaves) + self.compressed_bytes(tree.count(leaves), width)


def _flatten(leaves: Tree) -> Tensor:
    return torch.cat([leaf.reshape(-1) for leaf in leaves.values()])


def _unflatten(vector: Tensor, like: Tree) -> Tree:
    parts = vector.split([leaf.numel() for leaf in like.values()])
    return {
        name: part.reshape(leaf.shape).to(leaf.dtype) for (name, leaf), part in zip(like.items(), parts, strict=True)
    }
