"""Many clients at once: padded blocks under ``vmap``, or a fused kernel if the model and the solver allow it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from fedalloy.core import inputs, tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.applying import vmapped
from fedalloy.core.blocks import blocks, prepare
from fedalloy.core.contributions import Contributions
from fedalloy.core.errors import SpecError
from fedalloy.core.gathering import Gathering
from fedalloy.core.program import BlockTraining, Finished, Kernel, TrainingResult, run_block
from fedalloy.core.protocols import Engine, Objective, Outcome, Shared, Task
from fedalloy.core.registry import register
from fedalloy.core.types import Block, Cohort, Context, State, Work
from fedalloy.engines.kernels import fused, fused_interpolated, fused_mixed, fused_phases, fused_shifted, vmap_kernel
from fedalloy.engines.kernels.client_graphs import ClientGraphs, warn_mapped
from fedalloy.engines.kernels.conv_chain import Stages, stages_of
from fedalloy.engines.kernels.conv_graphs import ConvGraphs
from fedalloy.engines.kernels.cuda_graphs import CudaGraphs
from fedalloy.engines.kernels.fused_graph import FusedGraphs
from fedalloy.engines.kernels.layer_chain import chain_of
from fedalloy.engines.kinds import (
    interpolated_sgd_of,
    is_fusible,
    mixed_sgd_of,
    plain_sgd_of,
    shifted_sgd_of,
    two_phase_sgd_of,
)
from fedalloy.engines.loop import loop_like
from fedalloy.engines.precision import Precision, precise, products_in
from fedalloy.engines.profile import phase
from fedalloy.engines.shared_cohort import LentCohort

_is_cuda = attrgetter("is_cuda")
_LARGE_ROW = 1024
"""Numbers of a leaf of a client's state from which on it is copied out of its block; copies of smaller ones would take
longer than what they save is worth."""
_dense: Any = WeakIdKeyDictionary()
"""The dense layers of every objective looked up so far, by the name of its loss; None if its model has other layers.
Entries are removed with their objective."""
_stages: Any = WeakIdKeyDictionary()
"""The same for the stages of convolutional chains, by the name of the loss and the shape of an example."""


@register("engine", "batched")
@dataclass
class Batched(Engine):
    """Stacks clients into blocks. ``memory_mb`` limits a block's models and gradients (default: 1024, on a GPU 8192);
    ``block`` limits the number of its clients instead. ``kernel``: ``best`` uses a fused kernel on a CPU if there is
    one, ``fused`` uses only that, also on a GPU, ``mapped`` never does. On a GPU the step is captured in a CUDA graph;
    ``compiled`` applies only to it, ``precision`` also to steps that cannot be captured. There ``best`` takes clients
    one after another if the step of one is large; ``sequential`` always does, ``mapped`` never. ``compiled``: none
    compiles the steps of clients one after another and of models with convolutions, true those of all, false none. What
    cannot be captured runs without graphs, what cannot be batched in the loop engine, each after one warning.
    """

    memory_mb: float | None = None
    block: int | None = None
    kernel: Literal["best", "fused", "mapped", "sequential"] = "best"
    precision: Precision = "float32"
    compiled: bool | None = None
    _unbatchable: str = field(default="", repr=False)
    _uncaptured: str = field(default="", init=False, repr=False)
    _ended: bool = field(default=False, init=False, repr=False)
    _cuda_graphs: CudaGraphs | None = field(default=None, init=False, repr=False)
    _fused_graphs: FusedGraphs | None = field(default=None, repr=False)
    _conv_graphs: ConvGraphs | None = field(default=None, init=False, repr=False)
    _client_graphs: ClientGraphs | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if min(one for one in (self.memory_mb, self.block, 1) if one is not None) <= 0:
            raise SpecError(
                f"engine 'batched': memory_mb and block must be above 0, or none, got {self.memory_mb} and {self.block}"
            )

    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        if self._ended:
            self._unbatchable, self._uncaptured, self._ended = "", "", False
        if self._unbatchable:
            return loop_like(self)(algorithm, task, shared, states, work, ctx)
        with phase("data"):
            data = task.data("train", work.ids)
        try:
            most = self.block or self._most(algorithm, task.objective, shared, states, data)
            with torch.no_grad():
                like = algorithm.templates(shared)
                gathering = Gathering(work, exact=algorithm.exact_norms, like=like, storage=self.storage)
                kept: dict[int, State] = {}
                for some, rows in blocks(work, data, most):
                    done = self._run(algorithm, task, shared, states, some, rows, ctx)
                    if wrong := gathering.add(done.ids, done.payload, done.stats, done.notes):
                        return _refused(work, wrong)
                    if algorithm.stateful:
                        kept |= zip(done.ids.tolist(), _alone(done.states, len(done.ids)), strict=True)
                return Outcome(self._lent(gathering.cohort()), kept)
        except Exception as error:
            if _on_gpu(shared) and self._cuda_graphs is not None and not self._uncaptured:
                self._launch_one_by_one(error)
                return self(algorithm, task, shared, states, work, ctx)
            # Either vmap does not support the step, or a client fails: then the loop raises an error that names it.
            outcome = loop_like(self)(algorithm, task, shared, states, work, ctx)
            self._give_up(error)
            return outcome

    def close(self) -> None:
        """Another run may have a solver and a model that can be batched, and steps that can be captured. What was found
        in this one can be looked up until then."""
        self._ended = True

    def _most(
        self,
        algorithm: Algorithm,
        objective: Objective,
        shared: Shared,
        states: Mapping[int, State],
        data: Block | None = None,
    ) -> int:
        """How many clients fit into the memory: each needs four times the size of its model and state, for the values,
        their gradients and what the step keeps of them; on a convolutional chain also the patches of its batch. A
        frozen base is one copy for all, but the activations that pass through it are each client's own: they are
        estimated by its size. The interpolated kernel is limited by the cache instead."""
        if interpolated_sgd_of(algorithm) is not None and self._fused(algorithm, objective, shared) is not None:
            return fused_interpolated.clients_in_cache(shared["params"])
        kept = tree_leaves(next(iter(states.values()), {})) if algorithm.stateful else []
        own = sum(leaf.numel() * leaf.element_size() for leaf in kept if isinstance(leaf, Tensor))
        one = 4 * (sum([tree.nbytes(leaves) for leaves in shared.values()]) + own) + tree.nbytes(objective.frozen)
        stages = None if data is None else self._convolutional(algorithm, objective, shared, data)
        if data is not None and stages is not None:
            batch = min(getattr(algorithm.solver, "batch_size", None) or math.inf, int(data.size.max()))
            one += int(batch) * 8 * sum(stage.numbers() for stage in stages)
        budget = self.memory_mb or (8192.0 if _on_gpu(shared) else 1024.0)
        return max(1, int(budget * 1e6 / max(1, one)))

    def _lent(self, found: Contributions) -> Contributions:
        """The contributions, which refuse to be read after the next round if a graph's replay will overwrite them."""
        if self._conv_graphs is None or type(found) is not Cohort:
            return found
        made = found.ids, found.payload, found.stats, found.cross, found.noted
        return LentCohort(*made, owner=self._conv_graphs, made=self._conv_graphs.calls)

    def _launch_one_by_one(self, error: Exception) -> None:
        """Take the same steps without CUDA graphs from now on."""
        self._cuda_graphs, self._uncaptured = None, _reason(error)
        warnings.warn(
            f"local steps run without CUDA graphs, which is slower: {self._uncaptured}", RuntimeWarning, stacklevel=3
        )

    def _give_up(self, error: Exception) -> None:
        self._unbatchable = _reason(error)
        warnings.warn(
            f"this algorithm or model cannot be batched, continuing with the loop engine: {self._unbatchable}",
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
        kernel = self._kernel(algorithm, task.objective, shared, data)
        with phase("compute"):
            return run_block(algorithm, task.objective, shared, states, block, ctx, kernel, vmapped)

    def _kernel(self, algorithm: Algorithm, objective: Objective, shared: Shared, data: Block) -> Kernel:
        """The kernel for the local steps: a fused one if ``_fused`` finds layers; otherwise CUDA graphs on a GPU, and
        plain vmap on a CPU, or if batches must not be padded or have several lengths."""
        on_gpu = _on_gpu(shared)
        if on_gpu and self.compiled and find_spec("triton") is None:
            _warn_not_compiled()
        stages = self._convolutional(algorithm, objective, shared, data)
        if stages is not None:
            self._conv_graphs = self._conv_graphs or ConvGraphs(self.precision, self.compiled)
            return partial(self._conv_graphs.train, stages)
        layers = self._fused(algorithm, objective, shared)
        if layers is not None and not fused.accepts(layers, data, not objective.takes_integers):
            layers = None
        if layers is not None:
            dense = partial(self._dense_kernel(algorithm, on_gpu), layers)
            return partial(self._train_dense, dense) if on_gpu else dense
        whole = objective.needs_full_batches or objective.buckets is not None
        if whole and self.kernel == "sequential":
            warn_mapped("batches of its model must not be padded, or have several lengths")
        if not on_gpu and (whole or self.kernel != "sequential"):
            return vmap_kernel.train
        if whole or self._uncaptured:
            return self._train_uncaptured
        self._cuda_graphs = self._cuda_graphs or CudaGraphs(self.precision, self.compiled)
        mapped = self._cuda_graphs.train if on_gpu else vmap_kernel.train
        return self._one_by_one(mapped).train if self._suits_one_by_one(shared, data) else mapped

    def _dense_kernel(self, algorithm: Algorithm, on_gpu: bool) -> Callable[..., TrainingResult]:
        """The fused kernel for the local program on a chain of dense layers."""
        if two_phase_sgd_of(algorithm) is not None:
            return fused_phases.train
        if mixed_sgd_of(algorithm) is not None:
            return fused_mixed.train
        if shifted_sgd_of(algorithm) is not None:
            return fused_shifted.train
        if plain_sgd_of(algorithm) is None:
            return fused_interpolated.train
        if not on_gpu:
            return fused.train
        self._fused_graphs = self._fused_graphs or FusedGraphs()
        return self._fused_graphs.train

    def _train_dense(self, dense: Kernel, training: BlockTraining) -> TrainingResult:
        """A fused kernel on a GPU, whose products are in float32 or tf32: bf16 is tf32 there."""
        with products_in(self.precision):
            return dense(training)

    def _one_by_one(self, otherwise: Kernel) -> ClientGraphs:
        always = self.kernel == "sequential"
        self._client_graphs = self._client_graphs or ClientGraphs(otherwise, self.precision, self.compiled, always)
        return self._client_graphs

    def _suits_one_by_one(self, shared: Shared, data: Block) -> bool:
        """Whether clients may run one after another: it was chosen, or the model has convolutions, the only layers that
        are slower for many clients at once. Graphs read the examples themselves, so these must be with the models."""
        one = next(iter(shared["params"].values()))
        convolves = any(leaf.dim() > 2 for leaf in shared["params"].values())
        wanted, here = self.kernel == "sequential" or (self.kernel == "best" and convolves), one.device
        if self.kernel == "sequential" and inputs.device_of(data.y) != here:
            warn_mapped("examples are not on the device of the models")
        return wanted and inputs.device_of(data.y) == here

    def _convolutional(self, algorithm: Algorithm, objective: Objective, shared: Shared, data: Block) -> Stages | None:
        """The stages of a convolutional chain if there is a kernel for the local program; on a CPU, where ordinary
        convolutions are faster, only with kernel ``fused``."""
        chosen = self.kernel == "fused" or (self.kernel == "best" and _on_gpu(shared))
        if not chosen or shared["buffers"] or plain_sgd_of(algorithm) is None or not one_target(data):
            return None
        here = next(iter(shared["params"].values())).device
        return stages_for(objective, shared, data) if data.x.device == data.y.device == here else None

    def _train_uncaptured(self, training: BlockTraining) -> TrainingResult:
        """The steps of a graph without a graph, for models that cannot be captured and for batches that must not be
        padded."""
        with precise(self.precision):
            return vmap_kernel.train(training)

    def _fused(self, algorithm: Algorithm, objective: Objective, shared: Shared) -> tuple[fused.Dense, ...] | None:
        """The dense layers of the model if the local program can be fused; on a GPU only with kernel ``fused``."""
        plain = is_fusible(algorithm) and not shared["buffers"]
        chosen = self.kernel == "fused" or (self.kernel == "best" and not _on_gpu(shared))
        possible = plain and chosen
        layers = dense_of(objective, shared) if possible else None
        if self.kernel == "fused" and layers is None:
            raise ValueError("kernel 'fused' needs a chain of linear layers with plain local SGD and no buffers")
        return layers


def stages_for(objective: Objective, shared: Shared, data: Block) -> Stages | None:
    """The model as the stages of a convolutional chain, None if it is none; cached like ``dense_of``."""
    kept, loss, shape = _stages.setdefault(objective, {}), objective.loss_name, tuple(data.x.shape[1:])
    if (loss, shape) not in kept:
        kept[loss, shape] = stages_of(chain_of(objective, shared["params"]), shared["params"], loss, shape)
    stages: Stages | None = kept[loss, shape]
    return stages


def dense_of(objective: Objective, shared: Shared) -> tuple[fused.Dense, ...] | None:
    """The model as dense layers, None if it has others. Cached by objective, as tracing a module takes longer than a
    small round, and by loss, as an objective may get a method of its own after its first round."""
    kept, loss = _dense.setdefault(objective, {}), objective.loss_name
    if loss not in kept:
        kept[loss] = fused.dense_layers(chain_of(objective, shared["params"]), loss)
    layers: tuple[fused.Dense, ...] | None = kept[loss]
    return layers


def _alone(states: State, clients: int) -> list[State]:
    """Every client's state. A large leaf is copied: as a view it would keep those of the whole block in memory, until
    the last of its clients has another state."""
    alone = vmapped.unstack(states, clients)
    if clients == 1 or all(leaf.numel() < clients * _LARGE_ROW for leaf in tree_leaves(states)):
        return alone
    return [tree_map(_apart, state) for state in alone]


def _apart(leaf: Tensor) -> Tensor:
    shares = leaf.numel() >= _LARGE_ROW and leaf.untyped_storage().nbytes() > leaf.nbytes
    return leaf.clone() if shares else leaf


def _reason(error: Exception) -> str:
    """The first line of an error."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _refused(work: Work, reason: str) -> Outcome:
    """A round without contributions, because the clients do not send what the solver declares."""
    return Outcome(Cohort(work.ids[:0], {}, {}), {}, dict.fromkeys(work.ids.tolist(), reason))


def one_target(data: Block) -> bool:
    """Whether examples are tensors with one target each, as the fused kernels need them."""
    return isinstance(data.x, Tensor) and isinstance(data.y, Tensor) and data.y.dim() == 1


@cache
def _warn_not_compiled() -> None:
    """Say once that what was asked for is not possible here."""
    warnings.warn(
        "engine 'batched': compiled = true, but Triton is not installed, so local steps run uncompiled; torch's CUDA "
        "builds bring it along, and compiled = false asks for no compiler",
        RuntimeWarning,
        stacklevel=2,
    )


def _on_gpu(shared: Shared) -> bool:
    return any(map(_is_cuda, shared["params"].values()))
