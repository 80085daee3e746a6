"""Mean scores of models over the training examples of a block's clients, ``[C]`` in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.applying import Applied, plain
from fedalloy.core.inputs import Inputs
from fedalloy.core.objective import Objective
from fedalloy.core.types import Block, Examples, Tree

Score = Callable[[Tensor, Tensor], Tensor]
"""One value per example from outputs and labels: ``Objective.losses`` or ``Objective.hits``."""
_CHUNK = 4096
_CHUNK_OF_SEVERAL = 512


def own_means(
    objective: Objective, score: Score, models: Tree, buffers: Tree, data: Block, apply: Applied = plain
) -> Tensor:
    """The mean score of every client's model over its own examples; NaN for a client without any."""
    size, start = data.size.cpu(), data.start.cpu()
    total, weight = (torch.zeros(len(size), dtype=torch.float64) for _ in range(2))
    device = next(iter(models.values())).device

    def scores(params: Tree, own: Tree, x: Inputs, y: Inputs) -> Tensor:
        return _with_counts(objective, score(objective.outputs(params, own, x), y), y)

    for piece in inputs.pieces(int(size.max()), _CHUNK if len(size) == 1 else _CHUNK_OF_SEVERAL):
        rows, valid = _rows(start, size, piece)
        if isinstance(rows, Tensor):
            rows = rows.to(inputs.device_of(data.y))
        x, y = (inputs.to(inputs.take(part, rows), device) for part in (data.x, data.y))
        if isinstance(rows, slice):
            x, y = apply.stack([(x, y)])
        found: Tensor = apply.rows(apply(scores, len(size), models, buffers, x, y)).cpu().double()
        values, counts = found.unbind(-1)
        total += (values if valid is None else values * valid).sum(1)
        weight += (counts if valid is None else counts * valid).sum(1)
    return total / weight


def common_means(objective: Objective, score: Score, params: Tree, buffers: Tree, data: Block) -> Tensor:
    """The same for one model that all clients share: one pass over all their examples."""
    size, start = data.size.cpu(), data.start.cpu()
    owner = torch.repeat_interleave(size)
    rows = start[owner] + torch.arange(len(owner)) - (size.cumsum(0) - size)[owner]
    rows, device = rows.to(inputs.device_of(data.y)), next(iter(params.values())).device
    found = torch.zeros(len(size), 2, dtype=torch.float64)
    for some, whose in zip(rows.split(_CHUNK), owner.split(_CHUNK), strict=True):
        x, y = (inputs.to(inputs.take(part, some), device) for part in (data.x, data.y))
        values = _with_counts(objective, score(objective.outputs(params, buffers, x), y), y)
        found.index_add_(0, whose, values.cpu().double())
    return found[:, 0] / found[:, 1]


def mean_loss(objective: Objective, params: Tree, buffers: Tree, examples: Examples) -> float:
    """Mean loss over a client's examples; NaN for a client without any."""
    return float(own_means(objective, objective.losses, params, buffers, Block.of(examples))[0])


def _with_counts(objective: Objective, values: Tensor, y: Inputs) -> Tensor:
    """Every example's value times its number of targets that count, and this number, ``[N, 2]``. A value that is not
    finite stays, unless nothing counts."""
    counts = objective.counts(y)
    if counts is None:
        return torch.stack([values, torch.ones_like(values)], -1)
    weight = counts.double()
    return torch.stack([torch.where(counts > 0, values * weight, 0.0), weight], -1)


def _rows(start: Tensor, size: Tensor, piece: slice) -> tuple[Tensor | slice, Tensor | None]:
    """The pool's rows of a piece of every client's examples, and which of them exist; for a single client a slice, so
    that nothing is copied."""
    if len(size) == 1:
        begin = int(start[0])
        return slice(begin + piece.start, begin + piece.stop), None
    place = torch.arange(piece.start, piece.stop)
    valid = place < size.unsqueeze(1)
    return torch.where(valid, start.unsqueeze(1) + place, 0), valid
