"""The interface of metrics: evidence per example, and a score per client computed from it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.protocols import Objective
from fedalloy.tasks.metrics.direction import top_k


class Metric(ABC):
    """A frozen value with two pure functions, so that a pool is read once and in chunks."""

    @abstractmethod
    def evidence(self, objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
        """What the score needs of every example, ``[N]`` or ``[N, m]``."""

    @abstractmethod
    def score(self, evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
        """One score per client, ``[clients]`` in float64; NaN where a client has none.

        ``evidence`` is float64 on the CPU; ``owner`` is ``[N]``: to which client an example belongs, ascending.
        """


def choose(names: Iterable[str] | Mapping[str, Metric]) -> dict[str, Metric]:
    """Metrics by name; ``top7`` is ``top_k`` with k = 7.

    >>> choose(["accuracy", "top7"])
    {'accuracy': Accuracy(), 'top7': TopKAccuracy(k=7)}
    """
    if isinstance(names, Mapping):
        return dict(names)
    return {name: _metric(name) for name in names}


def sums(values: Tensor, owner: Tensor, clients: int) -> Tensor:
    """The sum of every client's rows."""
    return values.new_zeros(clients, *values.shape[1:]).index_add(0, owner, values)


def means(values: Tensor, owner: Tensor, clients: int) -> Tensor:
    """The mean of every client's rows; NaN for a client without any."""
    return sums(values, owner, clients) / sums(torch.ones_like(values), owner, clients)


def _metric(name: str) -> Metric:
    known = registry.everything("metric")
    k = top_k(name)
    if k is not None and name not in known:
        metric: Metric = registry.find("metric", "top_k")(k=k)
        return metric
    found: Metric = registry.find("metric", name)()
    return found
