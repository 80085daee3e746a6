"""Many clients at once: padded blocks under ``vmap``, or a fused kernel where the model and the solver allow it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import SpecError
from fedalloy.core.packing import bytes_up
from fedalloy.core.protocols import Engine, Objective, Outcome, Shared, Task
from fedalloy.core.registry import register
from fedalloy.core.types import Block, Cohort, Context, Examples, Payload, State, Stats, Tree, Work
from fedalloy.engines import fused, fused_mixture, mapped
from fedalloy.engines.blocks import Prepared, blocks, prepare
from fedalloy.engines.chain import chain_of
from fedalloy.engines.fused_graph import FusedGraphs
from fedalloy.engines.graphs import Graphs, Precision
from fedalloy.engines.loop import Loop
from fedalloy.engines.mapped import Trained
from fedalloy.engines.profile import phase

Kernel = Literal["best", "fused", "mapped"]
Trainer = Callable[[Algorithm, Objective, Shared, State, Prepared, Context], Trained]
_dense: Any = WeakIdKeyDictionary()
"""The dense layers of the objectives met so far, None for those that are more than that; gone with the objective."""


@dataclass(frozen=True)
class Finished:
    """One block's result, in the block's own order."""

    ids: Tensor
    payload: Payload
    stats: Stats
    states: State


@register("engine", "batched")
@dataclass
class Batched(Engine):
    """Clients stacked into blocks. ``memory_mb`` bounds a block's models and gradients; ``kernel = "mapped"`` never
    fuses. On a GPU the step is captured in a CUDA graph; ``precision`` and ``compiled`` apply there. What cannot be
    batched runs in the loop engine, after one warning.
    """

    memory_mb: float | None = None
    block: int | None = None
    kernel: Kernel = "best"
    precision: Precision = "float32"
    compiled: bool = False
    _unbatchable: str = field(default="", repr=False)
    _graphs: Graphs | None = field(default=None, repr=False)
    _fused_graphs: FusedGraphs = field(default_factory=FusedGraphs, repr=False)

    def __post_init__(self) -> None:
        if min(one for one in (self.memory_mb, self.block, 1) if one is not None) <= 0:
            raise SpecError(
                f"engine 'batched': memory_mb and block must be above 0, or none, got {self.memory_mb} and {self.block}"
            )

    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        if self._unbatchable:
            return Loop()(algorithm, task, shared, states, work, ctx)
        with phase("data"):
            data = task.data("train", work.ids)
        try:
            most = self.block or self._most(algorithm, task.objective, shared, states)
            with torch.no_grad():
                done = [
                    self._run(algorithm, task, shared, states, some, rows, ctx)
                    for some, rows in blocks(work, data, most)
                ]
        except Exception as error:
            # The loop tells whether it was the batching or the client: a client's error comes back with its name.
            outcome = Loop()(algorithm, task, shared, states, work, ctx)
            self._give_up(error)
            return outcome
        return _join(done, algorithm)

    def _most(self, algorithm: Algorithm, objective: Objective, shared: Shared, states: Mapping[int, State]) -> int:
        """How many clients fit: a model, what the client keeps, their gradients and what the step keeps of them."""
        if algorithm.solver.mixture is not None and self._fused(algorithm, objective, shared) is not None:
            return fused_mixture.clients_in_cache(shared["params"])
        kept = tree_leaves(next(iter(states.values()), {}))
        own = sum(leaf.numel() * leaf.element_size() for leaf in kept if isinstance(leaf, Tensor))
        one = 4 * (sum(tree.nbytes(leaves) for leaves in shared.values()) + own)
        budget = self.memory_mb or (8192.0 if _on_gpu(shared) else 1024.0)
        return max(1, int(budget * 1e6 / max(1, one)))

    def _give_up(self, error: Exception) -> None:
        self._unbatchable = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        warnings.warn(
            f"this algorithm or model cannot be batched, going on with the loop engine: {self._unbatchable}",
            RuntimeWarning,
            stacklevel=3,
        )

    def _run(
        self,
        algorithm: Algorithm,
        task: Task,
        shared: Shared,
        states: Mapping[int, State],
        work: Work,
        data: Block,
        ctx: Context,
    ) -> Finished:
        with phase("plan"):
            block = prepare(algorithm, work, data, shared, ctx)
        layers = self._fused(algorithm, task.objective, shared)
        with phase("compute"):
            if layers is not None and algorithm.solver.descent is not None:
                train_fused = partial(self._fused_graphs.train, layers)
                return _fused_block(train_fused, algorithm, task.objective, shared, states, block, ctx)
            mixed = None if layers is None else partial(fused_mixture.train, layers)
            train = mixed or self._trainer(task.objective, shared)
            return _mapped_block(train, algorithm, task.objective, shared, states, block, ctx)

    def _trainer(self, objective: Objective, shared: Shared) -> Trainer:
        """Graphs on a GPU, plain vmap elsewhere and where batches must not be padded."""
        if not _on_gpu(shared) or objective.needs_full_batches:
            return mapped.train
        self._graphs = self._graphs or Graphs(self.precision, self.compiled)
        return self._graphs.train

    def _fused(self, algorithm: Algorithm, objective: Objective, shared: Shared) -> tuple[fused.Dense, ...] | None:
        """The dense layers of the model when the whole local program can be fused."""
        plain = is_fusible(algorithm) and not shared["buffers"]
        possible = plain and self.kernel != "mapped" and (self.kernel == "fused" or not _on_gpu(shared))
        layers = dense_of(objective, shared) if possible else None
        if self.kernel == "fused" and layers is None:
            raise ValueError("kernel 'fused' needs a chain of linear layers with plain local SGD and no buffers")
        return layers


def is_fusible(algorithm: Algorithm) -> bool:
    """Whether there is a fused kernel for what the clients do."""
    return algorithm.solver.descent is not None or algorithm.solver.mixture is not None


def dense_of(objective: Objective, shared: Shared) -> tuple[fused.Dense, ...] | None:
    """The model as dense layers, if it is nothing else. Looked up once per objective: tracing a module costs more
    than a small round."""
    if objective not in _dense:
        _dense[objective] = fused.dense_layers(chain_of(objective, shared["params"]), objective.loss_name)
    layers: tuple[fused.Dense, ...] | None = _dense[objective]
    return layers


def _fused_block(
    train: Callable[..., tuple[Tree, Tensor]],
    algorithm: Algorithm,
    objective: Objective,
    shared: Shared,
    states: Mapping[int, State],
    block: Prepared,
    ctx: Context,
) -> Finished:
    descent, loss = algorithm.solver.descent, objective.loss_name or ""
    assert descent is not None
    before = _before(algorithm, objective, shared, block, {})
    delta, loss_sum = train(loss, descent, shared["params"], block, ctx)
    if "accuracy_after" in algorithm.weighting.requires:
        trained = {name: leaf + shared["params"][name] for name, leaf in delta.items()}
        before["accuracy_after"] = _own_mean(objective, objective.hits, trained, {}, block)
    kept = _stack_wire(states, block) if algorithm.wire else {}
    payload, kept = mapped.encode(algorithm, shared, {"delta": delta}, kept, block)
    stats = {**_stats(algorithm, block, loss_sum, ctx), **before}
    return _finished(algorithm, block, payload, stats, {"solver": {}, "wire": kept})


def _mapped_block(
    train: Trainer,
    algorithm: Algorithm,
    objective: Objective,
    shared: Shared,
    states: Mapping[int, State],
    block: Prepared,
    ctx: Context,
) -> Finished:
    mine = stack_states([states[client] for client in block.work.ids.tolist()])
    before = _before(algorithm, objective, shared, block, mine["solver"])
    trained = train(algorithm, objective, shared, mine["solver"], block, ctx)
    if "accuracy_after" in algorithm.weighting.requires:
        model = algorithm.solver.trained(trained.carry)
        before["accuracy_after"] = _own_mean(objective, objective.hits, model, trained.buffers, block)
    steps = torch.where(block.work.active, block.planned, 0).double().to(mapped.device_of(shared))
    payload, solver_state = mapped.finish(algorithm, objective, shared, mine["solver"], trained, steps, ctx)
    if shared["buffers"]:
        payload = {**payload, "buffers": algorithm.solver.stays.split(trained.buffers)[1]}
        solver_state = algorithm.solver.settle(solver_state, trained.buffers)
    payload, kept = mapped.encode(algorithm, shared, payload, mine["wire"], block)
    stats = {**_stats(algorithm, block, trained.loss_sum, ctx), **before}
    return _finished(algorithm, block, payload, stats, {"solver": solver_state, "wire": kept})


def _finished(algorithm: Algorithm, block: Prepared, payload: Payload, stats: Stats, states: State) -> Finished:
    sent = bytes_up(payload, algorithm.packings, len(block))
    return Finished(block.work.ids, payload, {**stats, "bytes_up": sent}, states)


def _stats(algorithm: Algorithm, block: Prepared, loss_sum: Tensor, ctx: Context) -> Stats:
    seen = block.mask.sum((0, 2)).cpu() * block.work.active
    planned, requires = block.planned.double(), algorithm.weighting.requires
    per_example, per_batch = loss_sum.cpu().unbind(1)
    return {
        "num_examples": block.data.size.cpu().double(),
        "num_steps": planned,
        "train_loss": per_example / seen,
        **({"running_loss": per_batch} if "running_loss" in requires else {}),
        **(algorithm.solver.describe(planned, ctx) if requires & algorithm.solver.provides else {}),
    }


def _before(algorithm: Algorithm, objective: Objective, shared: Shared, block: Prepared, mine: State) -> Stats:
    """The received model's mean loss at every client: one model, so one pass over all their examples, unless clients
    put leaves of their own into it."""
    if "loss_before" not in algorithm.weighting.requires:
        return {}
    if algorithm.solver.stays:
        models, buffers = mapped.first_models(algorithm, shared, mine, len(block))
        return {"loss_before": _own_mean(objective, objective.losses, models, buffers, block)}
    owner = torch.repeat_interleave(block.data.size.cpu())
    total = torch.zeros(len(block), dtype=torch.float64)
    pool = _own_examples(block, owner, mapped.device_of(shared))
    params, buffers = shared[algorithm.solver.target], shared["buffers"]
    for x, y, who in zip(pool.x.split(4096), pool.y.split(4096), owner.split(4096), strict=True):
        losses = objective.losses(objective.outputs(params, buffers, x), y)
        total.index_add_(0, who, losses.double().cpu())
    return {"loss_before": total / block.data.size.cpu()}


def _own_examples(block: Prepared, owner: Tensor, device: torch.device) -> Examples:
    size, start = block.data.size.cpu(), block.data.start.cpu()
    rows = start[owner] + torch.arange(len(owner)) - (size.cumsum(0) - size)[owner]
    rows = rows.to(block.data.y.device)
    return Examples(block.data.x[rows].to(device), block.data.y[rows].to(device))


def _own_mean(
    objective: Objective, score: Callable[[Tensor, Tensor], Tensor], models: Tree, buffers: Tree, block: Prepared
) -> Tensor:
    """The mean score of every client's own model over its own training examples."""
    size, start = block.data.size.cpu(), block.data.start.cpu()
    total = torch.zeros(len(block), dtype=torch.float64)
    outputs = vmap(objective.outputs)
    for begin in range(0, int(size.max()), 512):
        place = torch.arange(begin, min(begin + 512, int(size.max())))
        valid = place < size.unsqueeze(1)
        rows = torch.where(valid, start.unsqueeze(1) + place, 0).to(block.data.y.device)
        device = next(iter(models.values())).device
        x, y = block.data.x[rows].to(device), block.data.y[rows].to(device)
        values = vmap(score)(outputs(models, buffers, x), y)
        total += (values.cpu().double() * valid).sum(1)
    return total / size


