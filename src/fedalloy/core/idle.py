"""Clients that took no step: they have no examples, or their device had no time for one."""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core.types import Contributions


def took_no_step(cohort: Contributions) -> Tensor:
    """Who is idle, ``[C]``: by the number of steps or, where nobody knows it, by having no examples.

    A client whose link failed is not: it planned its steps, and what it re-sends counts as the run says.

    >>> from fedalloy.core.types import Cohort
    >>> took_no_step(Cohort(torch.arange(3), {}, {"num_steps": torch.tensor([2.0, 0.0, 1.0])}))
    tensor([False,  True, False])
    """
    unknown = torch.full((len(cohort),), torch.nan)
    steps, sizes = cohort.stats.get("num_steps", unknown), cohort.stats.get("num_examples", unknown)
    return (steps == 0) | (steps.isnan() & (sizes == 0))


def left_out(cohort: Contributions, idle: Tensor, needed: frozenset[str], counts: bool) -> Tensor:
    """Which of the ``idle`` do not count: all, or, where idle clients do count, those who lack a statistic that is
    ``needed`` (without examples there is no loss)."""
    if not counts:
        return idle
    lacking = [cohort.stats[name].isnan() for name in sorted(needed & cohort.stats.keys())]
    return idle & torch.stack(lacking).any(0) if lacking else torch.zeros_like(idle)
