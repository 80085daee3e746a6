"""Checks before a run (can the rule work with these clients?) and after every round (has it diverged?)."""

from __future__ import annotations

import math

import torch

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import Diverged
from fedalloy.core.protocols import Task
from fedalloy.core.types import Tree
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.evaluate import Evaluation
from fedalloy.experiment.round import RoundResult

_NAMES = {"params": "model", "samples": "synthetic set", "buffers": "model's running statistics (a buffer)"}
_FEW = 4
"""So many numbers are read one by one faster than together."""
EMPTY_LIMIT = 3
"""Rounds in a row without a valid contribution after which a run has diverged."""


def check_able(algorithm: Algorithm, task: Task, config: RunConfig) -> None:
    """Refuse a rule that needs more clients in a round than have examples and time for a step."""
    if algorithm.counts_idle or algorithm.weighting.least_clients(task.population) == 1:
        return
    everyone = torch.arange(task.population)
    steps = aspects.count_steps(
        algorithm.solver, task.data("train", everyone).size.cpu(), config.devices.most_epochs(everyone)
    )
    algorithm.check_able(int((steps > 0).sum()), task.population)


def check_health(result: RoundResult, evaluation: Evaluation | None, barren: int, target: str) -> None:
    """Raise ``Diverged`` for a model that is not finite, or when no valid contribution arrives."""
    round = result.row["round"]
    shared: dict[str, Tree] = result.step.state["shared"]
    for part in (target, "buffers"):
        if not _finite(shared[part]):
            what = _NAMES.get(part, part)
            raise Diverged(f"the {what} is not finite after round {round}; try a smaller step size")
    if barren >= EMPTY_LIMIT and result.row["dropped"] and not result.row["refusal"]:
        raise Diverged(
            f"no valid contribution for {barren} rounds, up to round {round} "
            f"({next(iter(result.row['dropped'].values()))}); try a smaller step size"
        )
    losses = evaluation.overall if evaluation else {}
    if not math.isfinite(losses.get("loss", 0.0)):
        raise Diverged(f"the global loss is not finite after round {round}; try a smaller step size")


def _finite(leaves: Tree) -> bool:
    """Whether all numbers are; a sum is finite only if every term is."""
    sums = [leaf.sum(dtype=torch.float64) for leaf in leaves.values() if leaf.is_floating_point()]
    if len(sums) <= _FEW:
        return all(math.isfinite(float(one)) for one in sums)
    return bool(torch.stack(sums).isfinite().all())
