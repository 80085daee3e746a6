"""Schedules of the local step size, over the rounds of a run or over the local steps of a round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core.arguments import checked
from fedalloy.core.types import Plan

Shape = Literal["constant", "step", "milestones", "exponential", "cosine", "linear"]
_OWN: dict[str, tuple[str, ...]] = {
    "constant": (),
    "step": ("factor", "every"),
    "milestones": ("factor", "milestones"),
    "exponential": ("factor",),
    "cosine": ("floor",),
    "linear": ("floor",),
}
"""The arguments that each shape uses, besides ``over`` and ``warmup``."""


@checked("schedule")
@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The factor of the step size at unit t = 0, 1, ..., a round or a local step (``over``).

    During the first ``warmup`` units it is ``(t + 1) / (warmup + 1)``; then, t counted from there and T units left,
    ``step`` is ``factor ^ (t // every)``, ``exponential`` ``factor ^ t``, ``milestones`` ``factor`` to the number of
    passed milestones (units, or below 1 shares of T), ``cosine`` ``floor + (1 - floor) (1 + cos(pi t / T)) / 2``,
    ``linear`` goes from 1 to ``floor``. These are torch's schedulers. Over steps it starts again in every round, as
    the optimizer does; a step is one of the optimizer, however many batches it accumulates.

    >>> Schedule(kind="linear", warmup=1).at(torch.arange(5.0), torch.tensor(5.0)).tolist()
    [0.5, 1.0, 0.75, 0.5, 0.25]
    """

    kind: Shape = "constant"
    over: Literal["rounds", "steps"] = "rounds"
    warmup: int = 0
    factor: float = 0.1
    every: int = 1
    milestones: tuple[float, ...] = ()
    floor: float = 0.0

    def __post_init__(self) -> None:
        for name in ("factor", "every", "milestones", "floor"):
            if getattr(self, name) != getattr(Schedule, name) and name not in _OWN[self.kind]:
                users = [kind for kind, own in _OWN.items() if name in own]
                raise ValueError(f"{name} is for the schedules {', '.join(users)}, not for '{self.kind}'")
        if self.warmup < 0 or self.every < 1:
            raise ValueError(f"warmup must be 0 or more and every 1 or more, got {self.warmup} and {self.every}")
        if self.factor <= 0 or not 0 <= self.floor <= 1:
            raise ValueError(f"factor must be above 0 and floor lie in [0, 1], got {self.factor} and {self.floor}")
        if (self.kind == "milestones") != bool(self.milestones) or not all(at > 0 for at in self.milestones):
            raise ValueError(
                f"schedule 'milestones' needs milestones: units above 0, or shares of the run below 1, got "
                f"{self.milestones}"
            )

    @property
    def active(self) -> bool:
        """Whether the step size changes at all."""
        return self.kind != "constant" or self.warmup > 0

    @property
    def by_step(self) -> bool:
        """Whether the step size changes within a round."""
        return self.active and self.over == "steps"

    @property
    def needs_length(self) -> bool:
        """Whether it depends on the number of units."""
        return self.kind in ("cosine", "linear") or any(at < 1 for at in self.milestones)

    def in_round(self, round: int, rounds: int | None) -> float:
        """The factor of a round; rounds count from 1."""
        if not self.active or self.over == "steps":
            return 1.0
        if rounds is None and self.needs_length:
            raise ValueError(f"schedule '{self.kind}' needs the number of rounds of the run, which is not known here")
        return float(self.at(torch.tensor(round - 1.0, dtype=torch.float64), torch.tensor(float(rounds or round))))

    def at(self, unit: Tensor, units: Tensor) -> Tensor:
        """The factor at units 0, 1, ... of ``units``."""
        since, left = (unit - self.warmup).clamp(min=0), (units - self.warmup).clamp(min=1)
        return torch.where(unit < self.warmup, (unit + 1) / (self.warmup + 1), self._after_warmup(since, left))

    def _after_warmup(self, unit: Tensor, units: Tensor) -> Tensor:
        if self.kind == "step":
            return self.factor ** (unit // self.every)
        if self.kind == "exponential":
            return self.factor**unit
        if self.kind == "milestones":
            # The small number undoes the rounding of products such as 0.29 * 100.
            passed = [unit >= (at if at >= 1 else (at * units + 1e-9).floor()) for at in self.milestones]
            return self.factor ** torch.stack([one.to(unit.dtype) for one in passed]).sum(0)
        if self.kind == "cosine":
            return self.floor + (1 - self.floor) * (1 + torch.cos(math.pi * unit / units)) / 2
        if self.kind == "linear":
            return 1 + (self.floor - 1) * (unit / units).clamp(max=1)
        return torch.ones_like(unit)


def places(plan: Plan) -> tuple[Tensor, Tensor]:
    """The place of every batch among the client's batches of its phase, and their number, ``[C, S]`` each."""
    taken, place, count = plan.mask.any(-1), torch.zeros_like(plan.phase), torch.zeros_like(plan.phase)
    for phase in plan.phase.unique().tolist():
        mine = taken & (plan.phase == phase)
        place = torch.where(mine, mine.cumsum(1) - 1, place)
        count = torch.where(mine, mine.sum(1, keepdim=True), count)
    return place, count
