"""Quantity skew: sizes by a power law or a lognormal, labels iid."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.registry import register
from fedalloy.tasks.partitions.base import Partition, check_supply, deal_in_order
from fedalloy.tasks.partitions.margins import apportion


@register("partition", "power_law")
@dataclass(frozen=True)
class PowerLaw(Partition):
    """The r-th largest client gets ``min_samples`` and a share of the rest proportional to r^-exponent.

    Ranks are drawn at random; every example is used. 0: equal sizes, 1: Zipf's law, 2: one very large client.
    """

    exponent: float = 1.0
    min_samples: int = 2

    def __post_init__(self) -> None:
        _check("power_law", "exponent", self.exponent, self.min_samples)

    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        rank = key.fold("rank").permutation(clients).to(torch.float64) + 1
        return _by_weight("power_law", rank**-self.exponent, self.min_samples, len(labels), key)


@register("partition", "lognormal")
@dataclass(frozen=True)
class Lognormal(Partition):
    """A client gets ``min_samples`` and a share of the rest proportional to exp(sigma z), z ~ N(0, 1)."""

    sigma: float = 1.0
    min_samples: int = 2

    def __post_init__(self) -> None:
        _check("lognormal", "sigma", self.sigma, self.min_samples)

    def assign(self, labels: Tensor, clients: int, key: Key, owner: Tensor | None = None) -> list[Tensor]:
        weights = (self.sigma * key.fold("size").normal(clients, dtype=torch.float64)).softmax(0)
        return _by_weight("lognormal", weights, self.min_samples, len(labels), key)


def _by_weight(rule: str, weights: Tensor, minimum: int, examples: int, key: Key) -> list[Tensor]:
    check_supply(rule, examples, len(weights), minimum)
    return deal_in_order(key.fold("deal").permutation(examples), apportion(weights, examples, minimum))


def _check(rule: str, name: str, value: float, min_samples: int) -> None:
    if not 0 <= value < float("inf"):
        raise SpecError(f"{rule}: {name} = {value} must be a number of at least 0 (0: equal sizes)")
    if min_samples < 1:
        raise SpecError(f"{rule}: min_samples = {min_samples} must be at least 1")
