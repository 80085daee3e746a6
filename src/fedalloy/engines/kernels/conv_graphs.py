"""All steps of a block on a convolutional chain as one CUDA graph, replayed in every round."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.contributions import Notes
from fedalloy.core.factors import FactoredTree
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.core.protocols import ElementWeighting
from fedalloy.core.types import Tree
from fedalloy.engines.kernels.client_conv import has_kernels
from fedalloy.engines.kernels.conv_chain import Stages
from fedalloy.engines.kernels.conv_kernel import ConvSgd
from fedalloy.engines.kernels.conv_sgd import Batches, descend
from fedalloy.engines.kernels.filling import fill
from fedalloy.engines.kernels.fused_graph import agree
from fedalloy.engines.kernels.tracing import Fuser, can_compile, warn_uncompiled
from fedalloy.engines.kinds import plain_sgd_of
from fedalloy.engines.precision import Precision, products_in

DIFFERENTIABLE = False
Result = tuple[Mapping[str, Tensor], Tensor, Tensor]
"""The clients' updates, the sums of their losses, and what ``Notes.measure`` finds in the updates."""
IMPLICIT = True
MOST_GRAPHS = 8
"""Rounds whose numbers of steps differ need a graph each; if there are more, further ones run without."""


@dataclass(frozen=True)
class CapturedRound:
    """A graph, what it reads and what it writes. The pool of examples is in ``batches``, kept alive because its address
    is in the graph's key."""

    graph: torch.cuda.CUDAGraph
    params: Tree
    batches: Batches
    lr: Tensor
    result: Result

    def replay(self, params: Tree, batches: Batches, lr: float) -> Result:
        """Train from these parameters on these batches. The result is overwritten by the next replay."""
        fill(self.params, params)
        mine, given = self.batches, batches
        fill([mine.rows, mine.mask, mine.seen], [given.rows, given.mask, given.seen])
        self.lr.fill_(lr)
        self.graph.replay()
        deltas, totals, measured = self.result
        # A new tree: the last round's may have been multiplied out.
        return (FactoredTree(deltas.stored) if isinstance(deltas, FactoredTree) else deltas), totals, measured


@dataclass
class ConvGraphs:
    """Captured rounds by shape; ``train`` does what the loop does for plain SGD on a convolutional chain. Without a GPU
    nothing is captured, and without Triton nothing compiled."""

    precision: Precision = "float32"
    compiled: bool | None = None
    _captured: dict[tuple[Any, ...], CapturedRound] = field(default_factory=dict, repr=False)
    _fusing: Fuser | None = field(default=None, repr=False)
    _given_up: bool = False
    calls: int = field(default=0, init=False, repr=False)
    """How many blocks were trained: a replay overwrites what an earlier one returned."""

    def train(self, stages: Stages, training: BlockTraining) -> TrainingResult:
        """The kernel, for a model of these stages and a solver that declares plain descent."""
        params, lr = training.shared["params"], training.ctx.local_lr
        self.calls += 1
        kernel = self._kernel(stages, training)
        batches = Batches.of(training.block, everybody=kernel.is_still)
        with products_in(self.precision):
            deltas, loss_sum, lengths = self.descend(kernel, params, batches, lr)
        sent = {"delta": cast(Tree, deltas)}
        return TrainingResult({}, {}, loss_sum, sent=sent, notes=Notes.read(sent, lengths, exact=kernel.exact_norms))

    def descend(self, kernel: ConvSgd, params: Tree, batches: Batches, lr: float) -> Result:
        """The same result as ``conv_sgd.descend``, from a graph where possible."""
        key = signature(kernel, params, batches, lr)
        if key in self._captured:
            return self._captured[key].replay(params, batches, lr)
        expected = self._compiled_or_not(kernel, params, batches, lr)
        # Examples that are read again in every round would need a new graph in each.
        elsewhere = any(kept[:-1] == key[:-1] for kept in self._captured)
        if not _is_on_gpu(batches) or self._given_up or elsewhere or len(self._captured) >= MOST_GRAPHS:
            return expected
        try:
            known = replace(kernel, fusing=self._fusing or kernel.fusing)
            self._captured[key] = _capture(known, params, batches, lr)
            found = self._captured[key].replay(params, batches, lr)
            problem = "" if agree(found[:2], expected[:2]) else "its first replay differs from the kernel"
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        if problem:
            self._given_up = True
            self._captured.clear()
            warnings.warn(f"no CUDA graph of convolutional training: {problem}", RuntimeWarning, stacklevel=2)
        return expected

    def _kernel(self, stages: Stages, training: BlockTraining) -> ConvSgd:
        sgd = plain_sgd_of(training.algorithm)
        assert sgd is not None
        if self._fusing is None:
            self._fusing = Fuser(self.compiled is not False and can_compile(training.device))
        loss, factored = training.objective.loss_name or "", may_be_factored(training.algorithm)
        kind = factored, self._implicit(training), training.algorithm.exact_norms
        return ConvSgd(stages, loss, sgd, self.precision, self._fusing, *kind)

    def _implicit(self, training: BlockTraining) -> bool:
        """Whether patches are never stored. In float32 torch's products of stored patches are faster; in float64 the
        kernels are compared with the loop."""
        exact = next(iter(training.shared["params"].values())).dtype == torch.float64
        return IMPLICIT and has_kernels(training.device) and (exact or self.precision != "float32")

    def _compiled_or_not(self, kernel: ConvSgd, params: Tree, batches: Batches, lr: float) -> Result:
        """Without a graph; if compiling fails, uncompiled from then on, after a warning."""
        try:
            return measured(kernel, params, batches, lr)
        except Exception as error:  # the compiler has errors of many classes
            if not kernel.fusing.compiled:
                raise
            warn_uncompiled(error)
            self._fusing = Fuser(compiled=False)
            return measured(replace(kernel, fusing=self._fusing), params, batches, lr)


