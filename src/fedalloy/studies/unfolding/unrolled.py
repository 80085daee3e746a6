"""The problem that is unrolled: the algorithm, its clients (or a part of their examples), their devices, the rounds
of one outer iteration, and the loss for the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from fedalloy.core import aspects, inputs, tree
from fedalloy.core.algorithm import Algorithm, ServerState
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.fraction import fractions_of
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart, Objective, Task, Weighting
from fedalloy.core.task import TaskWrapper
from fedalloy.core.types import Block, Context, Contributions, Info, State, Tree, Weights, Work
from fedalloy.engines.kinds import PlainSgd, plain_sgd_of
from fedalloy.methods.weightings.nova import Nova
from fedalloy.methods.weightings.samples import Samples
from fedalloy.methods.weightings.unfolded import Unfolded, requirements, weights_of
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.studies.unfolding.recording import Recording
from fedalloy.studies.unfolding.settings import Learning
from fedalloy.tasks.devices import DeviceProfile


@dataclass(frozen=True, eq=False)
class Given(Weighting):
    """The shares of one round as a tensor, ``[K]`` or ``[K, layers]``, through which gradients flow."""

    shares: Tensor
    layers: tuple[str, ...]
    normalise: bool
    noted: bool = False

    @property
    def requires(self) -> frozenset[str]:
        return requirements(self.normalise) | ({"running_loss"} if self.noted else set())

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        return weights_of(self.shares[cohort.ids], self.layers, self.normalise, cohort), state, {}


@dataclass(frozen=True, eq=False)
class UnrolledProblem:
    """The rounds of one outer iteration, apart from the table.

    ``layers`` are the names of the table's last axis, if it has one.
    """

    algorithm: Algorithm
    task: Task
    rounds: int
    devices: DeviceProfile = field(default_factory=DeviceProfile)
    learning: Learning = field(default_factory=Learning)
    layers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_algorithm(self.algorithm)
        self.devices.check(self.task.population)

    @property
    def ids(self) -> Tensor:
        """All clients take part."""
        return torch.arange(self.task.population)

    @property
    def outer(self) -> Objective:
        """The objective whose losses are summed."""
        objective = self.task.objective
        return OneHotError(objective) if self.learning.loss == "mse" else objective

    @property
    def normalise(self) -> bool:
        """Whether the weights act on updates divided by the clients' steps (FedNova)."""
        rule = self.algorithm.weighting
        return isinstance(rule, Nova) or (isinstance(rule, Unfolded) and rule.normalise)

    @cached_property
    def plain(self) -> bool:
        """Whether clients do plain SGD on the summed losses: then ``-delta / lr`` is the sum of their gradients, and
        nothing else has to be recorded."""
        return plain_sgd_of(self.algorithm) == PlainSgd() and self.learning.loss == "task"

    @cached_property
    def clients(self) -> Algorithm:
        """The algorithm for the engine: one object for all rounds, because engines cache by it. Where clients are not
        plain, their solver records losses and gradients."""
        return self._with(Given(torch.zeros(0), self.layers, self.normalise, noted=self.plain), recorded=not self.plain)

    def at(self, shares: Tensor, recorded: bool = True) -> Algorithm:
        """The algorithm of one round with these shares."""
        return self._with(Given(shares, self.layers, self.normalise), recorded)

    def _with(self, rule: Given, recorded: bool) -> Algorithm:
        if not recorded:
            return replace(self.algorithm, weighting=rule)
        outer = self.outer if self.learning.loss == "mse" else None
        return replace(self.algorithm, solver=Recording(self.algorithm.solver, outer), weighting=rule)

    def context(self, round: int, key: Key) -> Context:
        """The context of a round; ``key`` is that of the iteration."""
        solver, population = self.algorithm.solver, self.task.population
        lr = solver.lr_at(round, self.rounds)
        return Context(round, population, key.fold("round", round), local_lr=lr, rounds=self.rounds)

    def work(self, ctx: Context) -> Work:
        """Every client's work in a round, and whose link fails, drawn as in a run."""
        links = self.devices.links(self.ids, ctx.key.fold("links"))
        return Work.of(self.ids, self.devices.epochs_for(self.ids, ctx.key.fold("epochs")), links)

    def begin(
        self, algorithm: Algorithm, params: Tree, buffers: Tree, key: Key
    ) -> tuple[ServerState, dict[int, State]]:
        """The states before the first round."""
        state = algorithm.init(params, self.task.population, buffers)
        fresh = self.task.objective.init
        clients = {
            k: algorithm.init_client(state["shared"], key.fold("new client").fold(k), fresh) for k in self.ids.tolist()
        }
        return state, clients


