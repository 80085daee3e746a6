"""Logistic-regression data for any number of clients, drawn on demand.

All clients share W and b; client k has W + alpha D_k and inputs around beta m_k (D_k, m_k standard normal),
x ~ N(beta m_k, diag(j^-1.2)), y = argmax(x W_k + b). With alpha = beta = 0 the clients are iid.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.arguments import checked
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Objective
from fedalloy.core.types import Block
from fedalloy.tasks.federation import GeneratedTask


@checked("lazy_synthetic")
@dataclass(frozen=True)
class LogisticClients:
    """Draws ``samples`` examples for each of some clients in one vectorised call."""

    samples: int = 32
    features: int = 60
    classes: int = 10
    alpha: float = 0.0
    beta: float = 0.0

    def __post_init__(self) -> None:
        if min(self.samples, self.features, self.classes) < 1 or min(self.alpha, self.beta) < 0:
            raise SpecError(
                "lazy_synthetic: samples, features and classes must be at least 1, alpha and beta at least 0"
            )

    def __call__(self, ids: Tensor, key: Key) -> Block:
        """The block of the clients ``ids``; client k's part depends on ``key`` and k only."""
        mine = key.fold("client").each(ids)
        x = self._inputs(mine)
        y = self._labels(x, key, mine)
        rows = len(ids) * self.samples
        size = torch.full_like(ids, self.samples)
        return Block(x.reshape(rows, -1).to(torch.float32), y.reshape(rows), size.cumsum(0) - size, size)

    def _inputs(self, mine: Key) -> Tensor:
        noise = mine.fold("x").normal(self.samples, self.features, dtype=torch.float64)
        spread = torch.arange(1, self.features + 1, dtype=torch.float64, device=noise.device) ** -0.6
        return noise * spread + self.beta * mine.fold("mean").normal(1, self.features, dtype=torch.float64)

    def _labels(self, x: Tensor, key: Key, mine: Key) -> Tensor:
        shape = (self.features, self.classes)
        weight = key.fold("W").normal(*shape, dtype=torch.float64, device=x.device)
        own = weight + self.alpha * mine.fold("W").normal(*shape, dtype=torch.float64)
        bias = key.fold("b").normal(self.classes, dtype=torch.float64, device=x.device)
        return (torch.bmm(x, own) + bias).argmax(-1)


def lazy_synthetic(
    population: int,
    objective: Objective,
    *,
    key: Key,
    clients: LogisticClients | None = None,
    test_fraction: float = 0.2,
    valid_fraction: float = 0.0,
) -> GeneratedTask:
    """A task of ``population`` clients, even a million: data are drawn on demand and not kept."""
    make = clients or LogisticClients()
    return GeneratedTask(objective, population, make, key.fold("lazy_synthetic"), test_fraction, valid_fraction)
