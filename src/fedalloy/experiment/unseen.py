"""Scores of clients that never took part: with the global model, and after a few local steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedalloy.core import aspects, renamed, tree
from fedalloy.core.applying import plain
from fedalloy.core.blocks import client_keys, prepare
from fedalloy.core.client import train
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.program import run_block
from fedalloy.core.protocols import LocalSolver
from fedalloy.core.types import Context, Examples, Plan, Tree, Work
from fedalloy.experiment.evaluate import Summary, Values, client_row, summaries
from fedalloy.experiment.trained import Trained
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.tasks.evaluation import evaluate_models


@dataclass(frozen=True)
class UnseenClients:
    """Values by metric for every unseen client, after each number of local steps."""

    ids: Tensor
    scores: dict[int, Values]

    def summary(self, steps: int) -> Summary:
        """Mean, spread and tails over the unseen clients."""
        if steps not in self.scores:
            raise SpecError(
                f"unseen clients were not scored after {steps} steps; after: {', '.join(map(str, self.scores))}"
            )
        return summaries(self.scores[steps])

    def to_json(self) -> dict[str, Any]:
        """Plain values: one row per number of steps, shaped as those of ``clients.jsonl``."""
        rows = [client_row("newcomer", self.ids, values, steps=steps) for steps, values in self.scores.items()]
        return {"rows": rows, "summary": {str(steps): self.summary(steps) for steps in self.scores}}


@torch.no_grad()
def evaluate_unseen(
    trained: Trained,
    ids: Tensor | None = None,
    steps: Sequence[int] = (0, 1, 5, 10),
    metrics: tuple[str, ...] | None = None,
) -> UnseenClients:
    """Score clients on their own test parts after ``steps`` steps of the algorithm's local training.

    ``steps = 0`` is the global model as it is. A method that trains in phases (FedRep, Ditto) takes this many steps in
    each. After that a client uses the model that the algorithm would give it: the one it has trained, mixed with or
    replaced by its own where the method has one, starting from its initial private state. Without ``ids`` they are
    the clients that the task sets aside. The run is not changed.
    """
    if trained.fed.algorithm.solver.target != "params":
        raise SpecError("unseen clients: this method exchanges samples, so there is no shared model to start from")
    ids = _unseen(trained) if ids is None else ids
    if any(count < 0 for count in steps):
        raise SpecError(f"unseen clients: steps are {list(steps)}; use whole numbers from 0")
    metrics = metrics or trained.fed.config.metrics
    scores = {count: _scores(trained, ids, count, metrics) for count in steps}
    return UnseenClients(ids, scores)


@torch.inference_mode(False)
def adapt(trained: Trained, client: int, steps: int) -> tuple[Tree, Tree]:
    """The parameters and buffers that a client uses after ``steps`` local steps from the run's current state."""
    fed, shared, work, ctx = trained.fed, trained.shared, Work.of(torch.tensor([client])), _context(trained)
    # Nothing is sent, so weighting and wire are not needed.
    algorithm = replace(fed.algorithm, weighting=Uniform(), wire=())
    solver, data = algorithm.solver, fed.task.data("train", work.ids)
    plan = first_steps(solver, data.client(0), steps, client_keys(ctx.key, work.ids).fold("plan"))
    block = prepare(algorithm, work, data, shared, ctx, plan=plan)
    done = run_block(algorithm, fed.task.objective, shared, trained.states(work.ids), block, ctx, train, plain)
    sent, mine = done.payload, done.states["solver"]
    moved = tree.map_leaves(lambda change, leaf: leaf + change, sent[solver.update], shared[solver.target])
    after = {**shared, solver.target: {**shared[solver.target], **moved}}
    after["buffers"] = {**shared["buffers"], **sent.get("buffers", {})}
    return aspects.personal_model(solver, after, mine)


def first_steps(solver: LocalSolver, examples: Examples, steps: int, key: Key) -> Plan:
    """The first steps of every phase of a client's plan; where a round has fewer, of a plan with more epochs."""
    sizes = torch.tensor([len(examples)])
    plan = solver.plan(sizes, torch.tensor([-1]), key)
    if int((plan.phase[0, : int(plan.steps[0])] == 0).sum()) < steps:
        plan = solver.plan(sizes, torch.tensor([steps]), key)
    taken = torch.arange(int(plan.steps[0]))
    phases = plan.phase[0, taken]
    first = torch.cat([taken[phases == phase][:steps] for phase in phases.unique()] or [taken]).sort().values
    return Plan(plan.index[:, first], plan.mask[:, first], plan.phase[:, first])


def _scores(trained: Trained, ids: Tensor, steps: int, metrics: tuple[str, ...]) -> Values:
    """A few clients at a time, so that their models fit into memory."""
    task, shared = trained.fed.task, trained.shared
    parts = []
    for some in ids.split(trained.at_once):
        clients = some.tolist()
        unchanged = (shared["params"], shared["buffers"])
        models = [adapt(trained, client, steps) if steps else unchanged for client in clients]
        parts.append(evaluate_models(task.objective, models, task.data("test", some), metrics))
    return {name: torch.cat([part[name] for part in parts]) for name in metrics}


def _unseen(trained: Trained) -> Tensor:
    ids = trained.fed.task.unseen_ids
    if len(ids) == 0:
        raise SpecError("this run has no unseen clients: give ids, or set some aside with newcomers = 5 in [partition]")
    return ids


def _context(trained: Trained) -> Context:
    """The context of the run's last round."""
    fed, round = trained.fed, max(1, trained.round)
    lr = fed.algorithm.solver.lr_at(round, fed.config.rounds)
    return Context(round, fed.task.population, fed.root.fold("newcomers"), lr, fed.config.rounds)


if not TYPE_CHECKING:  # old names, for one version
    __getattr__ = renamed.old_names(__name__, {"evaluate_newcomers": "evaluate_unseen", "Newcomers": "UnseenClients"})
