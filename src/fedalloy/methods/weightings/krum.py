"""The update closest to its nearest neighbours: Krum and multi-Krum (Blanchard et al. 2017, arXiv:1703.02757)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedalloy.core.errors import RoundRefused
from fedalloy.core.protocols import Weighting
from fedalloy.core.registry import register
from fedalloy.core.types import Context, Contributions, Info, State, Weights
from fedalloy.methods.weightings.pairs import squared_distances


@register("weighting", "krum")
@dataclass(frozen=True)
class Krum(Weighting):
    """Weight 1 for the client that is closest to its ``m - f - 2`` nearest neighbours, 0 for all others.

    ``score_i = sum |delta_i - delta_j|^2`` over those neighbours; the smallest score wins, and the smaller id in a tie.
    ``f`` is ``byzantine``, how many of the m clients of a round may send anything; the guarantee needs
    ``m >= 2 f + 3``. If f is not 0, a smaller cohort is refused before the first round, and a round with fewer usable
    contributions has no effect. Buffers, and everything else that is averaged, are the chosen client's. A client that
    took no step is left out: its zero update would lie between updates that pull apart, and win.
    When to use it: a known number of hostile clients, and clients so similar that one can represent all.

    >>> from fedalloy.core.types import Cohort
    >>> from fedalloy.core.keys import Key
    >>> cohort = Cohort(torch.arange(4), {"delta": {"w": torch.tensor([[1.0], [1.1], [1.3], [900.0]])}}, {})
    >>> Krum().weigh(cohort, {}, Context(1, 4, Key.of(0)))[0]
    tensor([0., 1., 0., 0.], dtype=torch.float64)
    """

    requires: ClassVar[frozenset[str]] = frozenset()
    reads_payload: ClassVar[bool] = True
    asks: ClassVar[frozenset[str]] = frozenset({"chunks"})
    weight_bound: ClassVar[float | None] = 1.0
    counts_idle: ClassVar[bool] = False
    guards_all_parts: ClassVar[bool] = True

    byzantine: int = 0

    def __post_init__(self) -> None:
        _check_count(self.byzantine)

    def least_clients(self, population: int) -> int:
        return least_for(self.byzantine)

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        scores = krum_scores(cohort, self.byzantine)
        return _chosen(scores, cohort.ids, 1), state, {"scores": scores}


@register("weighting", "multi_krum")
@dataclass(frozen=True)
class MultiKrum(Weighting):
    """Weight ``1 / keep`` for the ``keep`` clients with the smallest Krum scores, 0 for all others.

    ``keep = None`` keeps m - f clients (f is ``byzantine``); a round with fewer clients than ``keep`` keeps all of
    them. Scores, their guarantee, refusals and clients left out are as in ``krum``. Data sizes do not count; buffers,
    and everything else that is averaged, are means over the chosen clients.
    When to use it: a known number of hostile clients, and the honest ones should be averaged.

    >>> from fedalloy.core.types import Cohort
    >>> from fedalloy.core.keys import Key
    >>> cohort = Cohort(torch.arange(4), {"delta": {"w": torch.tensor([[1.0], [1.1], [1.3], [900.0]])}}, {})
    >>> MultiKrum(keep=3).weigh(cohort, {}, Context(1, 4, Key.of(0)))[0]
    tensor([0.3333, 0.3333, 0.3333, 0.0000], dtype=torch.float64)
    """

    requires: ClassVar[frozenset[str]] = frozenset()
    reads_payload: ClassVar[bool] = True
    asks: ClassVar[frozenset[str]] = frozenset({"chunks"})
    weight_bound: ClassVar[float | None] = 1.0
    counts_idle: ClassVar[bool] = False
    guards_all_parts: ClassVar[bool] = True

    byzantine: int = 0
    keep: int | None = None

    def __post_init__(self) -> None:
        _check_count(self.byzantine)
        if self.keep is not None and self.keep < 1:
            raise ValueError(f"keep must be at least 1, got {self.keep}")

    def least_clients(self, population: int) -> int:
        return least_for(self.byzantine)

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        scores = krum_scores(cohort, self.byzantine)
        keep = len(cohort) - self.byzantine if self.keep is None else min(self.keep, len(cohort))
        return _chosen(scores, cohort.ids, keep), state, {"scores": scores}


def least_for(byzantine: int) -> int:
    """The fewest clients among which Krum tolerates this many hostile ones."""
    return 2 * byzantine + 3 if byzantine else 1


def krum_scores(cohort: Contributions, byzantine: int) -> Tensor:
    """Every client's sum of squared distances to its ``m - f - 2`` nearest others, but to at least one."""
    clients = len(cohort)
    least = least_for(byzantine)
    if clients < least:
        raise RoundRefused(
            f"Krum tolerates {byzantine} hostile clients only among at least {least}, but the round has {clients}: "
            "sample more clients or lower 'byzantine'"
        )
    distances = squared_distances(cohort)
    nearest = distances.sort(dim=1).values[:, 1:]  # the first is the client itself
    return nearest[:, : max(1, clients - byzantine - 2)].sum(1)


def _chosen(scores: Tensor, ids: Tensor, keep: int) -> Tensor:
    by_id = ids.cpu().argsort()
    ranked = by_id[scores[by_id].argsort(stable=True)]
    weights = torch.zeros_like(scores)
    weights[ranked[:keep]] = 1 / keep
    return weights


def _check_count(byzantine: int) -> None:
    if byzantine < 0:
        raise ValueError(f"byzantine, the number of hostile clients in a round, must be at least 0, got {byzantine}")
