"""An algorithm as a frozen value of four parts, and its server half as one pure function."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core import aspects, inputs
from fedalloy.core.arguments import checked
from fedalloy.core.contributions import Contributions
from fedalloy.core.elements import combine_elements
from fedalloy.core.errors import AlgorithmError, RoundRefused
from fedalloy.core.idle import left_out, nobody_idle, took_no_step
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.core.protocols import (
    ElementWeighting,
    Fresh,
    LocalSolver,
    Objective,
    ServerOptimizer,
    Shared,
    Task,
    Weighting,
    Wire,
)
from fedalloy.core.screening import screen
from fedalloy.core.showing import brief
from fedalloy.core.statistics import ANY_SIZE, STATISTICS, SizeLimits
from fedalloy.core.traits import Traits
from fedalloy.core.types import Context, DataSpec, Info, Part, Payload, State, Tree, Weights
from fedalloy.core.weighting import check_said, check_weights
from fedalloy.core.wiring import check_buffers, check_wires

OnFailure = Literal["drop", "resend"]
ServerState = dict[str, State]
_MOST_WAYS = 64
"""Choices of inputs that are whole numbers which are tried at most: all of those of six inputs."""


@checked("algorithm")
@dataclass(frozen=True)
class Algorithm(Traits):
    """A solver, a weighting, a server and the wire transforms between clients and server.

    Refused if neither solver nor engine provides a statistic that the weighting requires. ``on_failure`` overrides the
    setting of the devices for clients whose link failed.
    """

    solver: LocalSolver
    weighting: Weighting
    server: ServerOptimizer
    wire: tuple[Wire, ...] = ()
    on_failure: OnFailure | None = None

    def __repr__(self) -> str:
        return brief(self)

    def __post_init__(self) -> None:
        check_said(self.weighting)
        missing = self.requires - self.provides
        if missing:
            raise AlgorithmError(
                f"weighting {_name(self.weighting)} requires {', '.join(sorted(missing))}, which solver "
                f"{_name(self.solver)} does not provide; provided: {', '.join(sorted(self.provides))}"
            )
        if self.update not in self.sent:
            raise AlgorithmError(f"solver {_name(self.solver)} declares no part '{self.update}' to update with")
        if unread := self.weighting.reads - self.sent.keys():
            raise AlgorithmError(
                f"weighting {_name(self.weighting)} reads the part '{min(unread)}', which solver "
                f"{_name(self.solver)} does not send; sent: {', '.join(sorted(self.sent))}"
            )
        if self.local_leaves and "cross_score" in self.requires:
            raise AlgorithmError(
                f"weighting {_name(self.weighting)} scores every client's model at every other client, but with solver "
                f"{_name(self.solver)} no client sends a whole model: choose another weighting, such as 'samples'"
            )
        check_wires(self.wire, self.sent, self.weighting.weight_bound, _name(self.weighting))

    def needs(self, shared: Mapping[str, Tree]) -> frozenset[str]:
        """The statistics that every client must send: for the weighting, and for parts averaged by sample count."""
        by_samples = any(part.reduce == "samples" for part in self.parts(shared).values())
        sizes = {"num_examples"} if by_samples and not self.weighting.guards_all_parts else set()
        return self.requires - {"cross_score"} | sizes

    @property
    def uses_length(self) -> str:
        """How the rounds depend on the length of the run, as text; empty if they do not."""
        rules: tuple[LocalSolver | Weighting | ServerOptimizer | Wire, ...]
        rules = (self.solver, self.weighting, self.server, *self.wire)
        return "; ".join(f"{_name(rule)}: {rule.uses_length}" for rule in rules if rule.uses_length)

    def parts(self, shared: Mapping[str, Tree]) -> dict[str, Part]:
        """Everything a client sends: the solver's parts, and the model's buffers if it has any."""
        if not shared.get("buffers"):
            return dict(self.sent)
        return {**self.sent, "buffers": Part("samples", like="buffers", without=self.local_leaves)}

    def templates(self, shared: Mapping[str, Tree]) -> dict[str, Tree]:
        """Names, shapes and dtypes of everything a client sends."""
        return {name: part.template(shared) for name, part in self.parts(shared).items()}

    def neutral(self, shared: Shared) -> Payload:
        """The payload of a client that did not deliver: every part filled with its neutral number, and the buffers as
        received."""
        return {
            name: part.template(shared)
            if name == "buffers"
            else {leaf: torch.full_like(like, part.neutral) for leaf, like in part.template(shared).items()}
            for name, part in self.parts(shared).items()
        }

    def exchanged(self, shared: Shared) -> Shared:
        """The shared parts without the leaves that stay at the clients, as wires and server see them."""
        if not self.local_leaves:
            return shared
        return {part: self.local_leaves.split(leaves)[1] for part, leaves in shared.items()}

    def received(self, shared: Shared) -> Shared:
        """The shared parts that are sent to the clients."""
        wanted = self.receives
        return shared if wanted is None else {part: leaves for part, leaves in shared.items() if part in wanted}

    def bind(self, task: Task, key: Key | None = None) -> Algorithm:
        """The same algorithm with solver and server bound to the task's data spec; ``key`` is the run's root key."""
        needed = self.target != "params" or task.objective.needs_full_batches
        if not needed and not aspects.needs_data_spec(self.solver):
            return self
        data_spec = data_spec_of(task, key or Key.of(0))
        return replace(self, solver=aspects.bind(self.solver, data_spec), server=self.server.bind(data_spec))

    def init(self, params: Tree, population: int, buffers: Tree | None = None) -> ServerState:
        """The server's state before the first round."""
        if buffers:
            check_buffers(self.wire)
        shared: Shared = {"params": params, "buffers": buffers or {}, **self.solver.init_shared(params)}
        return {
            "shared": shared,
            "weighting": self.weighting.init(population),
            "server": self.server.init(self.exchanged(shared)[self.target]),
        }

    def client_key(self, new: Key, client: int, round: int) -> Key:
        """The key of a client's initial state, below the key ``new``. Stateless clients share one key; those that start
        from their own fresh model get another one in every round."""
        if self.needs_fresh and not self.solver.stateful:
            return new.fold("round", round).fold(client)
        return new.fold(client) if self.stateful else new

    def init_client(self, shared: Shared, key: Key, fresh: Fresh | None = None) -> State:
        """A client's state before its first round; ``fresh`` is the objective's ``init``, for solvers whose clients
        start from their own fresh model."""
        known = self.exchanged(shared)
        wires = {str(i): wire.init_client(known, key.fold("wire", i)) for i, wire in enumerate(self.wire)}
        if self.needs_fresh:
            shared = {**shared, "fresh": self._fresh(shared, key, fresh)}
        return {"solver": self.solver.init_client(shared, key.fold("solver")), "wire": wires}

    def _fresh(self, shared: Shared, key: Key, fresh: Fresh | None) -> Tree:
        """A new model with the received one's names, dtypes and device."""
        if fresh is None:
            raise AlgorithmError(
                f"solver {_name(self.solver)} starts every client from its own fresh model: pass the 'init' of the "
                "task's objective to init_client as 'fresh'"
            )
        drawn, _ = fresh(key.fold("fresh"))
        return {name: drawn[name].to(leaf) for name, leaf in shared["params"].items()}

    def check_cohort(self, cohort: int, population: int) -> None:
        """Refuse a sampled cohort if the weighting needs every client, and a cohort that is too small for it."""
        if self.weighting.needs_everyone and cohort < population:
            raise AlgorithmError(
                f"weighting {_name(self.weighting)} needs every client in every round, but the cohort is {cohort} of "
                f"{population}: set the cohort to {population} or choose a rule for sampled cohorts"
            )
        self.check_able(cohort, population)

    def check_task(self, task: Task) -> None:
        """Refuse a task that does not suit the weighting; needs the clients' data in this process."""
        reason = self.weighting.unsuited(task)
        if reason:
            raise AlgorithmError(reason)

    def check_able(self, able: int, population: int) -> None:
        """Refuse a federation in which too few clients can count in the same round."""
        least = self.weighting.least_clients(population)
        if able < least:
            raise AlgorithmError(
                f"weighting {_name(self.weighting)} needs at least {least} clients that count in a round, but there "
                f"can be only {able}: sample more, give more of them examples and time, or change the rule's settings"
            )


