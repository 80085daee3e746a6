"""The numbers that clients send beside their arrays: what each means and between which values it must lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, isfinite

import torch
from torch import Tensor

MAX_EXAMPLES = 10_000_000
"""The most examples a client may claim unless a run says otherwise."""
MAX_STEPS = 1_000_000_000
"""The most local steps of one round that anybody believes in."""


@dataclass(frozen=True)
class Statistic:
    """One number per client: its meaning and its range, both ends included.

    ``whole``: it counts something. ``least`` is the smallest value above 0 (the ``step_norm`` of a client that took a
    step is at least 1). One that ``overflows`` need not be a finite number for a client with examples: then it was too
    large, and rules count such a client as the worst served.
    """

    meaning: str
    low: float = -inf
    high: float = inf
    whole: bool = False
    least: float = 0.0
    overflows: bool = False

    def problem(self, value: float) -> str | None:
        """Why no client can have this value; None when one can.

        >>> Statistic("a share", 0, 1).problem(1.5)
        'is 1.5; allowed: 0 to 1'
        """
        if not isfinite(value):
            return "is not finite"
        gap = 0 < value < self.least
        if self.low <= value <= self.high and not gap and not (self.whole and value != int(value)):
            return None
        return f"is {_said(value)}; allowed: {self._range()}"

    def _range(self) -> str:
        """
        >>> Statistic("", 0, whole=True)._range(), Statistic("", 0, 9, least=1)._range()
        ('whole numbers from 0', '0, and 1 to 9')
        """
        least = f"0, and {self.least:g}" if self.least else _said(self.low)
        if not isfinite(self.high):
            return f"{'whole numbers' if self.whole else 'numbers'} from {least}"
        return f"{'whole numbers ' if self.whole else ''}{least} to {_said(self.high)}"


STATISTICS: Mapping[str, Statistic] = {
    "num_examples": Statistic("how many examples the client trained on", 0, whole=True),
    "num_steps": Statistic("how many local steps it took", 0, MAX_STEPS, whole=True),
    "step_norm": Statistic(
        "how far unit gradients carry it in its local steps, |a|_1 (without momentum: the number of steps)",
        0, MAX_STEPS, least=1.0,
    ),
    "effective_steps": Statistic(
        "its effective local steps, tau: as step_norm; with a proximal term their plain number", 0, MAX_STEPS, least=1.0
    ),
    "loss_before": Statistic(
        "the mean loss of the model it received, on its training data, before it trains", overflows=True
    ),
    "accuracy_after": Statistic("the accuracy of the model it trained, on its training data", 0, 1),
    "train_loss": Statistic("the mean loss while it trained", overflows=True),
    "running_loss": Statistic("the sum of the minibatch losses while it trained", overflows=True),
    "cross_score": Statistic("the accuracy of a client's model on the validation data of another", 0, 1),
    "bytes_up": Statistic("how many bytes it sent", 0, whole=True),
}  # fmt: skip
"""Every statistic that a federation knows by itself; a solver that provides others may declare them."""
ANY_NUMBER = Statistic("a number of the solver's own")


@dataclass(frozen=True)
class SizeLimits:
    """What a client may say about its number of examples: at most ``most``, and the same in every round.

    ``known`` has one number per client of the cohort, NaN for one that has not contributed before. Runs want ``whole``
    numbers; others may call any weights sizes.
    """

    most: float = MAX_EXAMPLES
    known: Tensor | None = None
    whole: bool = False

    @property
    def statistic(self) -> Statistic:
        """The range of ``num_examples``."""
        return _size_statistic(self.most, self.whole)

    def select(self, index: Tensor) -> SizeLimits:
        """The same for some clients of the cohort."""
        return self if self.known is None else replace(self, known=self.known[index])

    def usable(self, sizes: Tensor) -> Tensor:
        """Which sizes can be true, each looked at alone."""
        sound = (sizes >= 0) & (sizes <= self.most)
        return sound & (sizes == sizes.floor()) if self.whole else sound

    def changed(self, sizes: Tensor) -> Tensor:
        """Who says something else than before."""
        if self.known is None:
            return torch.zeros_like(sizes, dtype=torch.bool)
        other = sizes != self.known
        return other & ~self.known.isnan() & ~sizes.isnan() if bool(other.any()) else other


@lru_cache(64)
def _size_statistic(most: float, whole: bool) -> Statistic:
    """The same in every round of a run."""
    return replace(STATISTICS["num_examples"], high=most, whole=whole)


ANY_SIZE = SizeLimits()


def out_of_range(stats: Mapping[str, Tensor], declared: Mapping[str, Statistic], needed: frozenset[str]) -> Tensor:
    """Which numbers break their declarations, ``[S, C]`` in the order of ``stats``. NaN stands for a number that was
    not sent: allowed where nobody needs it."""
    values = torch.stack([one.detach().double() for one in stats.values()])
    known = tuple(declared.get(name, ANY_NUMBER) for name in stats)
    (low, high, least), (whole, overflows, wanted) = _limits(known, tuple(name in needed for name in stats))
    # Almost always everything is in order, which takes a few comparisons; small rounds are hardly longer than the rest.
    sound = (values >= low) & (values <= high) & ((values == values.floor()) | ~whole)
    if bool((sound & ((values >= least) | (values <= 0))).all()):
        nothing: Tensor = ~sound
        return nothing
    wrong = (values < low) | (values > high) | ((values > 0) & (values < least)) | values.isinf()
    wrong |= (whole & (values != values.floor()) & ~values.isnan()) | (wanted & values.isnan())
    excused = overflows & ~values.isfinite() & _with_examples(stats)
    found: Tensor = wrong & ~excused
    return found


@lru_cache(64)
def _limits(known: tuple[Statistic, ...], needed: tuple[bool, ...]) -> tuple[Tensor, Tensor]:
    """The ranges, all of them of finite numbers, and what else is declared, ``[3, S, 1]`` each: the same in every round
    of a run, and built once, as small rounds take hardly longer than such tables."""
    most = torch.finfo(torch.float64).max
    ranges = torch.tensor([[max(one.low, -most), min(one.high, most), one.least] for one in known], dtype=torch.float64)
    flags = torch.tensor([[one.whole, one.overflows, must] for one, must in zip(known, needed, strict=True)])
    return ranges.T.unsqueeze(2), flags.T.unsqueeze(2)


def _with_examples(stats: Mapping[str, Tensor]) -> Tensor:
    return stats["num_examples"] != 0 if "num_examples" in stats else torch.tensor(True)


def _said(number: float) -> str:
    """
    >>> _said(1e7), _said(0.25), _said(-1e21)
    ('10000000', '0.25', '-1e+21')
    """
    return f"{number:.0f}" if abs(number) < 1e15 and number == int(number) else f"{number:.6g}"
