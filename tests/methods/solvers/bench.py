"""One client's rounds by the library, and the batches it sees, for references written beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.client import Assignment, run_client
from fedalloy.core.keys import Key
from fedalloy.core.types import Context, Contribution, State, Tree
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.testing import small_task

CLIENT = 3
ROUNDS = 10


class OneClient:
    """Client 3 of a small federation; shared parts are those of a fresh server unless they are given."""

    def __init__(self, solver: Any, model: Any = "mlp", weighting: Any = None) -> None:
        self.task = small_task(model)
        self.solver = solver
        self.algorithm = Algorithm(solver, weighting or Uniform(), ServerSgd())
        params, buffers = self.task.objective.init(Key.of(1))
        self.shared = self.algorithm.init(params, self.task.population, buffers)["shared"]
        self.fresh = self.algorithm.init_client(self.shared, Key.of(2).fold(CLIENT), self.task.objective.init)
        self.keys = lambda round: self.context(round).key.each(torch.tensor([CLIENT]))

    @property
    def params(self) -> Tree:
        """The received model."""
        return self.shared["params"]

    def context(self, round: int = 1) -> Context:
        key = Key.of(3).fold("round", round)
        return Context(round, self.task.population, key, self.solver.lr_at(round, ROUNDS), ROUNDS)

    def run(self, state: State | None = None, round: int = 1, epochs: int = -1) -> Contribution:
        """One round of the client."""
        mine = Assignment(self.task.data("train", torch.tensor([CLIENT])).client(0), epochs)
        with torch.no_grad():
            return run_client(
                self.algorithm, self.task.objective, self.shared, state or self.fresh, mine, self.keys(round),
                self.context(round),
            )  # fmt: skip

    def steps(self, round: int = 1) -> list[tuple[Tensor, Tensor, int, Tree]]:
        """Every step's batch, phase and draws, in the order in which they are taken."""
        mine, keys = self.task.data("train", torch.tensor([CLIENT])).client(0), self.keys(round)
        plan = self.solver.plan(torch.tensor([len(mine)]), torch.tensor([-1]), keys.fold("plan"))
        draws = self.solver.draws(plan, keys.fold("draws"), self.shared)
        found = []
        for step in range(int(plan.steps[0])):
            rows = plan.index[0, step][plan.mask[0, step]]
            here = {name: leaf[0, step] for name, leaf in draws.items()}
            found.append((mine.x[rows], mine.y[rows], int(plan.phase[0, step]), here))
        return found

    def loss(self, params: Tree, x: Tensor, y: Tensor) -> Tensor:
        """The batch loss, for autograd."""
        loss: Tensor = self.task.objective.loss(params, self.shared["buffers"], x, y, None, None)[0]
        return loss


def leaves(tree: Tree) -> Tree:
    """A copy to differentiate by."""
    return {name: leaf.clone().requires_grad_() for name, leaf in tree.items()}


def gap(one: Tree, other: Tree) -> float:
    """The largest difference between two trees of the same names."""
    assert one.keys() == other.keys()
    return max(float((leaf - other[name]).detach().abs().max()) for name, leaf in one.items())


def changed(one: Tree, other: Tree) -> set[str]:
    """The leaves that differ."""
    return {name for name, leaf in one.items() if not torch.equal(leaf, other[name])}
