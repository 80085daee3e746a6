"""The number of examples that each client reported in its first answer in a run; it may not change later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.statistics import MAX_EXAMPLES, SizeLimits, Statistic
from fedalloy.core.types import Contributions


@dataclass
class KnownSizes:
    """One number per client of the population, NaN for those that have not contributed yet; part of every checkpoint.

    >>> from fedalloy.core.types import Cohort
    >>> sizes = KnownSizes(3)
    >>> sizes.learn(Cohort(torch.tensor([1]), {}, {"num_examples": torch.tensor([40.0])}))
    >>> sizes.limits(torch.tensor([0, 1])).known
    tensor([nan, 40.], dtype=torch.float64)
    """

    population: int
    most: float = MAX_EXAMPLES
    whole: bool = True
    _known: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._known = torch.full((self.population,), torch.nan, dtype=torch.float64)

    @property
    def statistic(self) -> Statistic:
        """The bounds for any client."""
        return SizeLimits(self.most, whole=self.whole).statistic

    def limits(self, ids: Tensor) -> SizeLimits:
        """The bounds for some clients in this round."""
        return SizeLimits(self.most, self._known[ids], self.whole)

    def learn(self, cohort: Contributions, limits: SizeLimits | None = None) -> None:
        """Fix the sizes of clients that answered for the first time with a valid number; ``limits`` are those of the
        cohort, if they are at hand."""
        if len(cohort) == 0 or "num_examples" not in cohort.stats:
            return
        limits, told = limits or self.limits(cohort.ids), cohort.stats["num_examples"]
        usable, same, known = limits.look(told)
        assert limits.known is not None
        if known:
            return
        if usable and same:  # all that are not known yet are new
            self._known[cohort.ids] = told.double()
            return
        new = limits.known.isnan() & limits.usable(told)
        self._known[cohort.ids] = torch.where(new, told.double(), limits.known)

    def to_state(self) -> dict[str, Tensor]:
        """For a checkpoint: the clients that contributed, and their sizes."""
        ids = (~self._known.isnan()).nonzero().flatten()
        return {"ids": ids, "num_examples": self._known[ids]}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Go back to a checkpoint; if it holds no sizes, all clients may report one again."""
        self._known.fill_(torch.nan)
        if state:
            self._known[state["ids"]] = state["num_examples"]
