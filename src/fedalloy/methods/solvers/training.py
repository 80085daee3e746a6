"""Shared by all solvers that train a model: the schedule of batches, the step size and the local optimizer.

``LocalTraining`` has the settings and the plan; a solver implements ``begin``, ``step`` and ``end`` with the functions
of :mod:`fedalloy.methods.solvers.descent`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from fedalloy.core.aspects import BindsToData, CountsSteps, Describes, Fusing, planned_steps
from fedalloy.core.errors import SpecError
from fedalloy.core.fraction import fraction_of
from fedalloy.core.keys import Key
from fedalloy.core.protocols import LocalSolver, Shared
from fedalloy.core.search import Range
from fedalloy.core.types import Context, DataSpec, Plan, Stats, Tree
from fedalloy.methods.solvers.epoch_plans import all_epochs, count_steps, epoch_plan, planned
from fedalloy.methods.solvers.optimizers import GradientDescent, LocalAdagrad, LocalAdam, LocalOptimizer, RmsProp
from fedalloy.methods.solvers.phases import in_phases
from fedalloy.methods.solvers.schedules import Schedule, places

Leftover = Literal["auto", "keep", "merge", "drop"]
SEARCH, SEARCH_SCALED = Range(1e-3, 1.0, log=True), Range(1e-5, 0.1, log=True)
"""Where a search for the step size looks: that of sgd, and of optimizers that scale their steps themselves."""


@dataclass(frozen=True, kw_only=True)
class LocalTraining(LocalSolver, Describes, CountsSteps, BindsToData):
    """Local training by minibatches: shuffled each epoch, last partial batch kept, optimizer state reset each round.

    ``optimizer`` and its arguments are those of torch: ``momentum``, ``dampening`` and ``nesterov`` of sgd, ``betas``,
    ``eps`` and ``amsgrad`` of adam and adamw, ``smoothing`` (torch's alpha), ``eps``, ``momentum`` and ``centered`` of
    rmsprop, ``lr_decay``, ``accumulator`` (initial_accumulator_value) and ``eps`` of adagrad; ``weight_decay`` is 0
    unless given, for adamw too. ``clip_norm`` and ``clip_value`` limit gradients before the optimizer; ``accumulate``
    takes one step for the mean gradient of so many batches (of fewer at the end of a round). ``precision = "bf16"``
    trains under autocast, with parameters and optimizer in float32; ``"fp16"``, on CUDA, also scales every client's
    loss, from ``loss_scale`` on, and skips steps whose gradients overflow.

    ``schedule`` changes the step size over rounds or local steps. In short form ``decay`` multiplies it every
    ``decay_every`` rounds, and ``milestones`` are fractions of the run at which it is divided by ten.
    ``batch_size = None`` uses all examples in every step.

    ``leftover`` decides about a last batch with a single example: ``keep`` it, ``merge`` it with the batch before, or
    ``drop`` it; ``auto`` merges it if the model cannot be trained on one example (BatchNorm over vectors) and keeps it
    otherwise. A client with one example takes no step unless such batches are kept.
    """

    linear: ClassVar[bool] = True
    """Whether the update is linear in the gradients of the steps, as in plain SGD."""

    lr: float = 0.1
    epochs: int = 1
    batch_size: int | None = 32
    shuffle: bool = True
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    dampening: float = 0.0
    optimizer: Literal["sgd", "adam", "adamw", "rmsprop", "adagrad"] = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False
    smoothing: float = 0.99
    centered: bool = False
    lr_decay: float = 0.0
    accumulator: float = 0.0
    schedule: Schedule = Schedule()  # noqa: RUF009 (a frozen value)
    clip_norm: float | None = None
    clip_value: float | None = None
    accumulate: int = 1
    precision: Literal["full", "bf16", "fp16"] = "full"
    loss_scale: float = 65536.0
    decay: float = 1.0
    decay_every: int = 1
    milestones: tuple[float, ...] = ()
    leftover: Leftover = "auto"

    def __post_init__(self) -> None:
        _check(self)

    @property
    def second_epochs(self) -> int:
        """Epochs of a second phase after the ordinary ones (``Plan.phase`` is 1 there)."""
        return 0

    @property
    def provides(self) -> frozenset[str]:
        """Normalised lengths exist for updates that are sums of gradients with constant factors: not for Adam, clipped
        gradients or step sizes that change within a round."""
        known = self.linear and self.plain_but("precision") and self.precision != "fp16"
        return frozenset({"step_norm", "effective_steps"}) if known else frozenset()

    def plain_but(self, *others: str) -> bool:
        """Whether local steps are plain SGD: settings other than the ``PLAIN`` ones and ``others`` have their defaults,
        so that a kernel or formula that knows only these ignores nothing."""
        known = {*PLAIN, *others}
        mine = [one for one in fields(LocalTraining) if one.name not in known]
        same = all(getattr(self, one.name) == one.default for one in mine if one.name != "schedule")
        return same and not self.schedule.by_step

    @cached_property
    def rule(self) -> LocalOptimizer:
        """The local optimizer."""
        return _RULES[self.optimizer](self)

    @cached_property
    def composed(self) -> bool:
        """Whether a step is more than one of the optimizer."""
        clips = self.clip_norm is not None or self.clip_value is not None
        return clips or self.accumulate > 1 or self.precision == "fp16"

    @cached_property
    def direct(self) -> bool:
        """Whether a step is that of the optimizer, with the step size of the round, in full precision."""
        return not self.composed and self.precision == "full" and not self.schedule.by_step

    @property
    def uses_length(self) -> str:
        if self.schedule.over == "rounds" and self.schedule.needs_length:
            return f"schedule '{self.schedule.kind}' spreads the step size over the whole run"
        return "milestones are shares of the run at which the step size decreases" if self.milestones else ""

    def lr_at(self, round: int, rounds: int | None = None) -> float:
        passed = sum(round > fraction_of(rounds, fraction) for fraction in self.milestones) if rounds else 0
        factor = self.schedule.in_round(round, rounds)
        return float(self.lr * self.decay ** ((round - 1) // self.decay_every) * 0.1**passed) * factor

    def draws(self, plan: Plan, keys: Key, shared: Shared) -> Tree:
        """The factor of the step size in every step, and whether it takes the step of an accumulated gradient: only
        where these settings are used. A solver with draws of its own adds them to these."""
        made: Tree = {}
        if self.schedule.by_step or self.accumulate > 1:
            place, count = places(plan)
            if self.schedule.by_step:
                step, steps = place // self.accumulate, (count + self.accumulate - 1) // self.accumulate
                made["lr_factor"] = self.schedule.at(step.double(), steps.double())
            if self.accumulate > 1:
                made["flush"] = ((place + 1) % self.accumulate == 0) | (place + 1 == count)
        return made

    def step_lr(self, draws: Tree, ctx: Context) -> float | Tensor:
        """The size of this step."""
        return ctx.local_lr if "lr_factor" not in draws else ctx.local_lr * draws["lr_factor"]

    @property
    def needs_data_spec(self) -> bool:
        """False unless a subclass overrides ``bind``: the base method only adapts batch sizes, for BatchNorm."""
        return type(self).bind is not LocalTraining.bind

    def bind(self, data_spec: DataSpec) -> Self:
        """The same solver, without batches of one example if the model cannot be trained on them."""
        if data_spec.alone or self.leftover == "keep":
            return self
        if self.batch_size == 1:
            raise SpecError(
                "batch_size = 1: this model cannot be trained on one example at a time (BatchNorm over vectors has no "
                "spread to divide by); choose 2 or more, or GroupNorm"
            )
        return replace(self, leftover="merge") if self.leftover == "auto" else self

    def plan(self, sizes: Tensor, epochs: Tensor, keys: Key) -> Plan:
        if not self.second_epochs:  # the same numbers, without tensors
            told = epochs.tolist()
            alike = told.count(-1) == len(told)
            own = (self.epochs,) * len(told) if alike else tuple(self.epochs if some < 0 else some for some in told)
            return planned(tuple(sizes.tolist()), own, self.batch_size, keys if self.shuffle else None, self.leftover)
        first, whole = self.all_epochs(epochs)
        plan = epoch_plan(sizes, whole, self.batch_size, keys if self.shuffle else None, self.leftover)
        return in_phases(plan, first, whole)

    def count_steps(self, sizes: Tensor, epochs: Tensor) -> Tensor:
        if type(self).plan is not LocalTraining.plan:  # a subclass has its own plan: count its steps
            return planned_steps(self, sizes, epochs)
        counted = tuple(sizes.tolist()), tuple(epochs.tolist())
        return count_steps(*counted, self.epochs, self.second_epochs, self.batch_size, self.leftover).clone()

    def all_epochs(self, epochs: Tensor) -> tuple[Tensor, Tensor]:
        """The epochs of the first phase and of both; -1 means the solver's ``epochs``."""
        return all_epochs(epochs, self.epochs, self.second_epochs)

    def describe(self, steps: Tensor, ctx: Context) -> Stats:
        length = update_length(steps, self.momentum, self.nesterov)
        return {"step_norm": length, "effective_steps": length}


def plain_sgd_hint(training: LocalTraining, pull: float = 0.0, kind: str = "descent") -> Fusing | None:
    """The description that lets an engine fuse the local step; None with settings that fused kernels do not have."""
    if not training.plain_but():
        return None
    numbers = {"momentum": training.momentum, "nesterov": training.nesterov, "weight_decay": training.weight_decay}
    return Fusing(kind, {**numbers, "pull": pull} if pull else numbers)


def update_length(steps: Tensor, momentum: float = 0.0, nesterov: bool = False, pull: float = 0.0) -> Tensor:
    """FedNova's ``|a|_1``: the length of an update of ``steps`` unit gradients, in units of the step size.

    ``pull`` is ``lr * mu`` of a proximal term. The recursion reproduces the closed forms (``tau`` for plain
    SGD; ``[tau - rho (1 - rho^tau) / (1 - rho)] / (1 - rho)`` with momentum; ``(1 - (1 - lr mu)^tau) / (lr mu)``
    with the proximal term) and covers their combinations.

    >>> update_length(torch.tensor([1.0, 2.0]), momentum=0.5).tolist()
    [1.0, 2.5]
    """
    wanted = sorted(set(steps.tolist()))
    lengths = dict(zip(wanted, _lengths(wanted, momentum, nesterov, pull), strict=True))
    return torch.tensor([lengths[step] for step in steps.tolist()], dtype=steps.dtype)


def _lengths(wanted: list[float], momentum: float, nesterov: bool, pull: float) -> Iterator[float]:
    """The length after each number of steps, in ascending order. The loop ends early once a step is as long as the one
    before, or once a proximal term has stopped all movement."""
    length = velocity = gained = 0.0
    step, steady = 0, False
    for steps in wanted:
        while step < steps and not steady:
            gradient = 1.0 - pull * length
            velocity = momentum * velocity + gradient
            before, gained = gained, gradient + momentum * velocity if nesterov else velocity
            length, step, steady = length + gained, step + 1, gained == before
            steady &= not pull or length + gained == length
        yield length if pull else length + (steps - step) * gained * steady


PLAIN = (
    "lr", "epochs", "batch_size", "shuffle", "momentum", "nesterov", "weight_decay", "decay", "decay_every",
    "milestones", "leftover", "loss_scale",
)  # fmt: skip
"""Settings that plain SGD has; all others change the local step in another way."""
_RULES: dict[str, Callable[[LocalTraining], LocalOptimizer]] = {
    "sgd": lambda t: GradientDescent(t.momentum, t.dampening, t.nesterov, t.weight_decay),
    "adam": lambda t: LocalAdam(t.betas, t.eps, t.weight_decay, t.amsgrad),
    "adamw": lambda t: LocalAdam(t.betas, t.eps, t.weight_decay, t.amsgrad, decoupled=True),
    "rmsprop": lambda t: RmsProp(t.smoothing, t.eps, t.weight_decay, t.momentum, t.centered),
    "adagrad": lambda t: LocalAdagrad(t.eps, t.weight_decay, t.lr_decay, t.accumulator),
}
_USED_BY: dict[str, tuple[str, ...]] = {
    "momentum": ("sgd", "rmsprop"),
    "dampening": ("sgd",),
    "nesterov": ("sgd",),
    "betas": ("adam", "adamw"),
    "eps": ("adam", "adamw", "rmsprop", "adagrad"),
    "amsgrad": ("adam", "adamw"),
    "smoothing": ("rmsprop",),
    "centered": ("rmsprop",),
    "lr_decay": ("adagrad",),
    "accumulator": ("adagrad",),
}
"""Which optimizers use a setting; the others refuse it."""


def _check(training: LocalTraining) -> None:
    if training.lr <= 0:
        raise ValueError(f"lr must be above 0, got {training.lr}")
    if training.epochs < 0:
        raise ValueError(f"epochs must be 0 or more, got {training.epochs}")
    if training.batch_size is not None and training.batch_size < 1:
        raise ValueError(f"batch_size must be 1 or more (or none for full batches), got {training.batch_size}")
    if not 0 <= training.momentum < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {training.momentum}")
    if training.nesterov and not training.momentum:
        raise ValueError("nesterov needs momentum > 0")
    if training.weight_decay < 0:
        raise ValueError(f"weight_decay must be 0 or more, got {training.weight_decay}")
    if not all(0 <= beta < 1 for beta in training.betas) or training.eps < 0:
        raise ValueError(f"betas must lie in [0, 1) and eps be 0 or more, got {training.betas} and {training.eps}")
    _check_optimizer(training)
    _check_schedule(training)


def _check_optimizer(training: LocalTraining) -> None:
    """Refuse settings that the chosen optimizer would ignore, and those that it does not support."""
    for name, users in _USED_BY.items():
        value = getattr(training, name)
        if value != getattr(LocalTraining, name) and training.optimizer not in users:
            known = " and ".join(f"'{user}'" for user in users)
            raise ValueError(f"{name} = {value} is for optimizer {known}, not for '{training.optimizer}'")
    if training.dampening < 0 or (training.dampening and (training.nesterov or not training.momentum)):
        raise ValueError(f"dampening must be 0 or more, and needs momentum without nesterov, got {training.dampening}")
    if not 0 <= training.smoothing < 1 or training.lr_decay < 0 or training.accumulator < 0:
        raise ValueError(
            f"smoothing must lie in [0, 1), lr_decay and accumulator be 0 or more, got {training.smoothing}, "
            f"{training.lr_decay} and {training.accumulator}"
        )
    for name in ("clip_norm", "clip_value", "loss_scale"):
        if (limit := getattr(training, name)) is not None and limit <= 0:
            raise ValueError(f"{name} must be above 0, got {limit}")
    if training.accumulate < 1:
        raise ValueError(f"accumulate must be 1 or more batches, got {training.accumulate}")
    if training.loss_scale != LocalTraining.loss_scale and training.precision != "fp16":
        raise ValueError(f"loss_scale = {training.loss_scale} is for precision 'fp16', not for '{training.precision}'")


def _check_schedule(training: LocalTraining) -> None:
    if training.decay <= 0:
        raise ValueError(f"decay must be above 0 (1 keeps the step as it is), got {training.decay}")
    if training.decay_every < 1:
        raise ValueError(f"decay_every must be 1 or more, got {training.decay_every}")
    if not all(0 <= fraction <= 1 for fraction in training.milestones):
        raise ValueError(f"milestones are fractions of the run, in [0, 1], got {training.milestones}")
    if training.schedule.active and (training.decay != 1 or training.milestones):
        raise ValueError(
            f"schedule '{training.schedule.kind}' and decay or milestones both change the step size: give the "
            "schedule, which has them as kinds 'step' and 'milestones'"
        )