def stack_states(states: list[State]) -> State:
    """One stacked state from one per client; plain scalars cannot be stacked and are refused."""
    first = states[0]
    if not any(True for _ in _leaves(first)):
        return first
    stacked: State = tree_map(lambda *leaves: torch.stack(leaves), first, *states[1:])
    return stacked


def unstack_states(stacked: State, clients: int) -> list[State]:
    """One state per client from a stacked one."""
    return [tree_map(lambda leaf, row=row: leaf[row], stacked) for row in range(clients)]


def _leaves(state: Any) -> Any:
    if isinstance(state, dict):
        for value in state.values():
            yield from _leaves(value)
    else:
        yield state


def _stack_wire(states: Mapping[int, State], block: Prepared) -> State:
    return stack_states([states[client]["wire"] for client in block.work.ids.tolist()])


def _join(done: list[Finished], algorithm: Algorithm) -> Outcome:
    """All blocks together, sorted by id."""
    ids = torch.cat([block.ids for block in done])
    if len(done) == 1 and bool((ids[1:] > ids[:-1]).all()):
        cohort = Cohort(ids, done[0].payload, done[0].stats)
    else:
        order = ids.argsort()
        payload = {
            part: {name: _arranged([block.payload[part][name] for block in done], order) for name in leaves}
            for part, leaves in done[0].payload.items()
        }
        stats = {name: _arranged([block.stats[name] for block in done], order) for name in done[0].stats}
        cohort = Cohort(ids[order], payload, stats)
    states: dict[int, State] = {}
    if algorithm.stateful:
        for block in done:
            states |= zip(block.ids.tolist(), unstack_states(block.states, len(block.ids)), strict=True)
    return Outcome(cohort, states)


def _arranged(leaves: list[Tensor], order: Tensor) -> Tensor:
    return torch.cat(leaves)[order.to(leaves[0].device)]


def _on_gpu(shared: Shared) -> bool:
    return any(leaf.is_cuda for leaf in shared["params"].values())
