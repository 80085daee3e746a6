"""Rules for testing engines: each depends on something that is easy to get wrong."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Carry, GradAt, LocalSolver, Shared, Weighting, Wire
from fedalloy.core.types import Context, Contributions, Info, Payload, Plan, State, Tree, Weights
from fedalloy.methods.solvers.epoch_plans import epoch_plan


@dataclass(frozen=True)
class HalfWithMemory(Wire):
    """Sends half of (update + memory) and remembers the other half: a lost or mixed-up memory is visible."""

    stateful: ClassVar[bool] = True

    part: str = "delta"
    like: str = "params"

    def init_client(self, shared: Shared, key: Key) -> State:
        return {"memory": tree.zeros_like(shared[self.like])}

    def encode(self, payload: Payload, mine: State, draws: Tree) -> tuple[Payload, State]:
        wanted = tree.add(payload[self.part], mine["memory"])
        sent = tree.map_leaves(lambda leaf: leaf / 2, wanted)
        return {**payload, self.part: sent}, {"memory": tree.subtract(wanted, sent)}


@dataclass(frozen=True)
class Jitter(Wire):
    """Scales every update by its own random number: draws of the wire by slot or by call order are visible."""

    part: str = "delta"

    def draws(self, shared: Shared, keys: Key) -> Tree:
        return {"scale": keys.fold("scale").uniform(dtype=torch.float64)}

    def encode(self, payload: Payload, mine: State, draws: Tree) -> tuple[Payload, State]:
        scaled = tree.map_leaves(lambda leaf: leaf * (0.5 + draws["scale"]), payload[self.part])
        return {**payload, self.part: scaled}, mine


@dataclass(frozen=True)
class Lopsided(Weighting):
    """Weights from position, id, history and every statistic of an engine, so that no mix-up cancels out."""

    requires: ClassVar[frozenset[str]] = frozenset({"num_examples", "num_steps", "loss_before", "accuracy_after"})

    def init(self, population: int) -> State:
        return {"seen": torch.zeros(population, dtype=torch.float64)}

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        seen = state["seen"].index_add(0, cohort.ids, torch.ones(len(cohort), dtype=torch.float64))
        place = torch.arange(1, len(cohort) + 1, dtype=torch.float64)
        stats = cohort.stats
        told = stats["num_examples"] + stats["loss_before"] + stats["accuracy_after"] / (1 + stats["num_steps"])
        scores = place**2 * (1 + cohort.ids % 3) * (1 + seen[cohort.ids]) * told
        return scores / scores.sum(), {"seen": seen}, {"place": place}


@dataclass(frozen=True)
class Wavering(LocalSolver):
    """SGD whose step is scaled by a random draw, doubled in odd phases, with a term that needs no data.

    Counts all steps of a client; draws, phases, masks and states all affect its update.
    """

    stateful: ClassVar[bool] = True

    lr: float = 0.1
    epochs: int = 1
    batch_size: int = 3
    pull: float = 0.05

    def lr_at(self, round: int, rounds: int | None = None) -> float:
        return self.lr / round

    def plan(self, sizes: Tensor, epochs: Tensor, keys: Key) -> Plan:
        plan = epoch_plan(sizes, torch.where(epochs < 0, self.epochs, epochs), self.batch_size, keys)
        return Plan(plan.index, plan.mask, torch.arange(plan.phase.shape[1]).expand_as(plan.phase) % 2)

    def draws(self, plan: Plan, keys: Key, shared: Shared) -> Tree:
        steps = torch.arange(plan.index.shape[1])
        return {"scale": keys.fold("scale").each(steps).uniform(2, dtype=torch.float64)}

    def init_client(self, shared: Shared, key: Key) -> State:
        return {"taken": key.uniform(dtype=torch.float64)}

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        return {"params": shared["params"], "taken": mine["taken"]}

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        direction = tree.add(grad_at(carry["params"]), carry["params"], self.pull)
        scale = -ctx.local_lr * (1 + phase) * (draws["scale"].sum() + carry["taken"])
        return {"params": tree.add(carry["params"], direction, scale), "taken": carry["taken"] + 0.1}

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        return {"delta": tree.subtract(carry["params"], shared["params"])}, {"taken": carry["taken"]}
