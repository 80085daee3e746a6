"""The reference engine: one client after another, without optimisations. All other engines are tested against it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.applying import Applied, plain
from fedalloy.core.blocks import Prepared, blocks, prepare
from fedalloy.core.client import run_alone
from fedalloy.core.errors import ClientError
from fedalloy.core.gathering import Gathering
from fedalloy.core.program import Kernel
from fedalloy.core.protocols import Engine, Outcome, Shared, Task
from fedalloy.core.registry import register
from fedalloy.core.types import Block, Context, Contribution, State, Work
from fedalloy.engines.profile import phase

_PLANNED_AT_ONCE = 32
"""How many clients' plans and draws are made in one call; the memory for them grows with this number."""


@register("engine", "loop")
@dataclass(frozen=True)
class Loop(Engine):
    """Runs one client after another, each as a block of one."""

    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        with phase("data"):
            data = task.data("train", work.ids)
        gathering = Gathering(work, exact=algorithm.exact_norms, like=algorithm.templates(shared), storage=self.storage)
        kept: dict[int, State] = {}
        failures: dict[int, str] = {}
        with torch.no_grad(), phase("compute"):
            for some, rows in blocks(work, data, _PLANNED_AT_ONCE):
                for block in planned(algorithm, some, rows, shared, ctx):
                    client = int(block.work.ids)
                    found = run_one(algorithm, task, shared, states[client], block, ctx)
                    if reason := gathering.add_one(client, found):
                        failures[client] = reason
                    else:
                        kept[client] = found.state
        return Outcome(gathering.cohort(), kept, failures)


def loop_like(engine: Engine) -> Loop:
    """A loop that keeps contributions where ``engine`` does, for what that engine cannot run."""
    loop = Loop()
    if engine.storage is not None:
        loop.keep_contributions(engine.storage)
    return loop


def planned(algorithm: Algorithm, work: Work, data: Block, shared: Shared, ctx: Context) -> Iterator[Prepared]:
    """Every client as a block of one. Plans and draws do not depend on other clients, so they are made for all clients
    at once; if that fails, they are made client by client, so that the error names the client."""
    try:
        block = prepare(algorithm, work, data, shared, ctx)
    except ClientError as error:
        if len(work) == 1:
            raise _of_client(error, work, ctx) from error.cause
        for some, rows in blocks(work, data, 1):
            yield from planned(algorithm, some, rows, shared, ctx)
        return
    yield from block.one_by_one()


def run_one(
    algorithm: Algorithm,
    task: Task,
    shared: Shared,
    state: State,
    block: Prepared,
    ctx: Context,
    kernel: Kernel | None = None,
    apply: Applied = plain,
) -> Contribution:
    """Run one client of a cohort; an error names client, round and stage."""
    try:
        return run_alone(algorithm, task.objective, shared, state, block, ctx, kernel, apply)
    except ClientError as error:
        raise _of_client(error, block.work, ctx) from error.cause


def _of_client(error: ClientError, work: Work, ctx: Context) -> ClientError:
    return ClientError(error.stage, error.cause, client=int(work.ids), round=ctx.round)