def measured(kernel: ConvSgd, params: Tree, batches: Batches, lr: Tensor | float) -> Result:
    """All steps, and what the server must know of the updates, so that a graph has both. Lengths are not products to
    be computed in a lower precision."""
    deltas, totals = descend(kernel, params, batches, lr)
    with products_in("float32"):
        return deltas, totals, Notes.measure({"delta": deltas}, exact=kernel.exact_norms)


def may_be_factored(algorithm: Algorithm) -> bool:
    """Whether updates may stay factors: nothing but norms and weighted sums is asked about them."""
    read = algorithm.wire or "accuracy_after" in algorithm.requires or algorithm.weighting.asks - {"norms"}
    return not read and not isinstance(algorithm.weighting, ElementWeighting)


def _is_on_gpu(batches: Batches) -> bool:
    """Whether there is something to capture."""
    return batches.rows.is_cuda and bool(batches.running)


def signature(kernel: ConvSgd, params: Tree, batches: Batches, lr: float) -> tuple[Any, ...]:
    """What is fixed in a graph: stages, loss, SGD settings, steps, clients, shapes, address of the data; and the step
    size, if it is more than a factor of the gradient. The address comes last."""
    shapes = tuple((name, leaf.shape, leaf.dtype) for name, leaf in params.items())
    data = (batches.x.data_ptr(), batches.y.data_ptr(), batches.x.shape)
    size = lr if kernel.sgd.weight_decay or kernel.sgd.pull else None
    fixed = kernel.stages, kernel.loss, kernel.sgd, kernel.factored, kernel.implicit, kernel.exact_norms, shapes
    return *fixed, batches.running, batches.rows.shape, size, data


def _capture(kernel: ConvSgd, params: Tree, batches: Batches, lr: float) -> CapturedRound:
    """Record one block on separate buffers, after the warm-up on a side stream that capturing requires."""
    static = {name: leaf.clone() for name, leaf in params.items()}
    own = replace(batches, rows=batches.rows.clone(), mask=batches.mask.clone(), seen=batches.seen.clone())
    size = torch.tensor(lr, device=batches.rows.device, dtype=next(iter(params.values())).dtype)
    fixed = kernel.sgd.weight_decay or kernel.sgd.pull
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        measured(kernel, static, own, lr if fixed else size)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = measured(kernel, static, own, lr if fixed else size)
    return CapturedRound(graph, static, own, size, result)
