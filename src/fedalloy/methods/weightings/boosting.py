"""Weights from how well models do at home and abroad: FedBoosting (Ren et al. 2020, arXiv:2007.07296)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core.errors import AlgorithmError
from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Contributions, Info, State, Weights


@register("weighting", "boosting", aliases=("fedboosting",))
@dataclass(frozen=True)
class Boosting(Weighting):
    """``p = softmax_i(softmax(T)_i sum_{j != i} V_ij)``: T is training accuracy, ``V_ij`` that of model i at client j.

    ``V`` is measured on the clients' validation parts, in one more exchange per round that only this rule pays for;
    the task needs ``valid_fraction`` above 0. The source speaks of "results"; with losses the preference would be
    inverted, so both are accuracies in [0, 1]. The softmax of numbers so close is nearly uniform. A client without
    validation examples judges nobody: the mean of those who do stands in for it. A client that took no step is left
    out: the received model would be weighed as if it were one of the trained.
    When to use it: some clients overfit their own data, and trying models on foreign data is allowed.

    >>> from fedalloy.core.types import Cohort
    >>> stats = {"accuracy_after": torch.tensor([0.9, 0.9])}
    >>> cohort = Cohort(torch.arange(2), {}, stats, torch.tensor([[1.0, 0.8], [0.2, 1.0]]))
    >>> Boosting().weigh(cohort, {}, None)[0]
    tensor([0.5744, 0.4256], dtype=torch.float64)
    """

    requires: ClassVar[frozenset[str]] = frozenset({"accuracy_after", "cross_score"})
    reads_payload: ClassVar[bool] = True
    """Clients are sent each other's models, so nothing can be masked."""
    weight_bound: ClassVar[float | None] = 1.0
    counts_idle: ClassVar[bool] = False

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        if cohort.cross is None:
            raise AlgorithmError("weighting 'Boosting' needs cross scores: let core.cross.exchange_scores add them")
        home = cohort.stats["accuracy_after"].double().nan_to_num(nan=0.0).softmax(0)
        abroad = foreign_scores(cohort.cross.double())
        return (home * abroad).softmax(0), state, {"train_score": home, "cross_score": abroad}


def foreign_scores(cross: Tensor) -> Tensor:
    """``sum_{j != i} V_ij`` for every row, where unknown scores (NaN) count as the mean of the known ones.

    >>> foreign_scores(torch.tensor([[1.0, 0.5, torch.nan], [0.2, 1.0, torch.nan], [0.0, 0.5, torch.nan]]))
    tensor([1.0000, 0.4000, 0.5000])
    """
    known = ~cross.isnan() & ~torch.eye(len(cross), dtype=torch.bool)
    total = torch.where(known, cross, 0.0).sum(1)
    return total * (len(cross) - 1) / known.sum(1).clamp(min=1)