def data_spec_of(task: Task, key: Key) -> DataSpec:
    """The data spec of a task, from the examples of the first client that has any; a task whose data are elsewhere
    declares its spec itself."""
    told = task.data_spec()
    if told is not None:
        return replace(told, seed=key.fold("facts").seed(), alone=_trains_on_one(task.objective, told))
    for client in range(task.population):
        x = task.data("train", torch.tensor([client])).client(0).x
        if inputs.length(x):
            break
    params, buffers = task.objective.init(Key.of(0))
    one = inputs.take(x, slice(1))
    said = task.objective.outputs(_beside(x, params), _beside(x, buffers), one)
    limits = min(float(leaf.min()) for leaf in inputs.leaves(x)), max(float(leaf.max()) for leaf in inputs.leaves(x))
    shape, dtype = (tuple(x.shape[1:]), x.dtype) if isinstance(x, Tensor) else ((), next(inputs.leaves(x)).dtype)
    count, zeros = said.shape[-1] if said.dim() > 1 else 1, inputs.each(lambda leaf: torch.zeros_like(leaf.cpu()), one)
    alone = task.objective.trains_on_one(zeros)
    return DataSpec(shape, dtype, count, *limits, bounds=task.bounds, seed=key.fold("facts").seed(), alone=alone)


