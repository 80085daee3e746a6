"""The client's program, written once, for a block of clients: statistics before, begin, steps, post_train, end, wires,
statistics after. Pure.

The caller chooses the *kernel* that takes the local steps, and how a function of one client is *applied* to the block
(:mod:`fedalloy.core.applying`), which also decides whether the block's trees have a leading client axis. The loop
engine's client is a block of one with the plain kernel and plain calls, without such an axis; every other combination
must give the same results within its tolerance. Statistics always have the axis. Plan and draws of a block are made
before, by :func:`fedalloy.core.blocks.prepare`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedalloy.core import aspects, inputs, tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.applying import Applied
from fedalloy.core.aspects import OwnStart
from fedalloy.core.blocks import Prepared
from fedalloy.core.contributions import Notes
from fedalloy.core.errors import Stage, stage
from fedalloy.core.measuring import common_means, own_means
from fedalloy.core.packing import bytes_up
from fedalloy.core.protocols import Carry, Objective, Shared
from fedalloy.core.types import Context, Payload, State, Stats, Tree
from fedalloy.core.wide import widest


@dataclass(frozen=True)
class BlockTraining:
    """The local training of a block: everything a kernel may use. ``mine`` is the state of the clients' solvers; ``at``
    holds the current stage, which errors name.

    ``carry`` and ``buffers``, those before the first step, are computed when a kernel reads them.
    """

    algorithm: Algorithm
    objective: Objective
    shared: Shared
    mine: State
    block: Prepared
    ctx: Context
    apply: Applied
    at: Stage = field(default_factory=partial(Stage, None))

    @property
    def device(self) -> torch.device:
        """Where the models are."""
        return next(iter(self.shared["params"].values())).device

    @cached_property
    def carry(self) -> Carry:
        """Every client's first carry; values that do not depend on the client are shared until the first step."""
        solver, shared, ctx = self.algorithm.solver, self.shared, self.ctx
        self.at.name = "begin"
        carry: Carry = self.apply(lambda kept: solver.begin(shared, kept, ctx), len(self.block), self.mine)
        self.at.name = None
        return carry

    @property
    def buffers(self) -> Tree:
        """Every client's buffers before the first step: the received ones, unless clients have their own."""
        return self.models[1] if self.shared["buffers"] else {}

    @cached_property
    def counted(self) -> Tensor:
        """How many targets count in every client's batch, ``[S, C]``: the number of examples, unless these have several
        targets of which some do not count. A batch without any is no step."""
        block, y = self.block, self.block.data.y
        if (isinstance(y, Tensor) and y.dim() == 1) or not len(block.rows):
            return block.seen
        counts = self.objective.counts(inputs.take(y, block.rows.reshape(-1)))
        if counts is None:
            return block.seen
        return (counts.reshape(block.rows.shape) * block.mask.to(counts.device)).sum(2)

    def stepped(self, batches: Tensor) -> Tensor:
        """How many of some numbers of batches, ``[C]``, are steps: all but those in which nothing counts."""
        empty = ((self.counted.cpu() == 0) & (self.block.seen.cpu() > 0)).sum(0)
        return (batches - empty).clamp(min=0)

    def loss_before(self) -> Tensor:
        """The mean loss of every client's model before the first step, over its training examples."""
        objective, block, solver = self.objective, self.block, self.algorithm.solver
        if solver.aspect(OwnStart) is not None or len(block) == 1:
            return own_means(objective, objective.losses, *self.models, block.data, self.apply)
        received = self.shared[solver.target], self.shared["buffers"]
        return common_means(objective, objective.losses, *received, block.data)

    @cached_property
    def models(self) -> tuple[Tree, Tree]:
        """Every client's model before the first step: the received one, unless the solver is ``OwnStart``."""
        solver, shared, clients = self.algorithm.solver, self.shared, len(self.block)
        if solver.aspect(OwnStart) is None:
            return self.apply.same(shared[solver.target], clients), self.apply.same(shared["buffers"], clients)
        found: tuple[Tree, Tree] = self.apply(
            lambda kept: aspects.start_model(solver, shared, kept), clients, self.mine
        )
        return found


