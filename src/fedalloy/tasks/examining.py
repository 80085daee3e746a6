"""Checks of the data, made once when they are loaded: unusable examples are refused, with the client's name.

Refused are NaN and infinity, and labels outside of the model's classes. Clients without examples, or with less than a
batch of them, are allowed: :func:`notices` reports them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fedalloy.core import aspects, inputs
from fedalloy.core.errors import DataError, FedalloyError, SpecError
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart, LocalSolver, Objective, Task
from fedalloy.core.task import TaskWrapper
from fedalloy.core.types import Block
from fedalloy.tasks.losses.loss import Loss

_NAMED = 3
_PAGE = 4096
_NOBODY = bytes(_PAGE)
_examined: Any = WeakIdKeyDictionary()

ENCODING = (
    "number the classes from 0, alike for all clients, for example with names = sorted(set(labels)) and "
    "y = [names.index(label) for label in labels]"
)
"""Advice on how to turn labels into class numbers, for error messages."""
Naming = Callable[[int], str]


@dataclass(frozen=True)
class LabelLimits:
    """Which targets are allowed: class numbers below ``classes`` (None: any from 0), where an example has several also
    ``ignored``, and quantities within ``bounds`` (None: any). ``any_number`` allows every whole number."""

    classes: int | None = None
    ignored: int | None = None
    bounds: tuple[float, float] | None = None
    any_number: bool = False


def check_examples(x: Inputs, y: Inputs, limits: LabelLimits, owner: Tensor | None = None, name: Naming = str) -> None:
    """Refuse examples that are not finite, or whose targets are not within the limits.

    ``owner`` is the client of every row; without it, or where it is negative, rows belong to no client.
    """
    for leaf in inputs.leaves(x):
        if not _finite(leaf):
            bad = ~leaf.reshape(len(leaf), -1).isfinite().all(1)
            _refuse(bad, owner, name, "NaN or infinity in their features", "fill such gaps or leave these examples out")
    for leaf in inputs.leaves(y):
        if not _finite(leaf):
            bad = ~leaf.reshape(len(leaf), -1).isfinite().all(1)
            _refuse(bad, owner, name, "NaN or infinity as their target", "leave these examples out")
    if not isinstance(y, Tensor) or not len(y):
        return
    if not y.is_floating_point() and not limits.any_number:
        _check_labels(y, limits, owner, name)
    elif y.is_floating_point() and limits.bounds is not None:
        _check_bounds(y, *limits.bounds, owner, name)


def examined(task: Task) -> Task:
    """The task, if its data are usable. Data in memory are checked once, however many runs use them; data made on
    demand are checked when loaded, once per client."""
    pools = task.pools
    if not pools:
        return task if isinstance(task, ExaminedTask) else ExaminedTask(task)
    if task in _examined:
        return task
    limit = label_limits(task.objective, *_two(pools["train"]))
    for part, pool in pools.items():
        _check_block(pool, torch.arange(len(pool.size)), part, limit, _naming(task))
    _examined[task] = True
    return task


def label_limits(objective: Objective, x: Inputs, y: Inputs) -> LabelLimits:
    """The targets that a model and its loss allow. They are determined on two examples, so that a model that does not
    fit the data is found before round 1."""
    if not inputs.length(x) or "classify" not in objective.capabilities:
        return LabelLimits()
    device = inputs.device_of(x)
    params, buffers = ({name: leaf.to(device) for name, leaf in made.items()} for made in objective.init(Key.of(0)))
    rule, classes = objective.loss_rule, None
    try:
        with torch.no_grad():
            outputs = objective.outputs(params, buffers, x)
            if isinstance(rule, Loss):
                classes = rule.classes(outputs, y)
            if objective.loss_name is None or _several(y):
                objective.losses(outputs, _harmless(y, rule))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        if isinstance(error, FedalloyError):
            raise
        shapes = f"features of shape {inputs.shape_of(x)} and a label of type {next(inputs.leaves(y)).dtype}"
        raise SpecError(f"the model or its loss does not accept an example with {shapes}: {error}") from error
    if not isinstance(rule, Loss):
        return LabelLimits(ignored=-100)
    return LabelLimits(classes, rule.ignored, rule.bounds, rule.kinds == ("regression",))


@dataclass(frozen=True, eq=False)
class ExaminedTask(TaskWrapper):
    """A task whose clients' examples are checked when they are loaded for the first time."""

    seen: dict[str, dict[int, bytearray]] = field(default_factory=dict)
    limits: list[LabelLimits] = field(default_factory=list)

    def fingerprint(self) -> Mapping[str, Any] | None:
        """That of the wrapped task, because the examples are the same."""
        return self.task.fingerprint()

    def prefetch(self, ids: Callable[[], Tensor]) -> None:
        """Passed on: the wrapped task reads."""
        self.task.prefetch(ids)

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None = None) -> Task:
        """The moved task, to be checked on its device."""
        moved = self.task.to(device, dtype)
        return self if moved is self.task else ExaminedTask(moved)

    def data(self, part: DataPart, ids: Tensor) -> Block:
        """The examples of some clients; those loaded for the first time are checked."""
        block = self.task.data(part, ids)
        clients = ids.tolist()
        fresh = self._fresh(part, clients)
        if fresh:
            rows = slice(None) if len(fresh) == len(clients) else torch.tensor(fresh)
            some = Block(block.x, block.y, block.start.cpu()[rows], block.size.cpu()[rows])
            if not self.limits:
                self.limits.append(label_limits(self.objective, *_two(block)))
            _check_block(some, ids.cpu()[rows], part, self.limits[0], _naming(self.task))
            self._remember(part, [clients[row] for row in fresh])
        return block

    def _fresh(self, part: str, clients: list[int]) -> list[int]:
        """Places of clients that were not seen before."""
        pages = self.seen.setdefault(part, {})
        return [row for row, client in enumerate(clients) if not pages.get(client // _PAGE, _NOBODY)[client % _PAGE]]

    def _remember(self, part: str, clients: Iterable[int]) -> None:
        """Mark clients as checked: one byte per client, in pages, so that memory grows with the clients that were
        loaded and not with the population."""
        pages = self.seen[part]
        for client in clients:
            if (page := pages.get(client // _PAGE)) is None:
                page = pages[client // _PAGE] = bytearray(_PAGE)
            page[client % _PAGE] = 1


def notices(task: Task, solver: LocalSolver) -> tuple[str, ...]:
    """Notices for the user about the data of a task, and about a model of which nothing is shared; those about sizes
    only if the data are in memory."""
    told = (*task.notices, *_nothing_shared(task.objective, solver))
    if "train" not in task.pools:
        return told
    sizes = task.pools["train"].size[: task.population]
    batch = batch_of(solver)
    few = ((sizes > 0) & (sizes < batch)) if batch else torch.zeros_like(sizes, dtype=torch.bool)
    name = _naming(task)
    return (
        *told,
        *_notice(sizes == 0, name, "clients without training examples, which take no steps"),
        *_notice(few, name, f"clients with fewer training examples than a batch of {batch}"),
    )


def _nothing_shared(objective: Objective, solver: LocalSolver) -> list[str]:
    """A notice if all parameters stay at the clients although only some were meant: their names are not the expected
    ones."""
    local, params = aspects.local_leaves(solver), objective.forms.get("params", {})
    if not local or local.patterns == ("*",) or not params or local.split(params)[1]:
        return []
    meant = "none of them matches" if local.others else "all of them match"
    return [
        f"all parameters of the model stay at the clients, which train alone: {meant} names = "
        f"{', '.join(local.patterns)}; the model has {', '.join(list(params)[:_NAMED])}"
        + ", ..."
        * (len(params) > _NAMED)
    ]


def batch_of(solver: LocalSolver) -> int | None:
    """The batch size of a solver, or of its inner solver; None if it uses all examples in every step."""
    while not hasattr(solver, "batch_size"):
        inner = getattr(solver, "solver", None) or getattr(solver, "inner", None)
        if inner is None:
            return None
        solver = inner
    batch: int | None = solver.batch_size
    return batch


def _notice(which: Tensor, name: Naming, what: str) -> list[str]:
    clients = which.nonzero().flatten().tolist()
    if not clients:
        return []
    more = f" and {len(clients) - _NAMED} more" if len(clients) > _NAMED else ""
    named = ", ".join(name(client) for client in clients[:_NAMED])
    return [f"{what}: {len(clients)} of {len(which)} ({named}{more})"]


def _check_block(block: Block, ids: Tensor, part: str, limit: LabelLimits, name: Naming) -> None:
    """Check the rows of some clients; without a copy if they are the whole pool in order."""
    start, size = block.start.cpu(), block.size.cpu()
    owner = torch.repeat_interleave(ids, size)
    x, y = block.x, block.y
    side_by_side = inputs.length(x) == int(size.sum()) and bool((start == size.cumsum(0) - size).all())
    if not side_by_side:
        whose = torch.repeat_interleave(size)
        rows = torch.arange(len(whose)) + (start - size.cumsum(0) + size)[whose]
        x, y = (inputs.take(part, rows.to(inputs.device_of(part))) for part in (x, y))
    check_examples(x, y, limit, owner, lambda client: f"{name(client)} [{part}]" if part != "train" else name(client))


def _two(block: Block) -> tuple[Inputs, Inputs]:
    """The first two examples of a pool."""
    return inputs.take(block.x, slice(2)), inputs.take(block.y, slice(2))


def _check_labels(y: Tensor, limits: LabelLimits, owner: Tensor | None, name: Naming) -> None:
    low, high, classes = int(y.min()), int(y.max()), limits.classes
    if low >= 0 and (classes is None or high < classes):
        return
    bad = (y < 0) if classes is None else (y < 0) | (y >= classes)
    allowed = "of 0 or more" if classes is None else f"in 0..{classes - 1}"
    if y.dim() > 1 and limits.ignored is not None:
        bad &= y != limits.ignored
        allowed += f" or {limits.ignored}, which does not count"
    if not bool(bad.any()):
        return
    bad = bad.reshape(len(y), -1).any(1)
    _refuse(bad, owner, name, f"a label that is not a class number {allowed} (found {low}..{high})", ENCODING)


def _check_bounds(y: Tensor, low: float, high: float, owner: Tensor | None, name: Naming) -> None:
    bad = ((y < low) | (y > high)).reshape(len(y), -1).any(1)
    if bool(bad.any()):
        found = f"{float(y.min()):g}..{float(y.max()):g}"
        _refuse(
            bad, owner, name, f"a target outside of {low:g}..{high:g} (found {found})", "choose a loss for quantities"
        )


def _several(y: Inputs) -> bool:
    return any(leaf.dim() > 1 for leaf in inputs.leaves(y))


def _harmless(y: Inputs, rule: object) -> Inputs:
    """The targets of two examples with class 0 instead of numbers that are checked afterwards: a loss over classes
    fails on those with a message that names no example."""
    return torch.zeros_like(y) if isinstance(rule, Loss) and rule.kinds and isinstance(y, Tensor) else y


def _refuse(bad: Tensor, owner: Tensor | None, name: Naming, what: str, advice: str) -> None:
    bad, count = bad.cpu(), int(bad.sum())
    whose = ""
    if owner is not None:
        owner = owner.cpu()
        clients, wrong = owner[bad].unique(return_counts=True)
        counts = zip(clients[:_NAMED].tolist(), wrong[:_NAMED].tolist(), strict=True)
        told = [_whose(client, number, int((owner == client).sum()), name) for client, number in counts]
        more = f" and {len(clients) - _NAMED} more clients" if len(clients) > _NAMED else ""
        whose = f": {', '.join(told)}{more}"
    raise DataError(f"{count} of {len(bad)} examples have {what}{whose}; {advice}")


def _whose(client: int, wrong: int, size: int, name: Naming) -> str:
    return f"client {name(client)} ({wrong} of {size})" if client >= 0 else f"the test set for all ({wrong} of {size})"


def _finite(values: Tensor) -> bool:
    """Whether all numbers are finite; one pass without a copy, unless the sum overflows."""
    if not values.is_floating_point() or bool(values.sum().isfinite()):
        return True
    return bool(values.isfinite().all())


def _naming(task: Task) -> Naming:
    names = task.names
    return lambda client: f"{client} '{names[client]}'" if names is not None and client < len(names) else str(client)
