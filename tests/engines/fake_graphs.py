"""CUDA graphs without a card: a replay runs what was captured again on the same buffers, and overwrites its results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map

from fedalloy.core.factors import FactoredTree, LowRank
from fedalloy.engines import batched
from fedalloy.engines.kernels import conv_graphs, cuda_graphs, fused_graph
from fedalloy.engines.kernels.conv_graphs import CapturedRound
from fedalloy.engines.kernels.conv_sgd import Batches
from fedalloy.engines.kernels.cuda_graphs import CapturedStep, CudaGraphs, floating
from fedalloy.engines.kernels.filling import fill


class Replays:
    """Runs the work again and writes what it returns where it was returned first."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.count = work, 0
        self.result = work()

    def replay(self) -> None:
        self.count += 1
        fill(_tensors(self.result), _tensors(self.work()))


def _tensors(result: Any) -> list[torch.Tensor]:
    if isinstance(result, FactoredTree):
        return [part for leaf in result.stored.values() for part in _tensors(leaf)]
    if isinstance(result, LowRank):
        return [result.left, result.right]
    if isinstance(result, tuple):
        return [leaf for one in result for leaf in _tensors(one)]
    leaves: list[torch.Tensor] = tree_flatten(result)[0]
    return leaves


def _captured_step(self: CudaGraphs, algorithm: Any, objective: Any, ctx: Any, values: Any, whole: bool) -> Any:
    """As ``CudaGraphs._capture``, which needs streams."""
    static = tree_map(lambda leaf: leaf.clone().contiguous(), values)
    lr = torch.tensor(ctx.local_lr, dtype=floating(values["carry"]))
    kept = tree_map(torch.clone, static)
    graph = Replays(self._advancing(algorithm, objective, ctx, {**static, "lr": lr}, whole))
    fill(static, kept)
    return CapturedStep(graph, static, graph.result, lr, (algorithm, objective))  # type: ignore[arg-type]


def _captured_round(kernel: Any, params: Any, batches: Batches, lr: float) -> CapturedRound:
    """As ``conv_graphs._capture``."""
    static = {name: leaf.clone() for name, leaf in params.items()}
    own = replace(batches, rows=batches.rows.clone(), mask=batches.mask.clone(), seen=batches.seen.clone())
    size = torch.tensor(lr, dtype=next(iter(params.values())).dtype)
    fixed = kernel.sgd.weight_decay or kernel.sgd.pull
    graph = Replays(lambda: conv_graphs.measured(kernel, static, own, lr if fixed else size))
    return CapturedRound(graph, static, own, size, graph.result)  # type: ignore[arg-type]


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU pass for a card, on which many clients are mapped."""
    monkeypatch.setattr(batched, "_on_gpu", lambda shared: True)
    monkeypatch.setattr(cuda_graphs, "FEW", 0)
    monkeypatch.setattr(cuda_graphs, "_ready", lambda batch: batch)
    monkeypatch.setattr(CudaGraphs, "_capture", _captured_step)
    monkeypatch.setattr(conv_graphs, "_is_on_gpu", lambda batches: bool(batches.running))
    monkeypatch.setattr(conv_graphs, "_capture", _captured_round)
    monkeypatch.setattr(fused_graph, "capturable", lambda params, block: bool(block.running))