@dataclass(frozen=True)
class TrainingResult:
    """The result of a kernel: the carry, the buffers and every client's sums of training losses (``summed_losses``).

    A kernel for plain SGD may set ``sent`` directly; its carry is then not used. ``notes`` are those of what it sent.
    """

    carry: Carry
    buffers: Tree
    loss_sum: Tensor
    sent: Payload | None = None
    notes: Notes | None = None


Kernel = Callable[[BlockTraining], TrainingResult]
"""Takes all local steps of a block, and does nothing else."""


@dataclass(frozen=True)
class Finished:
    """The result of one block, in the block's order of clients."""

    ids: Tensor
    payload: Payload
    stats: Stats
    states: State
    notes: Notes | None = None


def run_block(
    algorithm: Algorithm,
    objective: Objective,
    shared: Shared,
    states: Mapping[int, State],
    block: Prepared,
    ctx: Context,
    kernel: Kernel,
    apply: Applied,
) -> Finished:
    """From the received parts to what the clients send and keep. An error names the stage it happened in, if the stage
    has a name; kernels may leave it unnamed."""
    with stage(None) as at:
        mine = apply.stack([*map(states.__getitem__, block.work.ids.tolist())])
        training = BlockTraining(algorithm, objective, shared, mine["solver"], block, ctx, apply, at)
        training = _drawn(training) if block.draws else training
        stats = _before(training)
        trained = kernel(training)
        stats |= _after(training, trained)
        payload, kept = (trained.sent, training.mine) if trained.sent is not None else _end(training, trained)
        payload, wires = _encode(training, payload, mine["wire"])
        sent = apply.rows(payload) if algorithm.packings else payload
        stats["bytes_up"] = bytes_up(sent, algorithm.packings, len(block))
    notes = None if algorithm.wire else trained.notes
    return Finished(block.work.ids, payload, stats, {"solver": kept, "wire": wires}, notes)


def _drawn(training: BlockTraining) -> BlockTraining:
    """The same training, with draws that know which batches are no steps because nothing in them counts: a schedule
    passes over them, and an accumulated gradient must not wait for one."""
    block, counted = training.block, training.counted
    if counted is block.seen:
        return training
    none = ((counted.cpu() == 0) & (block.seen.cpu() > 0)).T
    if not bool(none.any()):
        return training
    mask = block.plan.mask.clone()
    mask[:, : none.shape[1]] &= ~none.unsqueeze(2)
    plan = replace(block.plan, mask=mask)
    draws = training.algorithm.solver.draws(plan, block.keys.fold("draws"), training.shared)
    return replace(training, block=replace(block, draws=draws))


def _before(training: BlockTraining) -> Stats:
    """The clients' statistics before training."""
    algorithm, block = training.algorithm, training.block
    plain = training.counted is block.seen
    planned, requires = (block.planned if plain else training.stepped(block.planned)).double(), algorithm.requires
    stats = {"num_examples": block.data.size.cpu().double(), "num_steps": planned}
    if training.objective.unit != "examples":
        stats |= _targets(training, stats["num_examples"])
    if algorithm.described:
        training.at.name = "plan"
        stats |= aspects.describe(algorithm.solver, planned, training.ctx)
    if "loss_before" in requires:
        training.at.name = "loss_before"
        stats["loss_before"] = training.loss_before()
    training.at.name = None
    return stats


def _targets(training: BlockTraining, examples: Tensor) -> Stats:
    """``num_examples`` as the number of targets that count; the number of examples is then ``num_sequences``."""
    data, objective = training.block.data, training.objective
    counts = [objective.counts(data.client(row).y) for row in range(len(examples))]
    told = [number if one is None else one.sum() for one, number in zip(counts, examples, strict=True)]
    return {"num_examples": torch.stack([one.cpu().double() for one in told]), "num_sequences": examples}


