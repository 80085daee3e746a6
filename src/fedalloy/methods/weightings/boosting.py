"""Weights from accuracies on own and other clients' data: FedBoosting (Ren et al. 2020, arXiv:2007.07296)."""

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

    ``V`` is measured on the clients' validation parts, which takes an extra exchange per round for this rule only; the
    task needs ``valid_fraction`` above 0. The paper writes "results"; losses would invert the preference, so both are
    accuracies in [0, 1]. The softmax of such close numbers is nearly uniform. A client without validation examples
    gives no scores; the mean of the other scores replaces them. A client that took no step is left out, because the
    received model would be weighted like a trained one.
    When to use it: some clients overfit their data, and clients may evaluate each other's models.

    >>> from fedalloy.core.types import Cohort
    >>> stats = {"accuracy_after": torch.tensor([0.9, 0.9])}
    >>> cohort = Cohort(torch.arange(2), {}, stats, torch.tensor([[1.0, 0.8], [0.2, 1.0]]))
    >>> Boosting().weigh(cohort, {}, None)[0]
    tensor([0.5744, 0.4256], dtype=torch.float64)
    """

    requires: ClassVar[frozenset[str]] = frozenset({"accuracy_after", "cross_score"})
    reads_payload: ClassVar[bool] = True
    """True: clients receive each other's models, so secure aggregation is impossible."""
    weight_bound: ClassVar[float | None] = 1.0
    counts_idle: ClassVar[bool] = False

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        if cohort.cross is None:
            raise AlgorithmError("weighting 'Boosting' needs cross scores: add them with core.cross.exchange_scores")
        home = cohort.stats["accuracy_after"].double().nan_to_num(nan=0.0).softmax(0)
        abroad = foreign_scores(cohort.cross.double())
        return (home * abroad).softmax(0), state, {"train_score": home, "cross_score": abroad}


def foreign_scores(cross: Tensor) -> Tensor:
    """``sum_{j != i} V_ij`` for every row; unknown scores (NaN) are replaced by the mean of the row's known ones.

    >>> foreign_scores(torch.tensor([[1.0, 0.5, torch.nan], [0.2, 1.0, torch.nan], [0.0, 0.5, torch.nan]]))
    tensor([1.0000, 0.4000, 0.5000])
    """
    known = ~cross.isnan() & ~torch.eye(len(cross), dtype=torch.bool)
    total = torch.where(known, cross, 0.0).sum(1)
    return total * (len(cross) - 1) / known.sum(1).clamp(min=1)
