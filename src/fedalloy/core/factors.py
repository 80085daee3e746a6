"""Stacked leaves kept as products of factors: a dense layer's update of few examples has a low rank.

Norms and weighted sums are computed from the factors. Whatever else reads such a leaf gets it multiplied out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.wide import wide


def _inner(one: Tensor, other: Tensor) -> Tensor:
    return torch.bmm(one, other.transpose(1, 2))


@dataclass(frozen=True)
class LowRank:
    """``left @ right`` of every client, ``[C, m, r]`` and ``[C, r, n]``; ``arrange`` turns ``[K, m, n]`` into ``K``
    leaves with the names' shapes and order. ``inner`` computes inner products of long rows, ``[C, r, n]`` each."""

    left: Tensor
    right: Tensor
    arrange: Callable[[Tensor], Tensor]
    inner: Callable[[Tensor, Tensor], Tensor] = _inner

    @property
    def dtype(self) -> torch.dtype:
        """That of the leaves."""
        return self.left.dtype

    @property
    def one(self) -> Tensor:
        """A tensor with the shape and dtype of one client's leaf, without its values."""
        form = torch.empty(1, self.left.shape[1], self.right.shape[2], dtype=self.dtype, device="meta")
        return self.arrange(form)[0]

    def whole(self) -> Tensor:
        """All clients' leaves, ``[C, ...]``."""
        return self.arrange(torch.bmm(self.left, self.right.to(self.dtype))).contiguous()

    def squares(self, *, exact: bool) -> Tensor:
        """Every client's squared length, ``[C]``, computed in float64 if ``exact``."""
        left, right = (wide(one) if exact else one.to(self.dtype) for one in (self.left, self.right))
        rows = _inner(right, right) if exact else self.inner(right, right)
        both = torch.bmm(left.transpose(1, 2), left) * rows
        return both.sum((1, 2)).clamp(min=0)

    def combined(self, weights: Tensor) -> Tensor:
        """The weighted sum over clients, as one product of all factors side by side."""
        left = (self.left * weights.to(self.left).reshape(-1, 1, 1)).permute(1, 0, 2).flatten(1)
        return self.arrange((left @ self.right.to(self.dtype).flatten(0, 1)).unsqueeze(0))[0].contiguous()


class FactoredTree(Mapping[str, Tensor]):
    """A stacked tree of which some leaves are kept as factors: reading one multiplies it out, once.

    No dict, because copying a dict does not ask its class for the values.

    >>> kept = LowRank(torch.ones(1, 2, 1), torch.ones(1, 1, 3), lambda leaf: leaf)
    >>> FactoredTree({"w": kept})["w"].shape
    torch.Size([1, 2, 3])
    """

    def __init__(self, stored: Mapping[str, Tensor | LowRank]) -> None:
        self.stored = dict(stored)
        self._whole: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        kept = self.stored[name]
        if isinstance(kept, Tensor):
            return kept
        if name not in self._whole:
            self._whole[name] = kept.whole()
        return self._whole[name]

    def take(self, index: Tensor) -> FactoredTree:
        """Some clients, by position."""
        rows = {leaf.device: index.to(leaf.device) for leaf in map(_tensor, self.stored.values())}
        return FactoredTree({name: _taken(leaf, rows[_tensor(leaf).device]) for name, leaf in self.stored.items()})

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def stored(leaves: Mapping[str, Tensor]) -> Mapping[str, Tensor | LowRank]:
    """The leaves as they are kept."""
    return leaves.stored if isinstance(leaves, FactoredTree) else leaves


def _tensor(leaf: Tensor | LowRank) -> Tensor:
    return leaf.left if isinstance(leaf, LowRank) else leaf


def _taken(leaf: Tensor | LowRank, index: Tensor) -> Tensor | LowRank:
    if isinstance(leaf, LowRank):
        return LowRank(leaf.left[index], leaf.right[index], leaf.arrange, leaf.inner)
    return leaf[index]


def first_of(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The first client's leaves, of factored ones only shape and dtype."""
    return {name: leaf.one if isinstance(leaf, LowRank) else leaf[0] for name, leaf in stored(leaves).items()}
