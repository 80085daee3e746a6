"""Combining by weights on elements, a chunk at a time, so that the weights need not fit in memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedalloy.core.contributions import Contributions
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.native.elements import row_sums, weighed
from fedalloy.core.protocols import ElementRound
from fedalloy.core.tree import Chunk
from fedalloy.core.types import Payload, Tree
from fedalloy.core.wide import wide, widest


def combine_elements(
    round: ElementRound, cohort: Contributions, update: str, parts: Sequence[str]
) -> tuple[Tree, Payload]:
    """Every client's mean weight per leaf, and the ``parts`` multiplied by the weights and summed over clients.

    The weights are computed from the part ``update``; all parts must have its leaves. The error bound is that of
    ``tree.combine``, and memory does not grow with the number of clients.
    """
    templates = {part: cohort.template(part) for part in (update, *parts)}
    _check_leaves(templates[update], {part: templates[part] for part in parts})
    sums = {part: {name: _Pieces(templates[part][name]) for name in templates[update]} for part in parts}
    totals = {name: torch.zeros(len(cohort), dtype=torch.float64) for name in templates[update]}
    for chunk, (updates, *columns) in cohort.chunks((update, *parts)):
        weights = round.weigh_chunk(_wide(updates), chunk)
        totals[chunk.leaf] += _row_sums(weights)
        for part, values in zip(parts, columns, strict=True):
            sums[part][chunk.leaf].add(chunk, _weighted(values, weights))
    means = {name: total / max(1, templates[update][name].numel()) for name, total in totals.items()}
    return means, {part: {name: one.whole() for name, one in leaves.items()} for part, leaves in sums.items()}


class _Pieces:
    """The sums of a leaf, chunk by chunk. They are written into one tensor that is there from the beginning: small
    results that outlive the large ones beside them would leave gaps in memory that add up to the size of all updates.
    Sums that are differentiated are kept apart instead, because nothing may be written into them."""

    def __init__(self, like: Tensor) -> None:
        self._like, self._kept = like, list[Tensor]()
        self._sum = torch.empty(like.shape, dtype=like.dtype, device=like.device).reshape(-1)

    def add(self, chunk: Chunk, piece: Tensor) -> None:
        if piece.requires_grad:
            self._kept.append(piece)
        else:
            self._sum[chunk.columns] = piece

    def whole(self) -> Tensor:
        return (torch.cat(self._kept) if self._kept else self._sum).reshape(self._like.shape)


def _wide(columns: Tensor) -> Tensor:
    """Integer leaves (counters) are weighted in float64."""
    return columns if columns.is_floating_point() else wide(columns)


def _row_sums(weights: Tensor) -> Tensor:
    found = row_sums(weights)
    return weights.sum(1, dtype=widest(weights.device)).cpu() if found is None else found


def _weighted(columns: Tensor, weights: Tensor) -> Tensor:
    """Combine one chunk; counters are rounded back to whole numbers."""
    if (found := weighed(columns, weights)) is not None:
        return found
    wider = _wide(columns)
    total = (wider * weights.to(wider.dtype)).sum(0, dtype=widest(wider.device)).to(wider.dtype)
    return total if columns.is_floating_point() else total.round().to(columns.dtype)


def _check_leaves(updates: Tree, parts: Payload) -> None:
    for part, leaves in parts.items():
        for name, leaf in updates.items():
            if name not in leaves or leaves[name].shape != leaf.shape:
                raise AlgorithmError(
                    f"weights on elements are made for the update, but the weighted part '{part}' has no leaf {name} "
                    f"of its shape: declare the part with reduce='mean' or choose a weighting by client"
                )
