"""Cohorts cut into blocks: clients with similar work together, those with most steps first.

Because a block is sorted, the clients that still have a step to take are always its first rows. An engine
works on that prefix and leaves the others alone, so no step needs to be masked out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.client import client_keys, dropout_draws
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Shared
from fedalloy.core.types import Block, Context, Plan, Tree, Work
from fedalloy.engines.profile import phase

# What is copied out of the pool at a time: on a CPU few enough to be still in cache when its steps come.
_GATHER_BYTES = {"cpu": 4 << 20}
_GATHER_BYTES_ELSEWHERE = 256 << 20


@dataclass(frozen=True)
class Prepared:
    """A block ready to run: who, on which rows of the pool, in which steps.

    ``running[s]`` clients (the first ones) take step ``s``; ``full[s]`` says that all their slots are used.
    ``rows`` is ``[S, C, B]``, absolute rows of ``data``; ``mask`` likewise.
    """

    work: Work
    keys: Key
    data: Block
    plan: Plan
    draws: Tree
    planned: Tensor
    running: list[int]
    full: list[bool]
    rows: Tensor
    mask: Tensor

    def __len__(self) -> int:
        return len(self.work)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """``x, y`` of every step for the running clients, ``[c, B, ...]``."""
        for running, (x, y) in zip(self.running, self.padded_batches(), strict=True):
            yield (x, y) if running == len(self) else (x[:running], y[:running])

    def padded_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """``x, y`` of every step for all clients: one indexed read for as many steps as fit."""
        x, y = self.data.x, self.data.y
        step = (x[0].numel() * x.element_size() if len(x) else 0) * self.rows[:1].numel()
        at_once = _GATHER_BYTES.get(x.device.type, _GATHER_BYTES_ELSEWHERE) // max(1, step)
        for some in self.rows.split(max(1, min(len(self.rows), at_once))):
            with phase("data"):
                flat = some.reshape(-1)
                xs = x.index_select(0, flat).reshape(*some.shape, *x.shape[1:])
                ys = y.index_select(0, flat).reshape(*some.shape, *y.shape[1:])
            yield from zip(xs, ys, strict=True)


def blocks(work: Work, data: Block, most: int) -> Iterator[tuple[Work, Block]]:
    """At most ``most`` clients at a time, sorted by how much they have to do."""
    if len(work) <= most:
        yield work, data
        return
    epochs = torch.where(work.epochs < 0, 1, work.epochs)
    for rows in (data.size.cpu() * epochs).argsort(descending=True, stable=True).split(most):
        yield work.rows(rows), _rows(data, rows)


def prepare(algorithm: Algorithm, work: Work, data: Block, shared: Shared, ctx: Context) -> Prepared:
    """Plans and draws for a whole block in a few vectorised calls."""
    keys = client_keys(ctx.key, work.ids)
    plan = algorithm.solver.plan(data.size.cpu(), work.epochs, keys.fold("plan"))
    planned = plan.steps
    taken = torch.where(work.active, planned, 0)
    if len(work) > 1 and not bool((taken[:-1] >= taken[1:]).all()):
        order = taken.argsort(descending=True, stable=True)
        work, data, planned, taken = work.rows(order), _rows(data, order), planned[order], taken[order]
        plan, keys = Plan(plan.index[order], plan.mask[order], plan.phase[order]), client_keys(ctx.key, work.ids)
    draws = algorithm.solver.draws(plan, keys.fold("draws"), shared)
    steps = int(taken[0]) if len(work) else 0
    # Unused slots may point anywhere inside the pool: the start of a client without examples need not.
    rows = (data.start.cpu().reshape(-1, 1, 1) + plan.index[:, :steps]).clamp_(max=max(0, len(data.y) - 1))
    return Prepared(
        work=work,
        keys=keys,
        data=data,
        plan=plan,
        draws=draws,
        planned=planned,
        running=_running(taken.tolist(), steps),
        full=_full(plan.mask[:, :steps], taken),
        rows=rows.transpose(0, 1).contiguous().to(data.y.device),
        mask=plan.mask[:, :steps].transpose(0, 1).to(data.y.device),
    )


def _full(mask: Tensor, taken: Tensor) -> list[bool]:
    """Of which steps those who take them use every slot."""
    used = mask.all(2)
    if not bool(used.all()):
        used |= torch.arange(mask.shape[1]) >= taken.unsqueeze(1)
    return used.all(0).tolist()


def _running(taken: list[int], steps: int) -> list[int]:
    """How many clients take each step, from how many steps each takes, longest first.

    >>> _running([3, 1, 0], 3)
    [2, 1, 1]
    """
    running, clients = [], len(taken)
    for step in range(steps):
        while taken[clients - 1] <= step:
            clients -= 1
        running.append(clients)
    return running


def tally(losses: Tensor, seen: Tensor) -> Tensor:
    """What a step adds to the clients' sums: its mean loss once per example seen, and once per batch, ``[C, 2]``.

    >>> tally(torch.tensor([0.5, 9.0]), torch.tensor([4, 0]))
    tensor([[2.0000, 0.5000],
            [0.0000, 0.0000]], dtype=torch.float64)
    """
    return losses.detach().double().unsqueeze(1) * torch.stack([seen, seen > 0], dim=1)


def dropout_keys(prepared: Prepared) -> Tensor:
    """One 64-bit key per client and step for dropout masks, ``[C, S]``, where the data is."""
    return dropout_draws(prepared.plan, prepared.keys).to(prepared.data.y.device)


def _rows(data: Block, rows: Tensor) -> Block:
    rows = rows.to(data.start.device)
    return Block(data.x, data.y, data.start[rows], data.size[rows])