def _after(training: BlockTraining, trained: TrainingResult) -> Stats:
    """The clients' statistics after training."""
    block, requires = training.block, training.algorithm.requires
    training.at.name = None
    per_example, per_batch = trained.loss_sum.cpu().unbind(1)
    examples, counted = block.examples, training.counted
    if counted is not block.seen:
        examples = counted.sum(0).cpu() * block.work.active
    stats = {"train_loss": per_example / examples}
    if "running_loss" in requires:
        stats["running_loss"] = per_batch
    if "accuracy_after" in requires:
        training.at.name = "accuracy_after"
        hits, model = training.objective.hits, _model_after(training, trained)
        stats["accuracy_after"] = own_means(
            training.objective, hits, model, trained.buffers, block.data, training.apply
        )
    return stats


def _model_after(training: BlockTraining, trained: TrainingResult) -> Tree:
    solver = training.algorithm.solver
    if trained.sent is None:
        model: Tree = trained.carry["params"]
        return model
    received = training.shared[solver.target]
    return tree.map_leaves(lambda change, leaf: change + leaf, trained.sent[solver.update], received)


def _end(training: BlockTraining, trained: TrainingResult) -> tuple[Payload, State]:
    """What the clients send, before the wires encode it, and what their solvers keep."""
    solver, objective, shared, ctx = training.algorithm.solver, training.objective, training.shared, training.ctx

    def end(carry: Carry, buffers: Tree, kept: State, steps: Tensor) -> tuple[Payload, State]:
        if generates:
            training.at.name = "post_train"
            carry = aspects.post_train(solver, carry, shared, lambda params, x: objective.outputs(params, buffers, x))
        training.at.name = "end"
        payload, mine = solver.end(carry, shared, kept, steps, ctx)
        if not shared["buffers"]:
            return payload, mine
        sent = {**payload, "buffers": aspects.local_leaves(solver).split(buffers)[1]}
        return sent, aspects.keep_local_buffers(solver, mine, buffers)

    generates = training.algorithm.is_generative
    taken, device = training.block.taken, training.device
    taken = taken if training.counted is training.block.seen else training.stepped(taken)
    steps = training.apply.split(taken.to(device, widest(device)))
    found: tuple[Payload, State] = training.apply(
        end, len(training.block), trained.carry, trained.buffers, training.mine, steps
    )
    return found


def _encode(training: BlockTraining, payload: Payload, kept: State) -> tuple[Payload, State]:
    """Apply the wire transforms in order. The payload of a client whose link failed is not encoded: its update is zero,
    and error feedback or noise must not be added. Without leaves to send there is nothing to encode."""
    algorithm, shared, block = training.algorithm, training.shared, training.block
    active = block.work.active
    if not algorithm.wire or not any(payload.values()) or not bool(active.any()):
        return payload, kept
    before, kept = (payload, kept), dict(kept)
    for position, wire in enumerate(algorithm.wire):
        training.at.name = f"wire {position}"
        draws = wire.draws(algorithm.exchanged(shared), block.keys.fold("wire", position))
        draws = {name: training.apply.split(leaf.to(training.device)) for name, leaf in draws.items()}
        given = payload, kept[str(position)], draws
        payload, kept[str(position)] = training.apply(wire.encode, len(block), *given)
    training.at.name = None
    return (payload, kept) if bool(active.all()) else _heard(active.to(training.device), (payload, kept), before)


def _heard(active: Tensor, new: tuple[Payload, State], old: tuple[Payload, State]) -> tuple[Payload, State]:
    def choose(after: Tensor, before: Tensor) -> Tensor:
        return torch.where(active.reshape(-1, *[1] * (after.dim() - 1)), after, before)

    chosen: tuple[Payload, State] = tree_map(choose, new, old)
    return chosen
