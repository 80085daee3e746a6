"""Scoring a model on the clients' examples: one pass over the pool, one value per client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import vmap

from fedalloy.core import inputs, tree
from fedalloy.core.protocols import Objective
from fedalloy.core.types import Block, Examples, Tree
from fedalloy.tasks.metrics.metric import Metric, choose

Metrics = Iterable[str] | Mapping[str, Metric]
Model = tuple[Tree, Tree]
"""Parameters and buffers."""
# Measured on a CPU: 32 logistic models are 3 to 8 times faster stacked with 20 examples each, but slower with 200.
_SMALL_MODEL, _FEW_EXAMPLES = 50_000, 64


@torch.no_grad()
def evaluate_clients(
    objective: Objective, params: Tree, buffers: Tree, block: Block, metrics: Metrics = ("accuracy",), chunk: int = 4096
) -> dict[str, Tensor]:
    """Every metric for every client of the block, ``[K]`` in float64 on the CPU; NaN for a client without a score.

    One model for all clients. The pool is read ``chunk`` examples at a time, and only the rows of the block's clients.
    A model whose outputs depend on the batch (BatchNorm without running statistics) is evaluated client by client, so
    that a client's score does not depend on the other clients.
    """
    if objective.scores_by_batch and len(block.size) > 1:
        return _one_by_one(objective, [(params, buffers)] * len(block.size), block, metrics, chunk)
    owner = torch.repeat_interleave(block.size.cpu())
    rows = _rows(block, owner)
    return _score(objective, params, buffers, Examples(block.x, block.y), rows, owner, len(block.size), metrics, chunk)


@torch.no_grad()
def evaluate_models(
    objective: Objective, models: Sequence[Model], block: Block, metrics: Metrics = ("accuracy",), chunk: int = 4096
) -> dict[str, Tensor]:
    """Every client of the block scored with its own model, ``[K]`` in float64 on the CPU.

    On a GPU models are stacked and run under ``vmap``; on a CPU only if the overhead of single calls would dominate.
    Models that ``vmap`` does not support run one by one.
    """
    if len(models) > 1 and not objective.scores_by_batch and _worth_stacking(models, block):
        try:
            return _side_by_side(objective, models, block, metrics, chunk)
        except Exception:
            # Either vmap does not support the model, or the model itself fails: then it raises again one by one.
            pass
    return _one_by_one(objective, models, block, metrics, chunk)


@torch.no_grad()
def evaluate_pool(
    objective: Objective,
    params: Tree,
    buffers: Tree,
    examples: Examples,
    metrics: Metrics = ("accuracy",),
    chunk: int = 4096,
) -> dict[str, float]:
    """Every metric over a pool of examples taken as one set."""
    owner = torch.zeros(len(examples), dtype=torch.int64)
    scores = _score(objective, params, buffers, examples, None, owner, 1, metrics, chunk)
    return {name: float(score) for name, score in scores.items()}


def _score(
    objective: Objective,
    params: Tree,
    buffers: Tree,
    pool: Examples,
    rows: Tensor | None,
    owner: Tensor,
    clients: int,
    metrics: Metrics,
    chunk: int,
) -> dict[str, Tensor]:
    chosen = choose(metrics)
    if len(owner) == 0:
        return {name: torch.full((clients,), torch.nan, dtype=torch.float64) for name in chosen}
    kept: dict[str, list[Tensor]] = {name: [] for name in chosen}
    device = next((leaf.device for leaf in params.values()), inputs.device_of(pool.x))
    for part in _chunks(pool, rows, chunk):
        outputs = objective.outputs(params, buffers, inputs.to(part.x, device))
        for name, metric in chosen.items():
            kept[name].append(metric.evidence(objective, outputs, inputs.to(part.y, device)))
    # Reduced on the CPU in float64: the order of the sums, and so every bit, is the same on all devices.
    return {
        name: metric.score(torch.cat(kept[name]).to("cpu", torch.float64), owner, clients)
        for name, metric in chosen.items()
    }


def _worth_stacking(models: Sequence[Model], block: Block) -> bool:
    params = models[0][0]
    if any(leaf.is_cuda for leaf in params.values()):
        return True
    return tree.count(params) <= _SMALL_MODEL and int(block.size.sum()) <= _FEW_EXAMPLES * len(models)


def _one_by_one(
    objective: Objective, models: Sequence[Model], block: Block, metrics: Metrics, chunk: int
) -> dict[str, Tensor]:
    scores = [
        evaluate_clients(objective, *model, _only(block, row), metrics, chunk) for row, model in enumerate(models)
    ]
    return {name: torch.cat([score[name] for score in scores]) for name in choose(metrics)}


def _only(block: Block, row: int) -> Block:
    return Block(block.x, block.y, block.start[row : row + 1], block.size[row : row + 1])


def _side_by_side(
    objective: Objective, models: Sequence[Model], block: Block, metrics: Metrics, chunk: int
) -> dict[str, Tensor]:
    """Stack the models, the largest clients first, so that clients with examples left are always the first rows."""
    chosen, size = choose(metrics), block.size.cpu()
    order = size.argsort(descending=True, stable=True)
    params, buffers = (tree.stack([models[row][part] for row in order.tolist()]) for part in (0, 1))
    start, size = block.start.cpu()[order], size[order]
    device = next(iter(params.values())).device
    width, longest = max(1, chunk // len(models)), int(size[0])
    owners: list[Tensor] = [order[:0]]
    kept: dict[str, list[Tensor]] = {name: [] for name in chosen}
    for begin in range(0, longest, width):
        running = int((size > begin).sum())
        place = torch.arange(begin, min(begin + width, longest))
        valid = place < size[:running].unsqueeze(1)
        rows = (start[:running].unsqueeze(1) + torch.where(valid, place, 0)).to(inputs.device_of(block.y))
        x = inputs.to(inputs.take(block.x, rows), device)
        y = inputs.to(inputs.take(block.y, rows[valid.to(rows.device)]), device)
        outputs = vmap(objective.outputs)(_first(params, running), _first(buffers, running), x)[valid.to(device)]
        owners.append(order[:running].unsqueeze(1).expand(-1, len(place))[valid])
        for name, metric in chosen.items():
            kept[name].append(metric.evidence(objective, outputs, y).to("cpu", torch.float64))
    return _scored(chosen, kept, torch.cat(owners), len(models))


def _first(stacked: Tree, count: int) -> Tree:
    return {name: leaf[:count] for name, leaf in stacked.items()}


def _scored(
    chosen: Mapping[str, Metric], kept: Mapping[str, list[Tensor]], owner: Tensor, clients: int
) -> dict[str, Tensor]:
    """Scores from evidence in any order of clients: it is sorted by client, keeping the order of its examples."""
    if len(owner) == 0:
        return {name: torch.full((clients,), torch.nan, dtype=torch.float64) for name in chosen}
    order = owner.argsort(stable=True)
    return {name: metric.score(torch.cat(kept[name])[order], owner[order], clients) for name, metric in chosen.items()}


def _rows(block: Block, owner: Tensor) -> Tensor | None:
    """The rows of the pool that the clients own, client by client; None if that is the whole pool in order."""
    size, start = block.size.cpu(), block.start.cpu()
    offset = torch.arange(len(owner)) - (size.cumsum(0) - size)[owner]
    rows = start[owner] + offset
    everything = len(rows) == inputs.length(block.y) and bool((rows == torch.arange(len(rows))).all())
    return None if everything else rows


def _chunks(pool: Examples, rows: Tensor | None, chunk: int) -> Iterator[Examples]:
    if rows is None:
        for some in inputs.pieces(len(pool), chunk):
            yield Examples(inputs.take(pool.x, some), inputs.take(pool.y, some))
        return
    for index in rows.to(inputs.device_of(pool.y)).split(chunk):
        yield Examples(inputs.take(pool.x, index), inputs.take(pool.y, index))
