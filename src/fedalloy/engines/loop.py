"""The truth: one client after another, nothing clever. Every other engine is tested against this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.blocks import client_keys
from fedalloy.core.client import Assignment, run_client
from fedalloy.core.errors import ClientError
from fedalloy.core.gathering import Gathering
from fedalloy.core.keys import Key
from fedalloy.core.program import Kernel
from fedalloy.core.protocols import Engine, Outcome, Shared, Task
from fedalloy.core.registry import register
from fedalloy.core.screening import misfit
from fedalloy.core.types import Block, Context, Contribution, State, Work
from fedalloy.engines.profile import phase


@register("engine", "loop")
@dataclass(frozen=True)
class Loop(Engine):
    """Runs ``run_client`` for each client in turn."""

    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        with phase("data"):
            block, keys = task.data("train", work.ids), client_keys(ctx.key, work.ids)
        gathering = Gathering(work.ids, exact=algorithm.exact_norms)
        kept: dict[int, State] = {}
        failures: dict[int, str] = {}
        with torch.no_grad(), phase("compute"):
            for row, client in enumerate(work.ids.tolist()):
                key = keys.rows(row, row + 1)
                found = run_one(algorithm, task, shared, states[client], block, work, row, key, ctx)
                reason = misfit(found.payload, algorithm.parts(shared), shared)
                if reason:
                    failures[client] = reason
                else:
                    gathering.add_one(client, found)
                    kept[client] = found.state
        return Outcome(gathering.cohort(), kept, failures)


def run_one(
    algorithm: Algorithm,
    task: Task,
    shared: Shared,
    state: State,
    block: Block,
    work: Work,
    row: int,
    key: Key,
    ctx: Context,
    kernel: Kernel | None = None,
) -> Contribution:
    """One client of a cohort; an error says who, when and where."""
    assignment = Assignment(block.client(row), int(work.epochs[row]), bool(work.active[row]))
    try:
        return run_client(algorithm, task.objective, shared, state, assignment, key, ctx, kernel)
    except ClientError as error:
        raise ClientError(error.stage, error.cause, client=int(work.ids[row]), round=ctx.round) from error.cause
