"""Clients that took no step, because they have no examples or their device had no time."""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core.types import Contributions


def took_no_step(cohort: Contributions) -> Tensor:
    """Which clients are idle, ``[C]``: those with 0 steps or, if the number of steps is unknown, with 0 examples.

    A client whose link failed is not idle: it planned its steps, and the run's settings decide how its re-sent model
    counts.

    >>> from fedalloy.core.types import Cohort
    >>> took_no_step(Cohort(torch.arange(3), {}, {"num_steps": torch.tensor([2.0, 0.0, 1.0])}))
    tensor([False,  True, False])
    """
    unknown = torch.full((len(cohort),), torch.nan)
    steps, sizes = cohort.stats.get("num_steps", unknown), cohort.stats.get("num_examples", unknown)
    return (steps == 0) | (steps.isnan() & (sizes == 0))


def nobody_idle(cohort: Contributions) -> bool:
    """Whether every client is known to have taken a step: the usual case, in one comparison."""
    steps = cohort.stats.get("num_steps")
    return steps is not None and len(steps) > 0 and float(steps.min()) > 0


def left_out(cohort: Contributions, idle: Tensor, needed: frozenset[str], counts: bool) -> Tensor:
    """Which ``idle`` clients do not count: all of them or, if idle clients count, those without a statistic that is
    ``needed`` (without examples there is no loss)."""
    if not counts:
        return idle
    lacking = [cohort.stats[name].isnan() for name in sorted(needed & cohort.stats.keys())]
    return idle & torch.stack(lacking).any(0) if lacking else torch.zeros_like(idle)