def _trains_on_one(objective: Objective, data_spec: DataSpec) -> bool:
    """Whether a batch may have a single example. Which inputs are whole numbers is not known here, so that all ways
    are tried; a model that accepts none of them gets no batch of one."""
    zeros = inputs.zeros(data_spec.shape if data_spec.shapes is None else data_spec.shapes, 1, data_spec.dtype)
    ways = itertools.product((False, True), repeat=sum(1 for _ in inputs.leaves(zeros)))
    for whole in itertools.islice(ways, _MOST_WAYS):
        flags = iter(whole)
        try:
            return objective.trains_on_one(inputs.each(lambda leaf, f=flags: leaf.long() if next(f) else leaf, zeros))
        except (RuntimeError, TypeError, IndexError):
            continue
    return False


def _beside(x: Inputs, leaves: Tree) -> Tree:
    return {name: leaf.to(inputs.device_of(x)) for name, leaf in leaves.items()}


@dataclass(frozen=True)
class ServerStep:
    """The result of a round at the server. For weights per element, ``weights`` holds the mean per client and leaf.

    ``idle`` are the clients that took no step, whether they count or not; ``refusal`` is the reason if the rule could
    not be applied to the contributions, in which case the round has no effect.
    """

    state: ServerState
    ids: Tensor
    weights: Weights
    info: Info
    dropped: dict[int, str]
    idle: tuple[int, ...] = ()
    refusal: str | None = None
    sums: Payload = field(default_factory=dict)


def server_step(
    algorithm: Algorithm,
    state: ServerState,
    cohort: Contributions,
    ctx: Context,
    max_norm: float | None = None,
    sizes: SizeLimits = ANY_SIZE,
) -> ServerStep:
    """Screen, weigh, combine, decode the wires, update the target, absorb: the whole server half, as a pure function.

    The state does not change if no contribution is valid, if the clients send no leaves, or if the rule is not defined
    for this cohort.
    """
    needed, resting = algorithm.needs(state["shared"]), ()
    if not nobody_idle(cohort) and bool((idle := took_no_step(cohort)).any()):
        resting = tuple(cohort.ids[idle].tolist())
        present = (~left_out(cohort, idle, needed, algorithm.counts_idle)).nonzero().flatten()
        cohort, sizes = cohort.select(cohort.ids[present]), sizes.select(present)
    cohort, dropped = screen(cohort, algorithm.update, max_norm, needed, sizes, algorithm.statistics)
    if len(cohort) == 0:
        return ServerStep(state, cohort.ids, torch.zeros(0), {}, dropped, resting)
    if not cohort.notes.leaves and not any(cohort.template(part) for part in cohort.parts):
        nothing = torch.zeros(len(cohort), dtype=torch.float64)
        return ServerStep(state, cohort.ids, nothing, {}, dropped, resting)
    try:
        new, weights, info, sums = _moved(algorithm, state, cohort, ctx)
    except RoundRefused as error:
        return ServerStep(state, cohort.ids[:0], torch.zeros(0), {}, dropped, resting, str(error))
    return ServerStep(new, cohort.ids, weights, info, dropped, resting, sums=sums)


def _moved(
    algorithm: Algorithm, state: ServerState, cohort: Contributions, ctx: Context
) -> tuple[ServerState, Weights, Info, Payload]:
    """The state after the contributions of a screened cohort, and the parts that are only summed."""
    least = algorithm.weighting.least_clients(ctx.population)
    if len(cohort) < least:
        rule = _name(algorithm.weighting)
        raise RoundRefused(f"weighting {rule} needs at least {least} contributions that count, got {len(cohort)}")
    try:
        weights, weighted, weighting_state, info = _weigh(algorithm, state, cohort, ctx)
    except KeyError as error:
        _check_required(algorithm.weighting, error)
        raise
    aggregate = {**_reduce(algorithm, state, cohort, weights, ctx), **weighted}
    for wire in reversed(algorithm.wire):
        aggregate = wire.after(aggregate, cohort, weights, ctx)
    shared, server_state, server_info = _move(algorithm, state, aggregate, ctx)
    shared = algorithm.solver.absorb(shared, aggregate, cohort, ctx)
    new = {"shared": shared, "weighting": weighting_state, "server": server_state}
    return new, weights, {**info, **server_info}, _summed(algorithm, state, cohort)


