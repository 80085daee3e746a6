"""Which clients take part in a round: by key, without replacement, in O(cohort) where the rule allows it."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedalloy.core.arguments import checked
from fedalloy.core.errors import SpecError
from fedalloy.core.fraction import fraction_of
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Task

Available = Callable[[Tensor], Tensor]


def all_available(ids: Tensor) -> Tensor:
    """For devices that can always be reached."""
    return torch.ones(len(ids), dtype=torch.bool)


class Sampling(ABC):
    """Chooses the ids of a round."""

    reads_data: ClassVar[bool] = False
    """Whether it looks at the clients' data."""

    @abstractmethod
    def size(self, population: int) -> int:
        """The largest cohort this rule chooses."""

    def smallest(self, population: int) -> int:
        """The smallest cohort it chooses when all clients can be reached."""
        return self.size(population)

    def check(self, population: int) -> None:
        """Refuse, before the first round, a rule that does not fit this number of clients."""
        self.size(population)

    @abstractmethod
    def choose(self, task: Task, round: int, key: Key, available: Available) -> Tensor:
        """The chosen ids; ``available`` returns which of given ids can be reached in this round."""


@checked("sampling")
@dataclass(frozen=True)
class UniformSampling(Sampling):
    """Every reachable client with the same probability. ``cohort``: a number, a fraction up to 1.0, or None for all."""

    known_as: ClassVar[str] = "Uniform"

    cohort: int | float | None = None

    def __post_init__(self) -> None:
        check_cohort(self.cohort)

    def size(self, population: int) -> int:
        return cohort_size(self.cohort, population)

    def choose(self, task: Task, round: int, key: Key, available: Available) -> Tensor:
        population = task.population
        drawn = wanted = self.size(population)
        if available is all_available:
            return key.choice(population, wanted)
        while True:
            ids = key.choice(population, drawn)
            reachable = available(ids)
            if drawn == wanted and bool(reachable.all()):
                return ids
            order = key.fold("order").permutation(drawn)
            ids = ids[order][reachable[order]][:wanted]
            if len(ids) == wanted or drawn == population:
                return ids.sort().values
            drawn = min(population, 2 * drawn + 8)


@checked("sampling")
@dataclass(frozen=True)
class BySize(Sampling):
    """Clients with probability proportional to their training examples, without replacement.

    The clients with the largest ``u^(1/n)`` are such a sample (Efraimidis and Spirakis 2006).
    """

    reads_data: ClassVar[bool] = True

    cohort: int | float | None = None

    def __post_init__(self) -> None:
        check_cohort(self.cohort)

    def size(self, population: int) -> int:
        return cohort_size(self.cohort, population)

    def choose(self, task: Task, round: int, key: Key, available: Available) -> Tensor:
        everyone = torch.arange(task.population)
        everyone = everyone[available(everyone)]
        sizes = task.data("train", everyone).size.double()
        race = key.each(everyone).uniform(dtype=torch.float64).clamp(min=1e-300).log() / sizes.clamp(min=1e-9)
        best = race.topk(min(self.size(task.population), len(everyone))).indices
        return everyone[best].sort().values


@checked("sampling")
@dataclass(frozen=True)
class Listed(Sampling):
    """A given list of cohorts, used in turn and repeated."""

    cohorts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not self.cohorts or not all(self.cohorts):
            raise SpecError("sampling 'list' needs at least one cohort, and no empty one: cohorts = [[0, 1], [2, 3]]")

    def size(self, population: int) -> int:
        return max(len(set(cohort)) for cohort in self.cohorts)

    def smallest(self, population: int) -> int:
        return min(len(set(cohort)) for cohort in self.cohorts)

    def check(self, population: int) -> None:
        wrong = [client for cohort in self.cohorts for client in cohort if not 0 <= client < population]
        if wrong:
            raise SpecError(f"sampling 'list' names client {wrong[0]}, but the ids are 0 to {population - 1}")

    def choose(self, task: Task, round: int, key: Key, available: Available) -> Tensor:
        self.check(task.population)
        ids = torch.tensor(sorted(set(self.cohorts[(round - 1) % len(self.cohorts)])))
        return ids[available(ids)]


def check_cohort(cohort: int | float | None) -> None:
    """Refuse a setting that does not mean a number of clients."""
    if cohort is not None and cohort <= 0:
        raise SpecError(f"cohort must be a number of clients, a fraction up to 1.0, or none for all, got {cohort}")
    if isinstance(cohort, float) and cohort > 1 and not cohort.is_integer():
        raise SpecError(f"cohort must be a whole number of clients, or a fraction up to 1.0, got {cohort}")


def cohort_size(cohort: int | float | None, population: int) -> int:
    """The number of clients of a setting; a fraction is rounded to the nearest number, at least one.

    >>> cohort_size(0.1, 55), cohort_size(None, 7), cohort_size(3, 7)
    (6, 7, 3)
    """
    if cohort is None:
        return population
    wanted = int(cohort)
    if isinstance(cohort, float) and cohort <= 1:
        wanted = math.floor(fraction_of(population, cohort) + 0.5)
    if not (cohort > 0 and wanted <= population):
        raise SpecError(f"cohort must be between 1 and the number of clients ({population}), got {cohort}")
    return max(1, wanted)


def __getattr__(name: str) -> Any:
    if name == "Uniform":
        warnings.warn(f"{__name__}.Uniform is called UniformSampling now", DeprecationWarning, stacklevel=2)
        return UniformSampling
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
