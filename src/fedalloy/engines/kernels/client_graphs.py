"""Clients one after another on a GPU: one client's step as a CUDA graph, replayed for all its steps, then the next.

Large convolutions fill a GPU with the batch of one client, and run faster as they are than as the grouped convolutions
that ``vmap`` makes of many clients' convolutions. A graph reads its batch from the pool of examples and counts its own
steps, so that a step is one launch. Smaller steps run in several lanes: each has its own graph, buffers and stream, and
takes clients from a queue, so no client waits for another with more steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from fedalloy.core import inputs
from fedalloy.core.blocks import summed_losses
from fedalloy.core.program import BlockTraining, Kernel, TrainingResult
from fedalloy.core.wide import widest
from fedalloy.engines.kernels import vmap_kernel
from fedalloy.engines.kernels.cuda_graphs import StepContext, floating
from fedalloy.engines.kernels.filling import fill
from fedalloy.engines.kernels.tracing import TracedStep, Values, can_compile, or_uncompiled, trace
from fedalloy.engines.precision import Precision, fastest_convolutions, precise

DIFFERENTIABLE = False
LARGE_STEP = 5e9
"""From this many floating-point operations in a client's step on, clients run one after another."""
FULL_STEP = 1e11
"""A step with so many fills the GPU, except while its small kernels run; smaller ones share it in several lanes."""
LEAST_LANES, MOST_LANES = 2, 8
_WARM_UPS = 3


@dataclass
class ClientGraphs:
    """Lanes by shape. ``train`` does what ``vmap_kernel.train`` does; blocks whose steps are small, and those that
    cannot be traced, go to ``otherwise``. ``always`` does not look at the size. ``compiled``: None compiles if it is
    possible."""

    otherwise: Kernel
    precision: Precision = "float32"
    compiled: bool | None = None
    always: bool = False
    _lanes: dict[tuple[Any, ...], list[Lane]] = field(default_factory=dict, repr=False)

    def train(self, training: BlockTraining) -> TrainingResult:
        """All steps of all clients of a block."""
        if not training.block.running:
            return self.otherwise(training)
        key = _signature(training)
        if key not in self._lanes:
            self._lanes[key] = self._make(training, _values(training))
        lanes = self._lanes[key]
        # A graph reads the examples at their address: those that are read again in every round would need a new one.
        if lanes and lanes[0].pool == _addresses(_pool(training)):
            return run(lanes, training)
        if self.always:
            warn_mapped("examples are read again in every round, and graphs read them where they were")
        return self.otherwise(training)

    def _make(self, training: BlockTraining, values: Values) -> list[Lane]:
        """The lanes for blocks of this shape; none if the clients should rather be mapped."""
        try:
            with precise(self.precision):
                step = trace(_advance(training), values)
        except Exception as error:  # whatever a step does that has no graph
            if self.always:
                raise
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"clients do not run one after another on the GPU: {reason}", RuntimeWarning, stacklevel=2)
            return []
        flops = step.flops(tree_flatten(values)[0])
        if flops < LARGE_STEP and not self.always:
            return []
        if self.compiled is not False and can_compile(training.device):
            with precise(self.precision), fastest_convolutions():
                step = or_uncompiled(step, tree_flatten(values)[0])
        count = min(lanes_for(flops), len(training.block))
        owners = training.algorithm, training.objective, training.block.data
        return [Lane(step, values, self.precision, owners) for _ in range(count)]


@cache
def warn_mapped(reason: str) -> None:
    """Say once per reason that clients do not run one after another although that was asked for."""
    warnings.warn(f"kernel 'sequential' takes clients at once: {reason}", RuntimeWarning, stacklevel=3)


