"""Weights from the information in accuracy and participation: FedFa (Huang et al. 2020, arXiv:2012.10069)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Contributions, Info, State, Weights


@register("weighting", "information", aliases=("fedfa",))
@dataclass(frozen=True)
class Information(Weighting):
    """``p_k = alpha I_k + beta J_k``: shares proportional to ``-log2(a_k)`` (I) and to ``-log2(1 - u_k)`` (J).

    ``a_k`` is the client's share of all training accuracies (of the trained models), ``u_k`` its share of all
    participations, counting this round; both over the participants. So clients with a low accuracy or frequent
    participation count more. ``c`` replaces an argument of 0 in a logarithm; a single participant has weight 1; if all
    accuracies are 0, they count as equal. Data sizes are not used, so a client that took no step is left out.
    When to use it: clients of unequal difficulty that take part unequally often.

    >>> from fedalloy.core.types import Cohort
    >>> cohort = Cohort(torch.arange(2), {}, {"accuracy_after": torch.tensor([0.25, 0.75])})
    >>> rule = Information(alpha=1.0, beta=0.0)
    >>> rule.weigh(cohort, rule.init(2), None)[0]
    tensor([0.8281, 0.1719], dtype=torch.float64)
    """

    requires: ClassVar[frozenset[str]] = frozenset({"accuracy_after"})
    weight_bound: ClassVar[float | None] = 1.0
    counts_idle: ClassVar[bool] = False

    alpha: float = 0.5
    beta: float = 0.5
    c: float = 1e-6

    def __post_init__(self) -> None:
        if min(self.alpha, self.beta) < 0 or abs(self.alpha + self.beta - 1) > 1e-9:
            raise ValueError(f"alpha and beta must be 0 or more and sum to 1, got {self.alpha} and {self.beta}")
        if not 0 < self.c < 1:
            raise ValueError(f"c must lie in (0, 1), got {self.c}")

    def init(self, population: int) -> State:
        return {"participation": torch.zeros(population, dtype=torch.float64)}

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        accuracies = cohort.stats["accuracy_after"].double().nan_to_num(nan=0.0)
        counts = state["participation"].index_add(0, cohort.ids, torch.ones_like(accuracies))
        rarity = _informative(_shares(accuracies), self.c)
        presence = _informative(1 - _shares(counts[cohort.ids]), self.c)
        info = {"accuracy_information": rarity, "participation_information": presence}
        return self.alpha * rarity + self.beta * presence, {"participation": counts}, info


def _informative(chances: Tensor, c: float) -> Tensor:
    """Shares proportional to ``-log2`` of every chance; a single client gets 1."""
    return _shares(-torch.where(chances > 0, chances, c).log2())


def _shares(values: Tensor) -> Tensor:
    total = values.sum()
    return values / total if bool(total > 0) else torch.full_like(values, 1 / len(values))
