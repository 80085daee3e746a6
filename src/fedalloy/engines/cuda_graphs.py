"""The step of all clients on a GPU, captured once per shape as a CUDA graph and replayed in every step of every round.

Launching a step's hundreds of small kernels takes longer than running them; a graph launches them together. Up to
``FEW`` clients run in parallel streams, more under ``vmap``, and so do adapters on a frozen base: a product with
weights that all clients share is then one product. The values are in static buffers: a replay reads this step's batch
from them and writes the new carry back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map

from fedalloy.core import inputs
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.blocks import summed_losses
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.core.protocols import Objective
from fedalloy.core.types import Context
from fedalloy.engines import vmap_kernel
from fedalloy.engines.batches import dropout_keys, padded_batches
from fedalloy.engines.filling import fill
from fedalloy.engines.im2col import ConvolutionsAsProducts

Precision = Literal["float32", "tf32", "bf16"]
FEW = 8
"""Up to this many clients run in separate CUDA streams; more are vmapped, and those that share most of a model."""
_WARM_UPS = 3
DIFFERENTIABLE = False


class StepContext(Context):
    """The context of a captured step, without what changes between rounds: the graph would keep this round's values."""

    def __getattribute__(self, name: str) -> Any:
        """Refuse what changes between rounds, except the step size, which is a tensor of the graph."""
        if name in ("round", "key", "absent"):
            raise AttributeError(f"a local step reads ctx.{name}: read it in 'begin' and put it into the carry")
        return super().__getattribute__(name)


@dataclass
class CapturedStep:
    """A graph and the buffers it reads and writes. ``owners`` are kept alive because their ids are in the graph's key:
    Python may give the id of a deleted object to another."""

    graph: torch.cuda.CUDAGraph
    values: dict[str, Any]
    loss: Tensor
    lr: Tensor
    owners: tuple[Algorithm, Objective]


