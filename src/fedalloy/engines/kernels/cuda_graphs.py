"""The step of all clients on a GPU, captured once per shape as a CUDA graph and replayed in every step of every round.

Launching a step's hundreds of small kernels takes longer than running them; a graph launches them together. Up to
``FEW`` clients run in parallel streams, more under ``vmap``, and so do adapters on a frozen base: a product with
weights that all clients share is then one product. The values are in static buffers: a replay reads this step's batch
from them and writes the new carry back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
from fedalloy.engines.batches import dropout_keys, padded_batches
from fedalloy.engines.kernels import vmap_kernel
from fedalloy.engines.kernels.filling import fill
from fedalloy.engines.kernels.im2col import ConvolutionsAsProducts
from fedalloy.engines.kernels.tracing import can_compile, or_uncompiled, trace, warn_uncompiled
from fedalloy.engines.precision import Precision, fastest_convolutions, precise

FEW = 8
"""Up to this many clients run in separate CUDA streams; more are vmapped, and those that share most of a model."""
MOST_GRAPHS = 32
"""Cohorts of many sizes need graphs of many shapes, each with a copy of all its clients' models: the one that was not
used for longest is given up."""
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
    compiled: bool | None = None
    _captured: dict[tuple[Any, ...], CapturedStep] = field(default_factory=dict, repr=False)

    def train(self, training: BlockTraining) -> TrainingResult:
        """Run every step of a block by replaying graphs; steps with padding or finished clients use a masked graph."""
        algorithm, objective, ctx = training.algorithm, training.objective, training.ctx
        block, device, carry, buffers = training.block, training.device, training.carry, training.buffers
        drawn = {name: leaf.to(device) for name, leaf in block.draws.items()}
        dropout, phase, mask = dropout_keys(block).to(device), block.plan.phase.to(device), block.trained.to(device)
        loss_sum = torch.zeros(len(block), 2, dtype=torch.float64, device=device)
        counted = training.counted.to(device) * mask.any(2)
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
            if len(self._captured) >= MOST_GRAPHS:
                del self._captured[next(iter(self._captured))]
            self._captured[key] = self._capture(algorithm, objective, ctx, values, whole)
        self._captured[key] = self._captured.pop(key)  # the last one was used last
        return self._captured[key]

    def _capture(
        self, algorithm: Algorithm, objective: Objective, ctx: Context, values: dict[str, Any], whole: bool
    ) -> CapturedStep:
        """Warm up on a side stream, as capturing requires, then record one step."""
        device = values["mask"].device
        static = tree_map(lambda leaf: leaf.to(device, copy=True).contiguous(), values)
        lr = torch.tensor(ctx.local_lr, device=device, dtype=floating(values["carry"]))
        kept = tree_map(torch.clone, static)
        advance = self._advancing(algorithm, objective, ctx, {**static, "lr": lr}, whole)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), precise(self.precision), fastest_convolutions():
            for _ in range(_WARM_UPS):
                advance()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), precise(self.precision), fastest_convolutions():
            loss = advance()
        fill(static, kept)
        return CapturedStep(graph, static, loss, lr, (algorithm, objective))

    def _advancing(
        self, algorithm: Algorithm, objective: Objective, ctx: Context, static: dict[str, Any], whole: bool
    ) -> Callable[[], Tensor]:
        """A step on the static buffers, which returns the losses: compiled if that is wanted and possible."""
        device, clients = static["mask"].device, len(static["mask"])
        if self._compiles(static) and can_compile(device):
            try:
                return compiled_step(algorithm, objective, ctx, static, whole, self.precision)
            except Exception as error:  # whatever a step does that has no graph, and the compiler's own errors
                warn_uncompiled(error)
        # The step size enters the graph as a tensor, so that a schedule needs no new capture.
        apart = in_streams(clients, objective, static["carry"])
        step = self._step(algorithm, objective, _context(ctx, static), whole, clients if apart else 0)
        return lambda: _advance(step, static)

    def _compiles(self, static: dict[str, Any]) -> bool:
        """Whether to compile: as it was chosen, or where there are convolutions."""
        if self.compiled is not None:
            return self.compiled
        return any(leaf.dim() > 4 for leaf in tree_flatten(static["carry"])[0])

    def _step(
        self, algorithm: Algorithm, objective: Objective, ctx: Context, whole: bool, streams: int
    ) -> Callable[..., Any]:
        """The step of a whole block: every client in one of the streams, or all of them under ``vmap``."""
        one = vmap_kernel.step_of(algorithm, objective, ctx)
        return _in_streams(one, whole, streams) if streams else mapped_step(one, whole)


def mapped_step(one: Callable[..., Any], whole: bool) -> Callable[..., Any]:
    """The step of all clients under ``vmap``."""
    many = vmap(one, in_dims=(0, 0, 0, 0, None if whole else 0, 0, 0, 0))

    def call(carry: Any, buffers: Any, x: Tensor, y: Tensor, mask: Tensor, *rest: Any) -> Any:
        with ConvolutionsAsProducts():
            return many(carry, buffers, x, y, None if whole else mask, *rest)

    return call if whole else _keeping(call)


def compiled_step(
    algorithm: Algorithm,
    objective: Objective,
    ctx: Context,
    static: dict[str, Any],
    whole: bool,
    precision: Precision,
    *,
    compiles: bool = True,
) -> Callable[[], Tensor]:
    """The mapped step traced through its gradients, and compiled as one; it reads and writes the static buffers."""
    clients, device = len(static["mask"]), static["mask"].device
    values = {**static, "loss": torch.zeros(clients, dtype=floating(static["carry"]), device=device)}

    def advance(now: dict[str, Any]) -> dict[str, Any]:
        step = mapped_step(vmap_kernel.step_of(algorithm, objective, _context(ctx, now)), whole)
        given = (now[name] for name in ("carry", "buffers", "x", "y", "mask", "dropout", "inputs", "phase"))
        carry, buffers, loss = step(*given)
        return {"carry": carry, "buffers": buffers, "loss": loss.to(values["loss"].dtype)}

    with precise(precision):
        traced = trace(advance, values)
    leaves = tree_flatten(values)[0]
    with precise(precision), fastest_convolutions():
        traced = or_uncompiled(traced, leaves) if compiles else traced

    def call() -> Tensor:
        traced.advance(leaves)
        losses: Tensor = values["loss"]
        return losses

    return call


def _context(ctx: Context, static: dict[str, Any]) -> StepContext:
    return StepContext(**{**vars(ctx), "local_lr": static["lr"]})


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


def floating(carry: Any) -> torch.dtype:
    """The precision of the models; with a step size in another one, rounding would differ from the loop engine."""
    return next((leaf.dtype for leaf in tree_flatten(carry)[0] if leaf.is_floating_point()), torch.float32)


def _ready(batch: Tensor) -> Tensor:
    """The batch, pinned if it is not on the GPU, so that copying it does not block the steps in progress."""
    return batch if batch.is_cuda else batch.contiguous().pin_memory()
