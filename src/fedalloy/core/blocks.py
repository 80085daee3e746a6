"""Blocks of clients: their examples and their steps.

A block holds clients with similar work, sorted by number of steps, most first. So the clients that still have a step to
take are always its first rows: a kernel works on that prefix, and no step needs to be masked out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fedalloy.core import inputs
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import AlgorithmError, stage
from fedalloy.core.keys import Key
from fedalloy.core.protocols import LocalSolver, Shared
from fedalloy.core.types import Block, Context, Plan, Tree, Work
from fedalloy.core.wide import wide
from fedalloy.core.written import writes_to


@dataclass(frozen=True)
class Prepared:
    """A block ready to run.

    ``running[s]`` clients (the first ones) take step ``s``; ``full[s]`` is true if all their slots are used. ``mask``
    is ``[S, C, B]``, ``seen`` its sum over B, and ``examples`` the sum of that over all steps. ``chosen`` are the
    ``rows`` and ``dropout`` the keys of the clients' dropout masks, ``[C, S]``, if they are already known.
    """

    work: Work
    keys: Key
    data: Block
    plan: Plan
    draws: Tree
    planned: Tensor
    running: list[int]
    full: list[bool]
    mask: Tensor
    seen: Tensor
    examples: Tensor
    chosen: Tensor | None = None
    dropout: Tensor | None = None

    def __len__(self) -> int:
        return self.work.ids.shape[0]

    @cached_property
    def rows(self) -> Tensor:
        """Absolute rows of ``data``, ``[S, C, B]``."""
        if self.chosen is not None:
            return self.chosen
        # Unused slots must point inside the pool, and the start of a client without examples may lie behind its end.
        last = max(0, inputs.length(self.data.y) - 1)
        start = self.data.start.cpu().reshape(-1, 1, 1)
        rows = (start + self.plan.index[:, : len(self.running)]).clamp_(max=last)
        return rows.transpose(0, 1).contiguous().to(inputs.device_of(self.data.y))

    @cached_property
    def trained(self) -> Tensor:
        """The ``mask`` without the examples of clients whose link failed: for kernels that take every step with all
        clients, instead of those that are ``running``."""
        if self.work.all_active:
            return self.mask
        return self.mask & self.work.active.to(self.mask.device).reshape(1, -1, 1)

    @property
    def taken(self) -> Tensor:
        """How many steps every client takes, ``[C]``; 0 if its link fails."""
        return torch.where(self.work.active, self.planned, 0)

    def dropout_keys(self) -> Tensor:
        """One 64-bit key per client and step for dropout masks, ``[C, S]``."""
        return dropout_draws(self.plan, self.keys) if self.dropout is None else self.dropout

    def one_by_one(self) -> Iterator[Prepared]:
        """Every client as a block of one, in the order of ids."""
        dropout, taken = self.dropout_keys(), self.taken.tolist()
        for row in self.work.ids.argsort().tolist():
            only, steps = slice(row, row + 1), taken[row]
            yield Prepared(
                work=self.work.rows(only),
                keys=self.keys.rows(row, row + 1),
                data=Block(self.data.x, self.data.y, self.data.start[only], self.data.size[only]),
                plan=Plan(self.plan.index[only], self.plan.mask[only], self.plan.phase[only]),
                draws={name: leaf[only] for name, leaf in self.draws.items()},
                planned=self.planned[only],
                running=[1] * steps,
                full=self.mask[:steps, row].all(1).tolist(),
                mask=self.mask[:steps, only],
                seen=self.seen[:steps, only],
                examples=self.examples[only],
                chosen=self.rows[:steps, only],
                dropout=dropout[only],
            )


def blocks(work: Work, data: Block, most: int) -> Iterator[tuple[Work, Block]]:
    """Blocks of at most ``most`` clients, sorted by their amount of work."""
    if len(work.ids) <= most:
        yield work, data
        return
    epochs = torch.where(work.epochs < 0, 1, work.epochs)
    for rows in (data.size.cpu() * epochs).argsort(descending=True, stable=True).split(most):
        yield work.rows(rows), _rows(data, rows)


def prepare(
    algorithm: Algorithm,
    work: Work,
    data: Block,
    shared: Shared,
    ctx: Context,
    keys: Key | None = None,
    plan: Plan | None = None,
) -> Prepared:
    """Plans and draws for a whole block in a few vectorised calls. ``keys`` and ``plan`` replace the clients' keys of
    this round and the solver's plan."""
    keys = client_keys(ctx.key, work.ids) if keys is None else keys
    solver = algorithm.solver
    with stage("plan"):
        plan = plan or solver.plan(data.size.cpu(), work.epochs, keys.fold("plan"))
        steps = _steps_of(plan.mask, work.active, work.all_active)
        if steps.order is not None:
            work, data, keys = work.rows(steps.order), _rows(data, steps.order), keys.pick(steps.order)
            plan = Plan(plan.index[steps.order], plan.mask[steps.order], plan.phase[steps.order])
        drawing = type(solver).draws is not LocalSolver.draws
        draws = solver.draws(plan, keys.fold("draws"), shared) if drawing else {}
    device = inputs.device_of(data.y)
    mask, seen = (steps.mask, steps.seen) if device.type == "cpu" else (steps.mask.to(device), steps.seen.to(device))
    return Prepared(work, keys, data, plan, draws, steps.planned, steps.running, steps.full, mask, seen, steps.examples)


