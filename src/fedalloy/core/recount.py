"""What the server knows of its clients' work without being told: it counts their steps itself."""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.statistics import SizeLimits
from fedalloy.core.types import Context, Contributions, Work


def recounted(
    algorithm: Algorithm, cohort: Contributions, work: Work, ctx: Context, sizes: SizeLimits
) -> Contributions:
    """The cohort with ``num_steps``, and with what the solver describes where the weighting wants it, computed from
    the clients' sizes, their epochs and the solver: whatever engine ran them, and whatever they say themselves.

    A client whose size is unknown (nobody needs it, and its node keeps it) or impossible is left as it is.
    """
    if len(cohort) == 0 or "num_examples" not in cohort.stats:
        return cohort
    told, solver = cohort.stats["num_examples"], algorithm.solver
    known = sizes.usable(told)
    everyone = bool(known.all())
    # Nobody is in the cohort who was not asked, so that equal numbers are the same clients.
    epochs = work.epochs if len(work) == len(cohort) else work.epochs[torch.searchsorted(work.ids, cohort.ids)]
    steps = aspects.count_steps(solver, (told if everyone else torch.where(known, told, 0.0)).long(), epochs).double()
    counted = {"num_steps": steps}
    if algorithm.described:
        counted |= aspects.describe(solver, steps, ctx)
    if not everyone:
        counted = {name: torch.where(known, values, _told(cohort, name)) for name, values in counted.items()}
    return cohort.with_stats(counted)


def _told(cohort: Contributions, name: str) -> Tensor:
    unknown = torch.full((len(cohort),), torch.nan, dtype=torch.float64)
    return cohort.stats.get(name, unknown).double()