class Lane:
    """The values of one client at a time and the step on them, captured if they are on a GPU. ``owners`` are kept alive
    because their ids are in the key of the lanes, and the graph reads the pool of examples."""

    def __init__(self, step: TracedStep, values: Values, precision: Precision, owners: tuple[Any, ...]) -> None:
        self.owners, self.step, self.precision = owners, step, precision
        own = {name: tree for name, tree in values.items() if name != "pool"}
        self.values: Values = {**tree_map(lambda leaf: leaf.clone().contiguous(), own), "pool": values["pool"]}
        self.values = {name: self.values[name] for name in values}
        self.leaves: list[Tensor] = tree_flatten(self.values)[0]
        self.pool = _addresses(values["pool"])
        self.stream = torch.cuda.Stream() if self.values["at"].is_cuda else None
        self.graph = self._captured() if self.stream is not None else None

    def load(self, given: Values, lr: float) -> None:
        """Begin with another client: its first values, its batches and its draws."""
        with self.active():
            for name, leaf in given["plan"].items():
                fill(tree_map(lambda kept, new: kept[: len(new)], self.values["plan"][name], leaf), leaf)
            first = {name: given[name] for name in ("carry", "buffers")}
            fill({name: self.values[name] for name in first}, first)
            self.values["at"].zero_()
            self.values["loss"].zero_()
            self.values["lr"].fill_(lr)

    def advance(self) -> None:
        """One step."""
        with self.active():
            if self.graph is not None:
                self.graph.replay()
            else:
                self.step.advance(self.leaves)

    def store(self, into: Values) -> None:
        """Copy the client's results out."""
        with self.active():
            fill(into, {name: self.values[name] for name in into})

    def active(self) -> AbstractContextManager[Any]:
        """Work on this lane's stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _captured(self) -> torch.cuda.CUDAGraph:
        """Warm up and record, on the lane's own stream: libraries keep one workspace per stream, and lanes that shared
        it would overwrite each other's."""
        assert self.stream is not None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream), precise(self.precision), fastest_convolutions():
            for _ in range(_WARM_UPS):
                self.values["at"].zero_()
                self.step.advance(self.leaves)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream), precise(self.precision), fastest_convolutions():
            self.step.advance(self.leaves)
        return graph


def run(lanes: list[Lane], training: BlockTraining) -> TrainingResult:
    """Take every step of every client of a block."""
    block, device = training.block, training.device
    steps, plan = block.taken.tolist(), _plan(training)
    first = {"carry": training.carry, "buffers": training.buffers}
    loss = torch.zeros(len(block), 2, dtype=widest(device), device=device)
    results = {**tree_map(lambda leaf: leaf.clone(memory_format=torch.contiguous_format), first), "loss": loss}
    _join(lanes, begin=True)
    queues = [
        _work(lane, clients, steps, {**first, "plan": plan}, results, training.ctx.local_lr)
        for lane, clients in zip(lanes, shares(steps, len(lanes)), strict=True)
    ]
    while queues:  # one step of every lane in turn
        queues = [queue for queue in queues if next(queue, False)]
    _join(lanes, begin=False)
    return TrainingResult(results["carry"], results["buffers"], loss)


def lanes_for(flops: float) -> int:
    """How many clients' steps run at the same time.

    >>> lanes_for(3.6e11), lanes_for(2.7e10), lanes_for(5e9)
    (2, 4, 8)
    """
    return max(LEAST_LANES, min(MOST_LANES, round(FULL_STEP / max(1.0, flops))))


def shares(steps: list[int], lanes: int) -> list[list[int]]:
    """The clients of every lane, each given to the lane with the fewest steps so far, longest first.

    >>> shares([5, 4, 2, 2, 0], 2)
    [[0, 3], [1, 2]]
    """
    queues: list[list[int]] = [[] for _ in range(lanes)]
    total = [0] * lanes
    for client in sorted(range(len(steps)), key=lambda one: -steps[one]):
        if steps[client]:
            lane = total.index(min(total))
            queues[lane].append(client)
            total[lane] += steps[client]
    return queues


def _work(
    lane: Lane, clients: list[int], steps: list[int], given: Values, results: Values, lr: float
) -> Iterator[bool]:
    """A lane's work, one step at a time."""
    for client in clients:
        lane.load(tree_map(lambda leaf, row=client: leaf[row], given), lr)
        for _ in range(steps[client]):
            lane.advance()
            yield True
        lane.store(tree_map(lambda leaf, row=client: leaf[row], results))


