"""What replayers share: a cohort from a file's numbers, quadratic clients, and rounds through the real server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm, ServerState, ServerStep, server_step
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart, Objective, Task
from fedalloy.core.types import Block, Cohort, Context, State, Tree, Work
from fedalloy.engines.loop import Loop
from fedalloy.testing.vectors.files import Values, VectorCase


def built(category: str, kind: str) -> bool:
    """Whether a rule exists: fields of missing rules are left out, and so reported as not built."""
    return kind in registry.everything(category)


def split(vector: Tensor, layers: Sequence[int] | None = None) -> Tree:
    """A flat model, or rows of flat models, as one leaf or as one leaf per layer of the given sizes.

    >>> split(torch.arange(3), [2, 1])
    {'layer0': tensor([0, 1]), 'layer1': tensor([2])}
    """
    sizes = list(layers or [vector.shape[-1]])
    if sum(sizes) != vector.shape[-1]:
        raise SpecError(f"layers of {sizes} parameters do not fit a model of {vector.shape[-1]}")
    return {f"layer{i}": part for i, part in enumerate(vector.split(sizes, dim=-1))}


def flat(leaves: Mapping[str, Tensor]) -> Tensor:
    """The inverse of ``split``."""
    return torch.cat(list(leaves.values()), dim=-1)


@dataclass(frozen=True)
class Arrived:
    """A round's contributions as a cohort, which is sorted by id, remembering the order of the file."""

    received: Tree
    cohort: Cohort
    order: Tensor

    def to_cohort(self, rows: Tensor) -> Tensor:
        """One row per client in the order of the file, sorted by id."""
        if len(rows) != len(self.order):
            raise SpecError(f"{len(rows)} values for {len(self.order)} clients: one per id is needed")
        return rows[self.order]

    def to_file(self, rows: Tensor) -> Tensor:
        """One row per client of the cohort, in the order of the file."""
        return rows[self.order.argsort()]

    def weights(self, step: ServerStep) -> Tensor:
        """The weights of clients as the file writes them: ``[C]``, or ``[layers, C]``."""
        if isinstance(step.weights, Tensor):
            return self.to_file(step.weights)
        return torch.stack([self.to_file(leaf) for leaf in step.weights.values()])

    def knowing(self, stats: Mapping[str, Tensor]) -> Arrived:
        """The same round with more statistics, in the order of the cohort."""
        return replace(self, cohort=self.cohort.with_stats(stats))


def arrive(case: VectorCase, inputs: Values, **stats: str) -> Arrived:
    """The cohort of a round from ``w``, ``W``, ``ids`` and ``n``; ``stats`` maps statistics to inputs.

    ``n`` counts the examples of every client there is, ``W`` has one row per participant (everyone when the
    file names no ids); ``layers`` cuts the model into leaves; ``cross_val`` scores every model at every client.
    """
    w, W, ids = inputs.tensor("w", 1), inputs.tensor("W", 2), _ids(case, inputs)
    if W.shape != (len(ids), len(w)):
        raise SpecError(f"{inputs.where}.W is {list(W.shape)}, but {len(ids)} ids and w need {[len(ids), len(w)]}")
    layers, order = case.params.get("layers"), ids.argsort()
    arrived = Arrived(split(w, layers), Cohort(ids[order], {"delta": split((W - w)[order], layers)}), order)
    known = {stat: inputs.tensor(name, 1) for stat, name in stats.items() if name in inputs}
    if "n" in case.params:
        known["num_examples"] = case.params.tensor("n", 1)[ids]
    if "cross_val" in inputs:
        arrived = replace(arrived, cohort=arrived.cohort.with_cross(_cross(arrived, inputs)))
    return arrived.knowing({stat: arrived.to_cohort(values) for stat, values in known.items()})


def context(case: VectorCase, round: int, local_lr: float = 1.0) -> Context:
    """The context of a round of a case."""
    return Context(round, _population(case), Key.of(0).fold("round", round), local_lr)


def serve(algorithm: Algorithm, state: ServerState | None, arrived: Arrived, ctx: Context) -> ServerStep:
    """One server step: the model comes from the file, all other state from the round before (None at first)."""
    scores = set() if arrived.cohort.cross is None else {"cross_score"}
    missing = algorithm.weighting.requires - arrived.cohort.stats.keys() - scores
    if missing:
        raise SpecError(f"{type(algorithm.weighting).__name__} needs {', '.join(sorted(missing))}: not in the file")
    return server_step(algorithm, _placed(algorithm, state, arrived.received, ctx.population), arrived.cohort, ctx)


