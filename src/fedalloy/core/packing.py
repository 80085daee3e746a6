"""Packed forms of encoded parts: fewer bytes than plain tensors, and lossless."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.types import Payload, Tree


class Packing(ABC):
    """The form on the wire of a part that a wire transform has encoded. Traffic counts the bytes of the packed tensors,
    without headers."""

    @abstractmethod
    def pack(self, leaves: Tree) -> Tree:
        """The tensors that are sent instead of one client's leaves."""

    @abstractmethod
    def unpack(self, packed: Tree, like: Tree) -> Tree:
        """The leaves that were packed, with the names, shapes and dtypes of ``like``. Raises a ``ValueError`` for
        tensors that ``pack`` cannot have made."""

    @abstractmethod
    def packed_bytes(self, leaves: Tree) -> Tensor:
        """The bytes of each client's packed tensors, ``[C]``, from the leaves of C clients, ``[C, ...]`` each."""


Packings = Mapping[str, Packing]
"""By part; parts that are not listed are sent as plain tensors."""


def pack(payload: Payload, packings: Packings) -> Payload:
    """One client's payload as it is sent; parts without leaves are unchanged."""
    return {part: packings[part].pack(leaves) if part in packings and leaves else leaves
            for part, leaves in payload.items()}  # fmt: skip


def unpack(packed: Payload, packings: Packings, like: Mapping[str, Tree]) -> Payload:
    """The payload that was packed; ``like`` holds the template of every part."""
    return {part: packings[part].unpack(leaves, like[part]) if part in packings and like.get(part) else leaves
            for part, leaves in packed.items()}  # fmt: skip


def bytes_up(payload: Payload, packings: Packings, clients: int) -> Tensor:
    """The bytes that each client sends, ``[C]`` in float64, from leaves with a leading client axis.

    >>> bytes_up({"delta": {"w": torch.zeros(2, 3)}}, {}, 2)
    tensor([12., 12.], dtype=torch.float64)
    """
    if not packings:
        each = sum(tree.nbytes(leaves) // max(1, clients) for leaves in payload.values())
        return torch.full((clients,), float(each), dtype=torch.float64)
    total = torch.zeros(clients, dtype=torch.float64)
    for part, leaves in payload.items():
        if part in packings and leaves:
            total += packings[part].packed_bytes(leaves).cpu()
        else:
            total += tree.nbytes(leaves) // max(1, clients)
    return total