def check_algorithm(algorithm: Algorithm) -> None:
    """Refuse what cannot be unrolled, or where the table's weights would not apply."""
    solver, rule = algorithm.solver, algorithm.weighting
    if not isinstance(rule, Samples | Uniform | Nova | Unfolded):
        raise AlgorithmError(
            f"unfold: weighting '{type(rule).__name__}' computes its weights itself; a table can replace only samples, "
            "uniform, nova and unfolded"
        )
    if algorithm.wire:
        raise AlgorithmError(
            f"unfold: '{type(algorithm.wire[0]).__name__}' changes what is sent, which cannot be differentiated: learn "
            "the table without [[wire]] and use it with [[wire]]"
        )
    if aspects.local_leaves(solver) or solver.target != "params" or aspects.is_personalised(solver):
        raise AlgorithmError(
            f"unfold: solver '{type(solver).__name__}' leaves a model at its clients; allowed are solvers whose whole "
            "model is shared, such as sgd, prox and scaffold"
        )


def layer_names(task: Task) -> tuple[str, ...]:
    """The layers of the task's model, in order."""
    return tuple(tree.layers(task.objective.init(Key.of(0))[0]))


def known(states: Mapping[int, State], new: Mapping[int, State], work: Work) -> dict[int, State]:
    """The states after a round: a client whose link failed keeps its old one."""
    silent = set(work.ids[~work.active].tolist())
    return {**states, **{client: state for client, state in new.items() if client not in silent}}


@dataclass(frozen=True)
class OneHotError(Objective):
    """``mean_c (softmax_c - [c = y])^2`` of a classifier, whatever loss clients train with; in evaluation mode."""

    objective: Objective

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """The classifier's initial values."""
        return self.objective.init(key)

    def loss(
        self, params: Tree, buffers: Tree, x: Tensor, y: Tensor, mask: Tensor | None, draw: Tensor | None
    ) -> tuple[Tensor, Tree]:
        """Mean over the (masked) batch; buffers do not change."""
        losses = self.losses(self.outputs(params, buffers, x), y)
        if mask is None:
            return losses.mean(), buffers
        return torch.where(mask, losses, 0.0).sum() / mask.sum().clamp(min=1), buffers

    def outputs(self, params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        """The classifier's outputs."""
        return self.objective.outputs(params, buffers, x)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The squared error of every example.

        >>> OneHotError(None).losses(torch.tensor([[0.0, 0.0]]), torch.tensor([1]))
        tensor([0.2500])
        """
        wanted = (y.unsqueeze(-1) == torch.arange(outputs.shape[-1], device=y.device)).to(outputs.dtype)
        return (outputs.softmax(-1) - wanted).square().mean(-1)

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The classifier's own."""
        return self.objective.hits(outputs, y)


@dataclass(frozen=True, eq=False)
class Subsample(TaskWrapper):
    """The task with ``fraction`` of every client's training examples, at least one, drawn once by key."""

    fraction: float
    key: Key

    def data(self, part: DataPart, ids: Tensor) -> Block:
        """The task's own, except for the training part."""
        if part != "train":
            return self.task.data(part, ids)
        pool = self._chosen
        return Block(pool.x, pool.y, pool.start[ids], pool.size[ids])

    @cached_property
    def _chosen(self) -> Block:
        whole = self.task.data("train", torch.arange(self.population))
        most = whole.size.cpu()
        size = fractions_of(most, self.fraction).round().to(torch.int64).clamp(min=1).minimum(most)
        rows = [
            int(whole.start[k]) + self.key.fold(k).permutation(int(whole.size[k]))[: int(size[k])].sort().values
            for k in range(self.population)
        ]
        chosen = torch.cat(rows).to(inputs.device_of(whole.y))
        return Block(inputs.take(whole.x, chosen), inputs.take(whole.y, chosen), size.cumsum(0) - size, size)
