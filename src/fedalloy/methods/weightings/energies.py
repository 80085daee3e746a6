"""A weight for every client and every synthetic sample: FedEvg's (Hahn's thesis, chapter IV).

Energies are logits, as in Grathwohl et al. 2020, arXiv:1912.03263.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Contributions, Info, State, Weights


@register("weighting", "energies", aliases=("fedevg",))
@dataclass(frozen=True)
class Energies(Weighting):
    """``n_k e_kj / sum_k n_k e_kj``: data size times the factor of client k for sample j, ``e_kj = exp(sign f)``.

    A factor is e, 1 or 1/e, so a client that finds a sample likely counts at most e^2 times as much per example as one
    that does not. A client that took no step counts by its examples, with a gradient of zero and factors of 1.
    When to use it: with solver ``energy``, whose clients send these factors.

    >>> from fedalloy.core.types import Cohort
    >>> sent = {"energy_grad": {"x": torch.ones(2, 1, 3)}, "factors": {"x": torch.tensor([[3.0], [1.0]])}}
    >>> cohort = Cohort(torch.arange(2), sent, {"num_examples": torch.tensor([1.0, 1.0])})
    >>> from fedalloy.core.keys import Key
    >>> Energies().weigh(cohort, {}, Context(1, 2, Key.of(0)))[0].tolist()
    [[0.75], [0.25]]
    """

    reads_payload: ClassVar[bool] = True
    asks: ClassVar[frozenset[str]] = frozenset({"stack"})
    reads: ClassVar[frozenset[str]] = frozenset({"energy_grad", "factors"})

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        sent = cohort.stack("factors")["x"].double()
        sizes = cohort.stats["num_examples"].double().to(sent.device)
        shares = sizes.unsqueeze(1) * sent
        total = shares.sum(0)
        weights = torch.where(total > 0, shares / total.clamp(min=torch.finfo(torch.float64).tiny), shares)
        return weights, state, {"factors": sent}