@dataclass(frozen=True)
class _Steps:
    """What follows from the mask of a plan: the order in which the clients must be put (None: they are in order), and
    then their planned steps and the fields of ``Prepared``."""

    order: Tensor | None
    planned: Tensor
    running: list[int]
    full: list[bool]
    mask: Tensor
    seen: Tensor
    examples: Tensor


_known_steps: Any = WeakIdKeyDictionary()
"""The steps of every mask that still exists, if all its clients are active: solvers return the same mask for cohorts
of the same sizes, and reading it takes longer than a small block."""


def _steps_of(mask: Tensor, active: Tensor, everyone: bool | None = None) -> _Steps:
    if not (bool(active.all()) if everyone is None else everyone):
        return _read_steps(mask, active)
    now, (version, known) = writes_to(mask), _known_steps.get(mask, (None, None))
    if known is None or version != now:
        known = _read_steps(mask, active)
        _known_steps[mask] = now, known
    found: _Steps = known
    return found


def _read_steps(mask: Tensor, active: Tensor) -> _Steps:
    planned = _planned(mask)
    taken, order = torch.where(active, planned, 0), None
    if len(taken) > 1 and not bool((taken[:-1] >= taken[1:]).all()):
        order = taken.argsort(descending=True, stable=True)
        planned, taken, mask = planned[order], taken[order], mask[order]
    steps = int(taken[0]) if len(taken) else 0
    mask = mask[:, :steps]
    # A view would keep the mask, and with it this entry, for ever.
    by_step = mask.transpose(0, 1).clone(memory_format=torch.contiguous_format)
    seen = by_step.sum(2)
    examples = seen.sum(0) * (active if order is None else active[order])
    return _Steps(order, planned, _running(taken.tolist(), steps), _full(mask, taken), by_step, seen, examples)


def _planned(mask: Tensor) -> Tensor:
    """How many steps every client takes. They must be its first ones, because the steps after these are left out."""
    used = mask.any(-1)
    if bool((used[:, 1:] & ~used[:, :-1]).any()):
        raise AlgorithmError("the plan has an empty step before one with examples: put a client's empty steps last")
    return used.sum(-1)


def client_keys(round_key: Key, ids: Tensor) -> Key:
    """One key per client of a round, as a batch; a client's key depends on its id only."""
    return round_key.fold("client").each(ids)


def dropout_draws(plan: Plan, keys: Key) -> Tensor:
    """One 64-bit key per client and step, from which dropout modules draw their masks, ``[C, S]``."""
    state = keys.fold("dropout").each(torch.arange(plan.index.shape[1])).state
    assert isinstance(state, Tensor)
    return state


def summed_losses(losses: Tensor, seen: Tensor) -> Tensor:
    """What a step adds to the clients' sums, ``[C, 2]``: its mean loss once per target that counts (``seen``), and once
    per batch.

    >>> summed_losses(torch.tensor([0.5, 9.0]), torch.tensor([4, 0]))
    tensor([[2.0000, 0.5000],
            [0.0000, 0.0000]], dtype=torch.float64)
    """
    return wide(losses.detach()).unsqueeze(1) * torch.stack([seen, seen > 0], dim=1)


def _full(mask: Tensor, taken: Tensor) -> list[bool]:
    """The steps in which all clients that take them use every slot."""
    used = mask.all(2)
    if not bool(used.all()):
        used |= torch.arange(mask.shape[1]) >= taken.unsqueeze(1)
    return used.all(0).tolist()


def _running(taken: list[int], steps: int) -> list[int]:
    """How many clients take each step, from the clients' numbers of steps in descending order.

    >>> _running([3, 1, 0], 3)
    [2, 1, 1]
    """
    running, clients = [], len(taken)
    for step in range(steps):
        while taken[clients - 1] <= step:
            clients -= 1
        running.append(clients)
    return running


def _rows(data: Block, rows: Tensor) -> Block:
    rows = rows.to(data.start.device)
    return Block(data.x, data.y, data.start[rows], data.size[rows])
