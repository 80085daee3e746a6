"""Combining by weights on elements, a chunk at a time: what is never whole need not fit in memory."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.protocols import ElementRound
from fedalloy.core.tree import Chunk
from fedalloy.core.types import Payload, Tree


def combine_elements(round: ElementRound, updates: Tree, parts: Payload) -> tuple[Tree, Payload]:
    """Every client's mean weight in each leaf, and the ``parts`` multiplied by the weights and summed over clients.

    The weights come from ``updates``; parts have the same leaves. The error is that of ``tree.combine``, and the
    memory does not grow with the number of clients.
    """
    _check_leaves(updates, parts)
    sums: dict[str, dict[str, list[Tensor]]] = {part: {name: [] for name in updates} for part in parts}
    totals = {name: torch.zeros(leaf.shape[0], dtype=torch.float64) for name, leaf in updates.items()}
    for chunk, columns in tree.chunks(updates):
        weights = round.weigh_chunk(columns, chunk)
        totals[chunk.leaf] += weights.sum(1, dtype=torch.float64).cpu()
        for part, leaves in parts.items():
            sums[part][chunk.leaf].append(_weighted(leaves[chunk.leaf], weights, chunk))
    means = {name: total / max(1, updates[name][0].numel()) for name, total in totals.items()}
    return means, {part: _whole(pieces, parts[part]) for part, pieces in sums.items()}


def _weighted(leaf: Tensor, weights: Tensor, chunk: Chunk) -> Tensor:
    columns = tree.as_rows(leaf)[:, chunk.columns]
    return (columns * weights.to(leaf.dtype)).sum(0, dtype=torch.float64).to(leaf.dtype)


def _whole(pieces: Mapping[str, list[Tensor]], stacked: Tree) -> Tree:
    """The summed chunks of every leaf as one tensor of the leaf's shape."""
    return {
        name: torch.cat([tree.as_rows(stacked[name])[0, :0], *parts]).reshape(stacked[name].shape[1:])
        for name, parts in pieces.items()
    }


def _check_leaves(updates: Tree, parts: Payload) -> None:
    for part, leaves in parts.items():
        for name, leaf in updates.items():
            if name not in leaves or leaves[name].shape != leaf.shape:
                raise AlgorithmError(
                    f"weights on elements are made for the update, but the weighted part '{part}' has no leaf {name} "
                    f"of its shape: declare the part with reduce='mean' or choose a weighting by client"
                )
