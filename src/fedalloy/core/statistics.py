"""The statistics that clients send with their tensors: their meanings and ranges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf, isfinite

import torch
from torch import Tensor

from fedalloy.core.native.numbers import in_range, look_at_sizes
from fedalloy.core.written import writes_to

MAX_EXAMPLES = 10_000_000
"""The default limit on the number of examples that a client may report."""
MAX_STEPS = 1_000_000_000
"""The limit on the number of local steps that a client may report for one round."""


@dataclass(frozen=True)
class Statistic:
    """One number per client: its meaning and its range, both ends included.

    ``whole``: it is a whole number. ``least`` is the smallest value above 0 (the ``step_norm`` of a client that took a
    step is at least 1). With ``overflows``, it may be infinite or NaN for a client with examples: it was too large, and
    rules treat such a client as the worst served.
    """

    meaning: str
    low: float = -inf
    high: float = inf
    whole: bool = False
    least: float = 0.0
    overflows: bool = False

    def problem(self, value: float) -> str | None:
        """Why the value is impossible; None if it is possible.

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
    "num_sequences": Statistic("how many examples it has, if num_examples counts their targets", 0, whole=True),
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
"""All built-in statistics; a solver may declare further ones."""
ANY_NUMBER = Statistic("a statistic of the solver")


@dataclass(frozen=True)
class SizeLimits:
    """Limits on a client's reported number of examples: at most ``most``, and the same in every round.

    ``known`` has one number per client of the cohort, NaN for one that has not contributed before. Runs require
    ``whole`` numbers; other callers may use any weights as sizes.
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

    def look(self, sizes: Tensor) -> tuple[bool, bool, bool]:
        """Whether all sizes are usable, whether none has changed, and whether all are known; remembers the answer for
        the tensor that it was last asked about, because several steps of a round ask."""
        seen, version = self.__dict__.get("_seen"), writes_to(sizes)
        if seen is None or seen[0] is not sizes or seen[1] != version:
            found = look_at_sizes(sizes.detach(), self.known, self.most, self.whole) or self._look_closer(sizes)
            seen = self.__dict__["_seen"] = sizes, version, found
        answer: tuple[bool, bool, bool] = seen[2]
        return answer

    def _look_closer(self, sizes: Tensor) -> tuple[bool, bool, bool]:
        known = self.known is not None and torch.equal(sizes, self.known)
        return bool(self.usable(sizes).all()), not bool(self.changed(sizes).any()), known

    def usable(self, sizes: Tensor) -> Tensor:
        """Which sizes are within the limits, without comparing them to earlier rounds."""
        sound = (sizes >= 0) & (sizes <= self.most)
        return sound & (sizes == sizes.floor()) if self.whole else sound

    def changed(self, sizes: Tensor) -> Tensor:
        """Which clients report another size than before."""
        if self.known is None:
            return torch.zeros_like(sizes, dtype=torch.bool)
        other = sizes != self.known
        return other & ~self.known.isnan() & ~sizes.isnan() if bool(other.any()) else other


@lru_cache(64)
def _size_statistic(most: float, whole: bool) -> Statistic:
    """Cached, because it is the same in every round of a run."""
    return replace(STATISTICS["num_examples"], high=most, whole=whole)


ANY_SIZE = SizeLimits()


def all_in_range(stats: Mapping[str, Tensor], declared: Mapping[str, Statistic], needed: frozenset[str]) -> bool:
    """Whether every number is known and within its declared range: almost always so, and in small rounds the full
    check would take noticeable time."""
    ranges, flags = _limits_of(stats, declared, needed)
    columns = [one.detach() for one in stats.values()]
    if in_range(columns, ranges, flags):
        return True
    values, (low, high, least), whole = torch.stack([one.double() for one in columns]), ranges, flags[0]
    # A number in range is the same when it is limited to the range, and NaN never equals itself.
    limited = torch.equal(values.clamp(low, high), values)
    limited = limited and torch.equal(torch.where(whole, values.floor(), values), values)
    return limited and not bool(((values > 0) & (values < least)).any())


def out_of_range(stats: Mapping[str, Tensor], declared: Mapping[str, Statistic], needed: frozenset[str]) -> Tensor:
    """Which numbers are outside of their declared ranges, ``[S, C]`` in the order of ``stats``. NaN marks a number that
    was not sent, which is allowed unless it is ``needed``."""
    values = torch.stack([one.detach().double() for one in stats.values()])
    (low, high, least), (whole, overflows, wanted) = _limits_of(stats, declared, needed)
    wrong = (values < low) | (values > high) | ((values > 0) & (values < least)) | values.isinf()
    wrong |= (whole & (values != values.floor()) & ~values.isnan()) | (wanted & values.isnan())
    excused = overflows & ~values.isfinite() & _with_examples(stats)
    found: Tensor = wrong & ~excused
    return found


def _limits_of(
    stats: Mapping[str, Tensor], declared: Mapping[str, Statistic], needed: frozenset[str]
) -> tuple[Tensor, Tensor]:
    global _last_limits
    names, before = tuple(stats), _last_limits
    if before is None or before[0] is not declared or before[1] != names or before[2] != needed:
        known = tuple(declared.get(name, ANY_NUMBER) for name in names)
        _last_limits = before = declared, names, needed, _limits(known, tuple(name in needed for name in names))
    return before[3]


_last_limits: tuple[Mapping[str, Statistic], tuple[str, ...], frozenset[str], tuple[Tensor, Tensor]] | None = None
"""The last answer with its question: comparing questions is faster than hashing declarations."""


@lru_cache(64)
def _limits(known: tuple[Statistic, ...], needed: tuple[bool, ...]) -> tuple[Tensor, Tensor]:
    """The ranges, limited to finite numbers, and the flags, ``[3, S, 1]`` each. Cached, because they are the same in
    every round of a run and building them takes noticeable time in small rounds."""
    most = torch.finfo(torch.float64).max
    ranges = torch.tensor([[max(one.low, -most), min(one.high, most), one.least] for one in known], dtype=torch.float64)
    flags = torch.tensor([[one.whole, one.overflows, must] for one, must in zip(known, needed, strict=True)])
    return ranges.T.unsqueeze(2).contiguous(), flags.T.unsqueeze(2).contiguous()


def _with_examples(stats: Mapping[str, Tensor]) -> Tensor:
    return stats["num_examples"] != 0 if "num_examples" in stats else torch.tensor(True)


def _said(number: float) -> str:
    """
    >>> _said(1e7), _said(0.25), _said(-1e21)
    ('10000000', '0.25', '-1e+21')
    """
    return f"{number:.0f}" if abs(number) < 1e15 and number == int(number) else f"{number:.6g}"
