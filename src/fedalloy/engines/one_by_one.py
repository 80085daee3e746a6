"""One client after another with the fastest kernel there is for a single client on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.applying import Applied, plain, vmapped
from fedalloy.core.blocks import blocks
from fedalloy.core.gathering import Gathering
from fedalloy.core.program import Kernel
from fedalloy.core.protocols import Objective, Outcome, Shared, Task
from fedalloy.core.types import Block, Context, State, Work
from fedalloy.engines.batched import dense_of
from fedalloy.engines.kernels import fused_interpolated, fused_mixed, fused_phases, inplace_sgd
from fedalloy.engines.kernels.fused import Dense, accepts
from fedalloy.engines.kinds import InterpolatedSgd, MixedSgd, PlainSgd, TwoPhaseSgd, setting_of
from fedalloy.engines.loop import planned, run_one

PLANNED_AT_ONCE = 32
_PAIRS: dict[type, Any] = {
    InterpolatedSgd: fused_interpolated.train, TwoPhaseSgd: fused_phases.train, MixedSgd: fused_mixed.train,
}  # fmt: skip
"""The kernels for two models of a client."""


@dataclass(frozen=True)
class KernelFor:
    """Chooses the kernel for the local steps on some data, and how it applies rules to trees: ``inplace_sgd`` for plain
    SGD, the fused kernel ``pair`` for SGD on two models of dense ``layers``, otherwise None, the plain kernel. With
    ``casts`` the model gets whole numbers as floats."""

    plain_sgd: bool
    pair: Any = None
    layers: tuple[Dense, ...] | None = None
    casts: bool = False

    @staticmethod
    def of(algorithm: Algorithm, objective: Objective, shared: Shared) -> KernelFor:
        """The choice for an algorithm and a model."""
        setting = setting_of(algorithm)
        pair = None if shared["buffers"] else _PAIRS.get(type(setting))
        layers = dense_of(objective, shared) if pair else None
        plain_sgd, casts = isinstance(setting, PlainSgd), not objective.takes_integers
        return KernelFor(plain_sgd, pair, layers, casts)

    def __call__(self, data: Block) -> tuple[Kernel | None, Applied]:
        if self.layers is not None and accepts(self.layers, data, self.casts):
            return partial(self.pair, self.layers), vmapped
        return inplace_sgd.train if self.plain_sgd else None, plain


def run_clients(
    algorithm: Algorithm,
    task: Task,
    shared: Shared,
    states: Mapping[int, State],
    work: Work,
    ctx: Context,
    kernel: KernelFor,
) -> Outcome:
    """What the loop does, with this kernel."""
    data = task.data("train", work.ids)
    gathering = Gathering(work, exact=algorithm.exact_norms, like=algorithm.templates(shared))
    kept: dict[int, State] = {}
    failures: dict[int, str] = {}
    with torch.no_grad():
        parts = (planned(algorithm, some, rows, shared, ctx) for some, rows in blocks(work, data, PLANNED_AT_ONCE))
        for block in chain.from_iterable(parts):
            client = int(block.work.ids)
            found = run_one(algorithm, task, shared, states[client], block, ctx, *kernel(block.data))
            if reason := gathering.add_one(client, found):
                failures[client] = reason
            else:
                kept[client] = found.state
    return Outcome(gathering.cohort(), kept, failures)
