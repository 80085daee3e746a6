"""The clients' devices: their work per round, reliability and speed.

Everything is a function of a key and the client id and costs O(cohort). Methods that draw in every round take the key
of the round; permanent properties of a device (being slow) take the key of the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from fedalloy.core.arguments import checked
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key

SOLVER_DEFAULT = -1


@checked("devices.epochs")
@dataclass(frozen=True)
class EpochRange:
    """Local epochs drawn per client and round, uniformly from ``low`` to ``high`` (both included)."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise SpecError(f"devices.epochs: range from {self.low} to {self.high}; needed: 0 <= low <= high")


@checked("devices.slow")
@dataclass(frozen=True)
class Slow:
    """A ``fraction`` of the clients computes ``factor`` times slower, in all rounds."""

    fraction: float
    factor: float

    def __post_init__(self) -> None:
        _check_probability("slow.fraction", self.fraction)
        if not self.factor >= 1.0:
            raise SpecError(f"devices.slow.factor is {self.factor}; allowed: 1 or more (2 is half the speed)")


@checked("devices")
@dataclass(frozen=True)
class DeviceProfile:
    """The devices of a federation.

    ``epochs``: local epochs as one number, one per client, a range, or None for the solver's number.
    ``success``: probability that a client's link works in a round; ``availability``: that it can be sampled
    at all; one number or one per client. The simulated clock counts ``seconds_per_step`` (times the factor of a
    slow client) and ``seconds_per_megabyte``; a client past the ``deadline`` fails in that round. ``on_failure``
    decides whether the contribution of a failed client is dropped or the received model is re-sent.

    >>> DeviceProfile(epochs=(2, 1, 1)).epochs_for(torch.tensor([0, 2]), Key.of(0))
    tensor([2, 1])
    """

    epochs: int | tuple[int, ...] | EpochRange | None = None
    success: float | tuple[float, ...] = 1.0
    availability: float | tuple[float, ...] = 1.0
    slow: Slow | None = None
    seconds_per_step: float = 0.0
    seconds_per_megabyte: float = 0.0
    deadline: float | None = None
    on_failure: Literal["drop", "resend"] = "drop"

    def __post_init__(self) -> None:
        _check_epochs(self.epochs)
        for name in ("success", "availability"):
            _check_probability(name, getattr(self, name))
        for name in ("seconds_per_step", "seconds_per_megabyte"):
            _check_seconds(name, getattr(self, name))
        if self.deadline is not None:
            _check_seconds("deadline", self.deadline)

    @staticmethod
    def read(table: Mapping[str, Any]) -> DeviceProfile:
        """A profile from a recipe: epochs and slow may be tables, ``{low, high}`` and ``{fraction, factor}``.

        >>> DeviceProfile.read({"epochs": {"low": 1, "high": 5}}).epochs
        EpochRange(low=1, high=5)
        """
        return DeviceProfile(**table)

    @cached_property
    def undisturbed(self) -> bool:
        """Whether every client can always be sampled, does the solver's work, and delivers."""
        return self.epochs is None and self.success == self.availability == 1.0

    def check(self, population: int) -> None:
        """Refuse lists that do not have one entry per client."""
        for name in ("epochs", "success", "availability"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != population:
                raise SpecError(
                    f"devices.{name} lists {len(value)} values for {population} clients: give one per client, "
                    "or a single number for all"
                )

    def epochs_for(self, ids: Tensor, key: Key) -> Tensor:
        """Local epochs of some clients in the round of ``key``, ``[C]``; -1 leaves it to the solver."""
        if isinstance(self.epochs, EpochRange):
            choices = self.epochs.high - self.epochs.low + 1
            draws = key.fold("epochs").each(ids.cpu()).uniform(dtype=torch.float64)
            return self.epochs.low + (draws * choices).to(torch.int64)
        return self.most_epochs(ids)

    def most_epochs(self, ids: Tensor) -> Tensor:
        """The largest number of local epochs that some clients can get, ``[C]``; -1 leaves it to the solver."""
        if isinstance(self.epochs, EpochRange):
            return torch.full_like(ids, self.epochs.high)
        if self.epochs is None:
            return torch.full_like(ids, SOLVER_DEFAULT, dtype=torch.int64)
        return _per_client("epochs", self.epochs, ids).to(torch.int64)

    def links(self, ids: Tensor, key: Key) -> Tensor:
        """Which clients' links work in the round of ``key``."""
        return _chance("success", self.success, ids, key.fold("link"))

    def available(self, ids: Tensor, key: Key) -> Tensor:
        """Which clients can be sampled in the round of ``key``."""
        return _chance("availability", self.availability, ids, key.fold("available"))

    def slowdown(self, ids: Tensor, run: Key) -> Tensor:
        """The slowdown factor of each device, ``[C]``; ``run`` is the key of the run, not of a round."""
        factor = torch.ones(len(ids), dtype=torch.float64)
        if self.slow is None:
            return factor
        slow = _chance("slow.fraction", self.slow.fraction, ids, run.fold("slow"))
        return factor.masked_fill(slow, self.slow.factor)

    def seconds(self, ids: Tensor, steps: Tensor, megabytes: Tensor | float, run: Key) -> Tensor:
        """Simulated seconds each client takes for its steps and for sending ``megabytes``; ``run`` is the run's key."""
        computing = self.slowdown(ids, run) * self.seconds_per_step * steps.cpu().double()
        sending = self.seconds_per_megabyte * torch.as_tensor(megabytes, dtype=torch.float64).cpu()
        return computing + sending

    @property
    def takes_time(self) -> bool:
        """Whether the simulated clock moves at all, or a client can be late."""
        return bool(self.seconds_per_step or self.seconds_per_megabyte or self.deadline is not None)

    def late(self, seconds: Tensor) -> Tensor:
        """Which clients miss the deadline."""
        return seconds > (math.inf if self.deadline is None else self.deadline)

    def round_seconds(self, seconds: Tensor) -> float:
        """The duration of the round: until the last participant is done, at most until the deadline."""
        longest = float(seconds.max()) if len(seconds) else 0.0
        return longest if self.deadline is None else min(longest, self.deadline)


def _chance(name: str, probability: float | tuple[float, ...], ids: Tensor, key: Key) -> Tensor:
    """One draw per client against its probability; none if the probability is 1."""
    if probability == 1.0:
        return torch.ones(len(ids), dtype=torch.bool)
    return key.each(ids.cpu()).uniform(dtype=torch.float64) < _per_client(name, probability, ids)


def _per_client(name: str, value: float | tuple[float, ...], ids: Tensor) -> Tensor:
    if not isinstance(value, tuple):
        return torch.full((len(ids),), float(value), dtype=torch.float64)
    wanted: list[int] = ids.tolist()
    if wanted and not 0 <= min(wanted) <= max(wanted) < len(value):
        raise SpecError(f"devices.{name} lists {len(value)} values, but there is a client {max(wanted)}: list one each")
    return torch.tensor([value[i] for i in wanted], dtype=torch.float64)


def _check_epochs(epochs: int | tuple[int, ...] | EpochRange | None) -> None:
    if epochs is None or isinstance(epochs, EpochRange):
        return
    values = epochs if isinstance(epochs, tuple) else (epochs,)
    if not values or min(values) < 0:
        raise SpecError(
            f"devices.epochs is {epochs!r}; allowed: a whole number of at least 0, a list of them (one per client), "
            "or a table {low, high}"
        )


def _check_probability(name: str, value: float | tuple[float, ...]) -> None:
    values = value if isinstance(value, tuple) else (value,)
    if not values or not all(0.0 <= entry <= 1.0 for entry in values):
        raise SpecError(f"devices.{name} is {value!r}; allowed: probabilities in [0, 1], one number or one per client")


def _check_seconds(name: str, value: float) -> None:
    if value < 0:
        raise SpecError(f"devices.{name} is {value!r}; allowed: seconds, 0 or more")