def _join(lanes: list[Lane], *, begin: bool) -> None:
    """Let the lanes wait for what was computed before them, or what follows wait for the lanes."""
    for lane in lanes:
        if lane.stream is not None:
            main = torch.cuda.current_stream()
            (lane.stream.wait_stream(main) if begin else main.wait_stream(lane.stream))


def _values(training: BlockTraining) -> Values:
    """The values of a step, those of the first client; ``plan`` holds those of all its steps, with space for more."""
    first = tree_map(lambda leaf: leaf[0], {"carry": training.carry, "buffers": training.buffers})
    plan, device = tree_map(lambda leaf: leaf[0], _plan(training)), training.device
    return {
        **first,
        "loss": torch.zeros(2, dtype=widest(device), device=device),
        "at": torch.zeros(1, dtype=torch.int64, device=device),
        "lr": torch.tensor(training.ctx.local_lr, device=device, dtype=floating(training.carry)),
        "plan": tree_map(lambda leaf: leaf.new_zeros(_capacity(training), *leaf.shape[1:]), plan),
        "pool": _pool(training),
    }


def _capacity(training: BlockTraining) -> int:
    """For how many steps a lane has space: the next power of two, so that few graphs serve all numbers."""
    return 1 << max(0, len(training.block.running) - 1).bit_length()


def _pool(training: BlockTraining) -> tuple[Any, Any]:
    """The examples that a graph reads."""
    return training.block.data.x, training.block.data.y


def _plan(training: BlockTraining) -> Values:
    """What is different in every step, ``[C, S, ...]``, on the device of the models."""
    block, device = training.block, training.device
    steps = len(block.running)
    every = {
        "rows": block.rows.transpose(0, 1), "mask": block.mask.transpose(0, 1), "dropout": block.dropout_keys(),
        "phase": block.plan.phase, "draws": block.draws,
    }  # fmt: skip
    moved: Values = tree_map(lambda leaf: leaf[:, :steps].to(device, non_blocking=True), every)
    return moved


def _advance(training: BlockTraining) -> Callable[[Values], Values]:
    """One step of one client as a function of its values."""
    algorithm, objective, ctx = training.algorithm, training.objective, training.ctx
    whole = all(training.block.full)

    def advance(values: Values) -> Values:
        at = values["at"]
        now = tree_map(lambda leaf: leaf.index_select(0, at).squeeze(0), values["plan"])
        x, y = (inputs.each(lambda leaf: leaf.index_select(0, now["rows"]), part) for part in values["pool"])
        # The step size is a value too, so that a schedule needs no new capture.
        one = vmap_kernel.step_of(algorithm, objective, StepContext(**{**vars(ctx), "local_lr": values["lr"]}))
        carry, buffers, loss = one(
            values["carry"], values["buffers"], x, y, None if whole else now["mask"],
            now["dropout"], now["draws"], now["phase"],
        )  # fmt: skip
        counts = None if isinstance(y, Tensor) and y.dim() == 1 else objective.counts(y)
        seen = (now["mask"] if counts is None else counts * now["mask"]).sum().reshape(1)
        summed = values["loss"] + summed_losses(loss.reshape(1), seen)[0]
        return {"carry": carry, "buffers": buffers, "loss": summed, "at": at + 1}

    return advance


def _signature(training: BlockTraining) -> tuple[Any, ...]:
    """What is fixed in a graph besides the address of the examples: program, model, whether batches are full, shapes.
    The number of examples is not: other numbers mean another address."""
    block = training.block
    leaves, structure = tree_flatten((training.carry, training.buffers))
    shapes = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
    drawn = [(name, leaf.shape[2:], leaf.dtype) for name, leaf in block.draws.items()]
    sizes = _capacity(training), block.rows.shape[2], all(block.full)
    return id(training.algorithm), id(training.objective), *sizes, str(structure), *shapes, *drawn


def _addresses(pool: tuple[Any, Any]) -> tuple[tuple[int, torch.Size], ...]:
    """Where the examples are, and how many."""
    return tuple((leaf.data_ptr(), leaf.shape) for part in pool for leaf in inputs.leaves(part))