def _summed(algorithm: Algorithm, state: ServerState, cohort: Contributions) -> Payload:
    summed = [name for name, part in algorithm.parts(state["shared"]).items() if part.reduce == "sum"]
    if not summed:
        return {}
    everyone = torch.ones(len(cohort), dtype=torch.float64)
    return {name: cohort.combine(name, everyone) for name in summed}


def _weigh(
    algorithm: Algorithm, state: ServerState, cohort: Contributions, ctx: Context
) -> tuple[Weights, Payload, State, Info]:
    """The weights, and the parts that are reduced by them."""
    rule, declared = algorithm.weighting, algorithm.parts(state["shared"]).items()
    parts = [name for name, part in declared if part.reduce == "weighted"]
    if isinstance(rule, ElementWeighting):
        round = rule.open(cohort, state["weighting"], ctx)
        means, combined = combine_elements(round, cohort, algorithm.update, parts)
        return means, combined, *round.close()
    weights, kept, info = rule.weigh(cohort, state["weighting"], ctx)
    check_weights(rule, weights, len(cohort))
    return weights, {name: cohort.combine(name, weights) for name in parts}, kept, info


def _check_required(rule: Weighting, missing: KeyError) -> None:
    """Refuse a rule that reads a statistic which it does not require."""
    name = str(missing.args[0]) if missing.args else ""
    if name in STATISTICS and name not in rule.requires:
        raise AlgorithmError(
            f"weighting {_name(rule)} reads the statistic '{name}', which it does not require: add it to 'requires'"
        ) from missing


def _reduce(algorithm: Algorithm, state: ServerState, cohort: Contributions, weights: Weights, ctx: Context) -> Payload:
    """The parts that the weighting does not reduce, each as declared, unless the rule guards all parts."""
    reduced, rule = {}, algorithm.weighting
    for name, part in algorithm.parts(state["shared"]).items():
        if part.reduce == "stack":
            reduced[name] = cohort.stack(name)
        elif part.reduce not in ("weighted", "sum") and rule.guards_all_parts:
            reduced[name] = _guarded(rule, state["weighting"], cohort, name, weights, ctx)
        elif part.reduce in ("mean", "samples"):
            reduced[name] = cohort.combine(name, _evenly(cohort) if part.reduce == "mean" else _by_samples(cohort))
    return reduced


def _guarded(rule: Weighting, state: State, cohort: Contributions, part: str, weights: Weights, ctx: Context) -> Tree:
    """A part reduced by the rule's weights on clients or, for element-wise rules, by a separate round on this part."""
    if not isinstance(rule, ElementWeighting):
        return cohort.combine(part, weights)
    alone = cohort.alone(part, "delta")
    return combine_elements(rule.open(alone, state, ctx), alone, "delta", ("delta",))[1]["delta"]


def _evenly(cohort: Contributions) -> Tensor:
    return torch.full((len(cohort),), 1.0 / len(cohort), dtype=torch.float64)


def _by_samples(cohort: Contributions) -> Tensor:
    sizes = cohort.stats["num_examples"].double()
    if not bool(sizes.any()):
        sizes = torch.ones_like(sizes)
    return sizes / sizes.sum()


def _move(algorithm: Algorithm, state: ServerState, aggregate: Payload, ctx: Context) -> tuple[Shared, State, Info]:
    """Update the target with the server optimizer; buffers are replaced by their average, not optimised. Leaves that
    stay at the clients do not change here."""
    target, shared = algorithm.target, state["shared"]
    known = algorithm.exchanged(shared)[target]
    moved, server_state, info = algorithm.server.apply(aggregate[algorithm.update], state["server"], known, ctx)
    buffers = {**shared["buffers"], **aggregate.get("buffers", {})}
    return {**shared, target: {**shared[target], **moved}, "buffers": buffers}, server_state, info


def _name(rule: object) -> str:
    return f"'{type(rule).__name__}'"
