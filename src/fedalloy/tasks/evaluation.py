"""Scoring a model on the clients' examples: one pass over the pool, one value per client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from fedalloy.core.protocols import Objective
from fedalloy.core.types import Block, Examples, Tree
from fedalloy.tasks.metrics.metric import Metric, choose

Metrics = Iterable[str] | Mapping[str, Metric]


@torch.no_grad()
def evaluate_clients(
    objective: Objective, params: Tree, buffers: Tree, block: Block, metrics: Metrics = ("accuracy",), chunk: int = 4096
) -> dict[str, Tensor]:
    """Every metric for every client of the block, ``[K]`` in float64 on the CPU; NaN for a client without a score.

    One model for all clients. The pool is read ``chunk`` examples at a time; only rows that a client of the
    block owns are.
    """
    owner = torch.repeat_interleave(block.size.cpu())
    rows = _rows(block, owner)
    return _score(objective, params, buffers, Examples(block.x, block.y), rows, owner, len(block.size), metrics, chunk)


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
    device = next((leaf.device for leaf in params.values()), pool.x.device)
    for part in _chunks(pool, rows, chunk):
        outputs = objective.outputs(params, buffers, part.x.to(device))
        for name, metric in chosen.items():
            kept[name].append(metric.evidence(objective, outputs, part.y.to(device)))
    # Reduced on the CPU in float64: the order of the sums, and so every bit, is the same on all devices.
    return {
        name: metric.score(torch.cat(kept[name]).to("cpu", torch.float64), owner, clients)
        for name, metric in chosen.items()
    }


def _rows(block: Block, owner: Tensor) -> Tensor | None:
    """The rows of the pool that the clients own, client by client; None when they are simply all rows."""
    size, start = block.size.cpu(), block.start.cpu()
    offset = torch.arange(len(owner)) - (size.cumsum(0) - size)[owner]
    rows = start[owner] + offset
    everything = len(rows) == len(block.y) and bool((rows == torch.arange(len(rows))).all())
    return None if everything else rows


def _chunks(pool: Examples, rows: Tensor | None, chunk: int) -> Iterator[Examples]:
    if rows is None:
        for begin in range(0, len(pool), chunk):
            yield Examples(pool.x[begin : begin + chunk], pool.y[begin : begin + chunk])
        return
    for index in rows.to(pool.y.device).split(chunk):
        yield Examples(pool.x[index], pool.y[index])
