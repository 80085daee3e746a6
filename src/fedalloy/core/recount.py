"""The server recounts its clients' steps instead of trusting reported ones."""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.statistics import SizeLimits
from fedalloy.core.types import Context, Contributions, Work


def recounted(
    algorithm: Algorithm, cohort: Contributions, work: Work, ctx: Context, sizes: SizeLimits, fewer: bool = False
) -> Contributions:
    """The cohort with ``num_steps``, and with the solver's statistics that the weighting requires, recomputed from the
    clients' sizes, epochs and solver, for every engine and whatever clients reported. Where ``num_examples`` counts
    targets, the sizes are ``num_sequences``.

    A client whose size is unknown (its node does not send it, because no rule needs it) or impossible is left as it is.
    With ``fewer`` a client may have taken fewer steps than its size says: batches in which no target counts are none.
    That is for engines that count here; a node could claim it to get more weight.
    """
    if len(cohort) == 0 or "num_examples" not in cohort.stats:
        return cohort
    told, solver = cohort.stats.get("num_sequences", cohort.stats["num_examples"]), algorithm.solver
    everyone = sizes.look(told)[0]
    known = told if everyone else sizes.usable(told)
    # The cohort is a subset of the work's clients, so equal lengths mean the same clients.
    epochs = work.epochs if len(work) == len(cohort) else work.epochs[torch.searchsorted(work.ids, cohort.ids)]
    steps = aspects.count_steps(solver, (told if everyone else torch.where(known, told, 0.0)).long(), epochs).double()
    if fewer:
        steps = torch.minimum(steps, _told(cohort, "num_steps").nan_to_num(torch.inf).clamp(min=0))
    reported = cohort.stats.get("num_steps")
    if everyone and not algorithm.described and reported is not None and torch.equal(steps, reported):
        return cohort
    counted = {"num_steps": steps}
    if algorithm.described:
        counted |= aspects.describe(solver, steps, ctx)
    if not everyone:
        counted = {name: torch.where(known, values, _told(cohort, name)) for name, values in counted.items()}
    return cohort.with_stats(counted)


def _told(cohort: Contributions, name: str) -> Tensor:
    unknown = torch.full((len(cohort),), torch.nan, dtype=torch.float64)
    return cohort.stats.get(name, unknown).double()