@dataclass
class CudaGraphs:
    """Captured steps by shape; ``train`` does what ``vmap_kernel.train`` does, for models on a GPU."""

    precision: Precision = "float32"
    compiled: bool = False
    _captured: dict[tuple[Any, ...], CapturedStep] = field(default_factory=dict, repr=False)

    def train(self, training: BlockTraining) -> TrainingResult:
        """Run every step of a block by replaying graphs; steps with padding or finished clients use a masked graph."""
        algorithm, objective, ctx = training.algorithm, training.objective, training.ctx
        block, device, carry, buffers = training.block, training.device, training.carry, training.buffers
        drawn = {name: leaf.to(device) for name, leaf in block.draws.items()}
        dropout, phase, mask = dropout_keys(block).to(device), block.plan.phase.to(device), block.mask.to(device)
        loss_sum, counted = torch.zeros(len(block), 2, dtype=torch.float64, device=device), training.counted.to(device)
        held: CapturedStep | None = None
        for step, (x, y) in enumerate(padded_batches(block)):
            values = {
                "x": inputs.each(_ready, x), "y": inputs.each(_ready, y), "mask": mask[step], "phase": phase[:, step],
                "dropout": dropout[:, step], "inputs": {name: leaf[:, step] for name, leaf in drawn.items()},
            }  # fmt: skip
            whole = block.full[step] and block.running[step] == len(block)
            graph = self._graph(algorithm, objective, ctx, {**values, "carry": carry, "buffers": buffers}, whole)
            if graph is not held:
                fill(graph.values["carry"], carry)
                fill(graph.values["buffers"], buffers)
                held = graph
            fill({name: graph.values[name] for name in values}, values)
            graph.lr.fill_(ctx.local_lr)
            graph.graph.replay()
            carry, buffers = graph.values["carry"], graph.values["buffers"]
            loss_sum += summed_losses(graph.loss, counted[step])
        own = tree_map(torch.clone, (carry, buffers))
        return TrainingResult(own[0], own[1], loss_sum)

    def _graph(
        self, algorithm: Algorithm, objective: Objective, ctx: Context, values: dict[str, Any], whole: bool
    ) -> CapturedStep:
        leaves, structure = tree_flatten(values)
        key = (id(algorithm), id(objective), whole, str(structure), *((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in self._captured:
            self._captured[key] = self._capture(algorithm, objective, ctx, values, whole)
        return self._captured[key]

    def _capture(
        self, algorithm: Algorithm, objective: Objective, ctx: Context, values: dict[str, Any], whole: bool
    ) -> CapturedStep:
        """Warm up on a side stream, as capturing requires, then record one step."""
        device = values["mask"].device
        static = tree_map(lambda leaf: leaf.to(device, copy=True).contiguous(), values)
        lr = torch.tensor(ctx.local_lr, device=device, dtype=floating(values["carry"]))
        # The step size enters the graph as a tensor, so that a schedule needs no new capture.
        captured = StepContext(**{**vars(ctx), "local_lr": lr})
        apart = in_streams(len(values["mask"]), objective, values["carry"])
        step = self._step(algorithm, objective, captured, whole, len(values["mask"]) if apart else 0)
        kept = tree_map(torch.clone, static)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), precise(self.precision), fastest_convolutions():
            for _ in range(_WARM_UPS):
                _advance(step, static)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), precise(self.precision), fastest_convolutions():
            loss = _advance(step, static)
        fill(static, kept)
        return CapturedStep(graph, static, loss, lr, (algorithm, objective))

    def _step(
        self, algorithm: Algorithm, objective: Objective, ctx: Context, whole: bool, streams: int
    ) -> Callable[..., Any]:
        """The step of a whole block: every client in one of the streams, or all of them under ``vmap``."""
        one = vmap_kernel.step_of(algorithm, objective, ctx)
        if streams:
            return _in_streams(one, whole, streams)
        in_dims = (0, 0, 0, 0, None if whole else 0, 0, 0, 0)
        many = vmap(one, in_dims=in_dims)
        step = torch.compile(many) if self.compiled else many

        def call(carry: Any, buffers: Any, x: Tensor, y: Tensor, mask: Tensor, *rest: Any) -> Any:
            with nullcontext() if self.compiled else ConvolutionsAsProducts():
                return step(carry, buffers, x, y, None if whole else mask, *rest)

        return call if whole else _keeping(call)


def in_streams(clients: int, objective: Objective, carry: Any) -> bool:
    """Whether clients run in separate streams: they are few, and a frozen base, if there is one, is not most of the
    model. ``carry`` holds the values of all of them."""
    own = sum(leaf.numel() for leaf in tree_flatten(carry)[0]) / max(1, clients)
    return clients <= FEW and sum(leaf.numel() for leaf in objective.frozen.values()) <= own


def _advance(step: Callable[..., Any], static: dict[str, Any]) -> Tensor:
    """Take one step on the static buffers and write the new carry back into them."""
    carry, buffers, loss = step(
        static["carry"], static["buffers"], static["x"], static["y"], static["mask"],
        static["dropout"], static["inputs"], static["phase"],
    )  # fmt: skip
    fill(static["carry"], carry)
    fill(static["buffers"], buffers)
    result: Tensor = loss
    return result


def _keeping(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step, but clients without an example in it keep their values."""

    def kept(carry: Any, buffers: Any, x: Tensor, y: Tensor, mask: Tensor, *rest: Any) -> Any:
        on = mask.any(1)

        def choose(new: Tensor, old: Tensor) -> Tensor:
            return torch.where(on.reshape(-1, *[1] * (new.dim() - 1)), new, old)

        new, fresh, loss = step(carry, buffers, x, y, mask, *rest)
        return tree_map(choose, new, carry), tree_map(choose, fresh, buffers), loss

    return kept


def _in_streams(one: Callable[..., Any], whole: bool, clients: int) -> Callable[..., Any]:
    """Every client's step in a separate stream, joined at the end; a captured graph has them as parallel branches."""
    streams = [torch.cuda.Stream() for _ in range(clients)]

    def step(carry: Any, buffers: Any, x: Tensor, y: Tensor, mask: Tensor, *rest: Any) -> Any:
        main = torch.cuda.current_stream()
        results = []
        for client, stream in enumerate(streams):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                args = tree_map(lambda leaf, row=client: leaf[row], (carry, buffers, x, y))
                others = tree_map(lambda leaf, row=client: leaf[row], rest)
                results.append(one(*args, None if whole else mask[client], *others))
        for stream in streams:
            main.wait_stream(stream)
        return tree_map(lambda *leaves: torch.stack(leaves), *results)

    return step if whole else _keeping(step)


@contextmanager
def precise(precision: Precision) -> Iterator[None]:
    """Matrix products and convolutions in float32, in tf32 (the same range, ten bits of mantissa), or in bf16."""
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
    with products_in(precision), autocast:
        yield


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """The same, except that tensors in float32 are not converted to bf16."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """While a step is warmed up and captured, cuDNN times its algorithms for every convolution and takes the fastest.
    Two runs may then differ by rounding, so it does not where the user asked torch for deterministic algorithms."""
    cudnn = torch.backends.cudnn
    before, repeatable = cudnn.benchmark, cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    cudnn.benchmark = before or not repeatable
    try:
        yield
    finally:
        cudnn.benchmark = before


def floating(carry: Any) -> torch.dtype:
    """The precision of the models; with a step size in another one, rounding would differ from the loop engine."""
    return next((leaf.dtype for leaf in tree_flatten(carry)[0] if leaf.is_floating_point()), torch.float32)


def _ready(batch: Tensor) -> Tensor:
    """The batch, pinned if it is not on the GPU, so that copying it does not block the steps in progress."""
    return batch if batch.is_cuda else batch.contiguous().pin_memory()