@dataclass(frozen=True)
class Quadratics(Task, Objective):
    """Clients with ``F_k(w) = 1/2 (w - c_k)' A_k (w - c_k)``: the task and its objective in one.

    Each client owns one example whose x is A_k and whose y is c_k, so a step takes the exact gradient and the
    number of epochs is the number of steps.
    """

    A: Tensor
    c: Tensor

    def __post_init__(self) -> None:
        if self.A.shape != (*self.c.shape, self.c.shape[-1]):
            shapes = f"{list(self.A.shape)} and {list(self.c.shape)}"
            raise SpecError(f"quadratic clients need A [K, d, d] and c [K, d], not {shapes}")

    @property
    def objective(self) -> Quadratics:
        """The task is its own objective."""
        return self

    @property
    def population(self) -> int:
        """One client per matrix."""
        return len(self.A)

    def data(self, part: DataPart, ids: Tensor) -> Block:
        """The same single example in every part."""
        return Block(self.A.flatten(1)[ids], self.c[ids], torch.arange(len(ids)), torch.ones_like(ids))

    def init(self, key: Key) -> tuple[Tree, Tree]:
        """The origin."""
        return split(torch.zeros_like(self.c[0])), {}

    def loss(
        self, params: Tree, buffers: Tree, x: Tensor, y: Tensor, mask: Tensor | None, draw: Tensor | None
    ) -> tuple[Tensor, Tree]:
        """Mean over the batch."""
        losses = self.losses(self.outputs(params, buffers, x), y)
        mean = losses.mean() if mask is None else torch.where(mask, losses, 0.0).sum() / mask.sum().clamp(min=1)
        return mean, buffers

    def outputs(self, params: Tree, buffers: Tree, x: Tensor) -> Tensor:
        """``[A_k | w]`` for every example: all that the loss of a quadratic needs."""
        w = flat(params)
        return torch.cat([x.reshape(len(x), len(w), len(w)), w.expand(len(x), len(w)).unsqueeze(2)], dim=2)

    def losses(self, outputs: Tensor, y: Tensor) -> Tensor:
        """``1/2 (w - c)' A (w - c)``."""
        apart = outputs[:, :, -1] - y
        return 0.5 * torch.einsum("bi,bij,bj->b", apart, outputs[:, :, :-1], apart)

    def hits(self, outputs: Tensor, y: Tensor) -> Tensor:
        """NaN: there is nothing to classify."""
        return torch.full_like(y[:, 0], torch.nan)


@dataclass(frozen=True)
class TrainedCohort:
    """A round with local work: the clients' models and states, and the server's step."""

    local: Tensor
    states: dict[int, State]
    server: ServerStep


def federate(
    algorithm: Algorithm, task: Quadratics, received: Iterable[Tensor], states: Mapping[int, State] | None = None
) -> Iterator[TrainedCohort]:
    """Rounds of all clients in the loop engine; each starts from the ``received`` model, all other state is carried
    over."""
    everyone, server = Work.of(torch.arange(task.population)), None
    for number, w in enumerate(received, 1):
        ctx = Context(number, task.population, Key.of(0).fold("round", number), algorithm.solver.lr_at(number))
        server = _placed(algorithm, server, split(w), task.population)
        shared = server["shared"]
        states = states or {k: algorithm.init_client(shared, ctx.key.fold(k), task.init) for k in everyone.ids.tolist()}
        outcome = Loop()(algorithm, task, shared, states, everyone, ctx)
        step = server_step(algorithm, server, outcome.cohort, ctx)
        server, states = step.state, outcome.states
        yield TrainedCohort(w + flat(outcome.cohort.payload[algorithm.solver.update]), outcome.states, step)


def _placed(algorithm: Algorithm, state: ServerState | None, params: Tree, population: int) -> ServerState:
    """The carried state with the round's model."""
    if state is None:
        return algorithm.init(params, population)
    return {**state, "shared": {**state["shared"], "params": params}}


def _ids(case: VectorCase, inputs: Values) -> Tensor:
    ids = inputs.tensor("ids", 1).long() if "ids" in inputs else torch.arange(len(inputs.tensor("W", 2)))
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < _population(case):
        raise SpecError(f"{inputs.where}.ids: {ids.tolist()} are not among the {_population(case)} clients of the case")
    return ids


def _cross(arrived: Arrived, inputs: Values) -> Tensor:
    """The matrix of scores with its rows and columns sorted by id."""
    cross = inputs.tensor("cross_val", 2)
    return arrived.to_cohort(arrived.to_cohort(cross).T).T


def _population(case: VectorCase) -> int:
    """The number of clients of a case: one per entry of ``n``, or ``K``, or as many as its ids need."""
    if "n" in case.params:
        return len(case.params.tensor("n", 1))
    if "K" in case.params:
        return int(case.params["K"])
    seen = [int(inputs.tensor("ids", 1).max()) + 1 for inputs in case.rounds if inputs.get("ids")]
    return max([*seen, *(len(inputs.tensor("W", 2)) for inputs in case.rounds if "W" in inputs)], default=0)
