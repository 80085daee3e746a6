"""A whole block of fused local training as one CUDA graph, which launches its thousands of small kernels at once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.blocks import Prepared
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.core.types import Context, Tree
from fedalloy.engines.kernels import fused
from fedalloy.engines.kernels.fused import Dense
from fedalloy.engines.kinds import PlainSgd

DIFFERENTIABLE = False
MOST_GRAPHS = 8
"""Rounds whose numbers of steps or step sizes differ need a graph each; if there are more, further ones run without."""
_CLOSE = 1e-3
"""How much a graph's first replay may differ from the kernel: updates relative to the largest one, losses relative
to themselves."""
Result = tuple[Tree, Tensor]
Kernel = tuple[tuple[Dense, ...], str, PlainSgd]


@dataclass(frozen=True)
class Captured:
    """A graph, what it reads and what it writes. ``pool`` is kept alive because its address is in the graph's key:
    other data could get the same address."""

    graph: torch.cuda.CUDAGraph
    params: Tree
    rows: Tensor
    mask: Tensor
    seen: Tensor
    result: Result
    pool: Tensor

    def replay(self, params: Tree, block: Prepared) -> Result:
        """Train from these parameters on these batches; the result is a copy."""
        for name, leaf in params.items():
            self.params[name].copy_(leaf)
        self.rows.copy_(block.rows)
        self.mask.copy_(block.mask)
        self.seen.copy_(block.seen)
        self.graph.replay()
        deltas, totals = self.result
        return {name: leaf.clone() for name, leaf in deltas.items()}, totals.clone()


@dataclass
class FusedGraphs:
    """Captured blocks by ``signature``; ``train`` does what ``fused.train`` does, for models on a GPU.

    A graph repeats the same steps for the same number of clients, so rounds with other numbers of steps need another
    graph. The first replay of each graph is compared with the kernel; if they differ, or if capturing fails, the
    engine continues without graphs after one warning.
    """

    _captured: dict[tuple[Any, ...], Captured] = field(default_factory=dict, repr=False)
    _given_up: bool = False

    def train(self, layers: tuple[Dense, ...], training: BlockTraining) -> TrainingResult:
        """The kernel, for a model of these layers and a solver that declares plain descent."""
        kernel, params = fused.setting(layers, training), training.shared["params"]
        deltas, loss_sum = self.descend(kernel, params, training.block, training.ctx)
        return TrainingResult({}, {}, loss_sum, sent={"delta": deltas})

    def descend(self, kernel: Kernel, params: Tree, block: Prepared, ctx: Context) -> Result:
        """The same result as ``fused.descend``, from a graph where possible."""
        if self._given_up or not capturable(params, block):
            return fused.descend(*kernel, params, block, ctx)
        key = signature(kernel, params, block, ctx)
        if key in self._captured:
            return self._captured[key].replay(params, block)
        if len(self._captured) >= MOST_GRAPHS:
            return fused.descend(*kernel, params, block, ctx)
        expected = fused.descend(*kernel, params, block, ctx)
        try:
            self._captured[key] = _capture(kernel, params, block, ctx)
            found = self._captured[key].replay(params, block)
            problem = "" if agree(found, expected) else "its first replay differs from the kernel"
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        if problem:
            self._given_up = True
            self._captured.clear()
            warnings.warn(f"no CUDA graph of fused training: {problem}", RuntimeWarning, stacklevel=2)
        return expected


def capturable(params: Tree, block: Prepared) -> bool:
    """Whether models and data are on a GPU and at least one client takes a step."""
    return bool(block.running) and block.data.x.is_cuda and all(leaf.is_cuda for leaf in params.values())


def signature(kernel: Kernel, params: Tree, block: Prepared, ctx: Context) -> tuple[Any, ...]:
    """What is fixed in a graph: layers, loss, SGD settings, steps, clients, shapes, step size, address of the data."""
    shapes = tuple((name, leaf.shape, leaf.dtype) for name, leaf in params.items())
    data = (block.data.x.data_ptr(), block.data.y.data_ptr(), block.data.x.shape)
    return (kernel, shapes, tuple(block.running), tuple(block.full), block.rows.shape, ctx.local_lr, data)


def agree(found: tuple[Mapping[str, Tensor], Tensor], expected: tuple[Mapping[str, Tensor], Tensor]) -> bool:
    """Whether two results are the same up to rounding."""
    largest = max(float(leaf.abs().max()) for leaf in expected[0].values())
    apart = max(float((found[0][name] - leaf).abs().max()) for name, leaf in expected[0].items())
    return apart <= _CLOSE * largest and torch.allclose(found[1], expected[1], rtol=_CLOSE, atol=1e-9)


def _capture(kernel: Kernel, params: Tree, block: Prepared, ctx: Context) -> Captured:
    """Record one block on separate buffers, after the warm-up on a side stream that capturing requires."""
    static = {name: leaf.clone() for name, leaf in params.items()}
    rows, mask, seen = block.rows.clone(), block.mask.clone(), block.seen.clone()
    own = replace(block, chosen=rows, mask=mask, seen=seen)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        fused.descend(*kernel, static, own, ctx)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fused.descend(*kernel, static, own, ctx)
    return Captured(graph, static, rows, mask, seen, result, block.data.x)
