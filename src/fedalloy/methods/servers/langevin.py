"""Langevin dynamics at the server (Welling and Teh 2011): samples descend the combined energy gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core.protocols import ServerOptimizer
from fedalloy.core.registry import register
from fedalloy.core.types import Context, DataSpec, Info, State, Tree

Schedule = Literal["diffusion", "half_cosine", "constant"]
_OFFSET = 0.008


@register("server", "langevin")
@dataclass(frozen=True)
class Langevin(ServerOptimizer):
    """``x <- x - step_t G + noise z``, then clipped to ``[low, high]``. It subtracts, unlike the other servers, because
    clients send the gradient of an energy.

    ``step_t`` goes from ``start`` to ``end``: ``diffusion`` uses the noise schedule of diffusion models, which stays
    near ``start`` for most of the run; ``half_cosine`` changes smoothly; ``constant`` keeps ``start``. The default of
    ``low`` and ``high`` is the bounds declared for the data, if any.
    When to use it: with solver ``energy``, whose clients send gradients of an energy.
    """

    start: float = 10.0
    end: float = 0.01
    noise: float = 0.0
    schedule: Schedule = "diffusion"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or self.end < 0 or self.noise < 0:
            raise ValueError(f"start, end and noise must be 0 or more, got {self.start}, {self.end} and {self.noise}")

    @property
    def uses_length(self) -> str:
        return "" if self.schedule == "constant" else f"schedule '{self.schedule}' spreads its steps over the whole run"

    def bind(self, data_spec: DataSpec) -> Langevin:
        low, high = data_spec.bounds or (None, None)
        return replace(self, low=low if self.low is None else self.low, high=high if self.high is None else self.high)

    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        step = self.step_at(ctx.round, ctx.rounds)
        moved = {name: self._moved(leaf, update[name], step, name, ctx) for name, leaf in target.items()}
        return moved, state, {"step": torch.tensor(step, dtype=torch.float64)}

    def step_at(self, round: int, rounds: int | None) -> float:
        """The step size in a round; rounds count from 1."""
        if self.schedule == "constant":
            return self.start
        if rounds is None:
            raise ValueError(f"schedule '{self.schedule}' needs the number of rounds: give it, or use 'constant'")
        passed = diffusion(round, rounds) if self.schedule == "diffusion" else half_cosine(round, rounds)
        return self.start + (self.end - self.start) * passed

    def _moved(self, leaf: Tensor, update: Tensor, step: float, name: str, ctx: Context) -> Tensor:
        moved = leaf - step * update
        if self.noise:
            drawn = ctx.key.fold("langevin", name).normal(*leaf.shape, dtype=leaf.dtype, device=leaf.device)
            moved = moved + self.noise * drawn
        return moved if self.low is None and self.high is None else moved.clamp(self.low, self.high)


def diffusion(round: int, rounds: int) -> float:
    """``1 - a_t / a_(t-1)`` with ``a_t = cos^2(pi/2 (t/T + 0.008) / 1.008)``: the betas of a cosine noise schedule
    (Nichol and Dhariwal 2021, arXiv:2102.09672).

    >>> [round(diffusion(t, 500), 3) for t in (1, 401, 500)]
    [0.0, 0.019, 1.0]
    """
    before, after = _kept((round - 1) / rounds), _kept(round / rounds)
    return 1.0 - after / before


def half_cosine(round: int, rounds: int) -> float:
    """``(1 - cos(pi t)) / 2`` with t from 0 in the first round to 1 in the last."""
    return 0.5 * (1.0 - math.cos(math.pi * (round - 1) / max(1, rounds - 1)))


def _kept(share: float) -> float:
    return math.cos((share + _OFFSET) / (1 + _OFFSET) * math.pi / 2) ** 2
