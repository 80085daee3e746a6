"""How a function of one client is applied to a block of clients: called for a single one, or vmapped over many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedalloy.core.types import Tree


class Applied(Protocol):
    """One way to apply it. It also defines the form of a block's trees: ``stack`` builds them, ``unstack`` splits
    them."""

    def __call__(self, function: Callable[..., Any], clients: int, *trees: Any) -> Any:
        """Apply ``function`` to every client's part of the trees; the results are such trees again."""

    def stack(self, trees: list[Any]) -> Any:
        """The block's tree from one per client."""

    def unstack(self, stacked: Any, clients: int) -> list[Any]:
        """One tree per client from the block's."""

    def same(self, leaves: Tree, clients: int) -> Tree:
        """The same leaves for every client, without a copy."""

    def split(self, values: Tensor) -> Tensor:
        """One value per client, ``[C, ...]``, as a leaf of the block's trees."""

    def rows(self, trees: Any) -> Any:
        """The block's trees with a leading client axis."""


@dataclass(frozen=True)
class Plain:
    """A block of one client, whose trees have no leading axis and may have leaves that are not tensors."""

    def __call__(self, function: Callable[..., Any], clients: int, *trees: Any) -> Any:
        return function(*trees)

    def stack(self, trees: list[Any]) -> Any:
        (only,) = trees
        return only

    def unstack(self, stacked: Any, clients: int) -> list[Any]:
        return [stacked]

    def same(self, leaves: Tree, clients: int) -> Tree:
        return leaves

    def split(self, values: Tensor) -> Tensor:
        return values[0]

    def rows(self, trees: Any) -> Any:
        return led(trees)


@dataclass(frozen=True)
class Vmapped:
    """Any number of clients at once, by ``torch.func.vmap``: every leaf is a tensor with a leading client axis."""

    def __call__(self, function: Callable[..., Any], clients: int, *trees: Any) -> Any:
        def call(_: Tensor, *given: Any) -> Any:
            return function(*given)

        # The first argument tells vmap the number of clients if the trees have no leaves.
        return vmap(call)(torch.zeros(clients), *trees)

    def stack(self, trees: list[Any]) -> Any:
        """Plain scalars cannot be stacked and are refused."""
        first = trees[0]
        if not _has_leaves(first):  # stateless clients: skip tree_map, which matters in small rounds
            return first
        if len(trees) == 1:
            return led(first)
        return tree_map(lambda *leaves: torch.stack(leaves), first, *trees[1:])

    def unstack(self, stacked: Any, clients: int) -> list[Any]:
        return [tree_map(lambda leaf, row=row: leaf[row], stacked) for row in range(clients)]

    def same(self, leaves: Tree, clients: int) -> Tree:
        return {name: leaf.expand(clients, *leaf.shape) for name, leaf in leaves.items()}

    def split(self, values: Tensor) -> Tensor:
        return values

    def rows(self, trees: Any) -> Any:
        return trees


plain, vmapped = Plain(), Vmapped()


def alone(trees: Any) -> Any:
    """The only client's part of trees with a leading axis; other values than tensors are unchanged."""
    return tree_map(lambda leaf: leaf[0] if isinstance(leaf, Tensor) else leaf, trees)


def led(trees: Any) -> Any:
    """One client's trees with a leading axis; other values than tensors are unchanged."""
    return tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, trees)


def _has_leaves(trees: Any) -> bool:
    return not isinstance(trees, dict) or any(map(_has_leaves, trees.values()))
