"""Updates normalised by the length of each client's local steps: FedNova (Wang et al. 2020, arXiv:2007.07481)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Contributions, Info, State, Weights


@register("weighting", "nova", aliases=("fednova",))
@dataclass(frozen=True)
class Nova(Weighting):
    """``weight_k = tau_eff p_k / |a_k|_1`` with ``tau_eff = sum_k p_k tau_k``; weights need not sum to one.

    ``|a_k|_1`` is the length of the client's update for unit gradients; ``tau_k`` is the same length, or the plain
    number of steps with a proximal term. Normalisation happens after plain local training. A client that took no step
    keeps its share ``p_k`` but adds nothing to the update or to ``tau_eff``.
    When to use it: clients that take different numbers of local steps.
    """

    requires: ClassVar[frozenset[str]] = frozenset({"num_examples", "step_norm", "effective_steps"})

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        lengths = cohort.stats["step_norm"]
        moved = lengths > 0
        sizes = cohort.stats["num_examples"]
        shares = sizes / sizes.sum().clamp(min=1e-12)
        effective = (shares * cohort.stats["effective_steps"]).sum()
        weights = torch.where(moved, effective * shares / lengths.clamp(min=1e-12), 0.0)
        return weights, state, {"tau_eff": effective, "a_norm": lengths}
