"""The interface of metrics: evidence per example, and a score per client computed from it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.errors import SpecError
from fedalloy.core.inputs import Inputs
from fedalloy.core.protocols import Objective
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.metrics.direction import top_k


class Metric(ABC):
    """A frozen value with two pure functions, so that a pool is read once and in chunks."""

    kinds: ClassVar[tuple[TaskKind, ...]] = ()
    """The kinds of task that it is for; empty: any."""
    share: ClassVar[bool] = False
    """Whether scores are shares, from 0 to 1, of which some tables show percent."""
    pooled: ClassVar[Literal["", "mean", "log_mean"]] = ""
    """How the scores of clients, with how many of their targets count, give the score of all examples together: they
    are means, or exponentials of means. Empty: all evidence must be at one place, as for AUROC."""

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


def with_counts(objective: Objective, values: Tensor, y: Inputs) -> Tensor:
    """Every example's value, ``[N]``; where examples have several targets also how many count, ``[N, 2]``."""
    counts = objective.counts(y)
    return values if counts is None else torch.stack([values.double(), counts.double()], 1)


def counted_means(evidence: Tensor, owner: Tensor, clients: int) -> Tensor:
    """The mean over all targets that count, from ``with_counts``; NaN for a client without any. An example in which
    nothing counts has no value, whatever its column says."""
    if evidence.dim() == 1:
        return means(evidence, owner, clients)
    values = torch.where(evidence[:, 1] > 0, evidence[:, 0] * evidence[:, 1], 0.0)
    return sums(values, owner, clients) / sums(evidence[:, 1], owner, clients)


def over_all(metric: Metric, scores: Tensor, sizes: Tensor) -> float | None:
    """The score of all clients' examples together, from the clients' scores and how many of their targets count; None
    if the metric does not allow it, or if a client's numbers are missing."""
    some = sizes != 0
    scores, sizes = scores[some].double(), sizes[some].double()
    if not metric.pooled or not len(scores) or bool(scores.isnan().any() | sizes.isnan().any() | (sizes < 0).any()):
        return None
    values = scores.log() if metric.pooled == "log_mean" else scores
    mean = float((values * sizes).sum() / sizes.sum())
    return math.exp(mean) if metric.pooled == "log_mean" else mean


def check_metrics(names: Iterable[str], kind: str | None) -> None:
    """Refuse metrics that a task of this kind does not have."""
    chosen = choose(names)
    for name, metric in chosen.items() if kind is not None else ():
        if metric.kinds and kind not in metric.kinds:
            fitting = [other for other, rule in registry.everything("metric").items() if _fits(rule(), str(kind))]
            raise SpecError(
                f"metric '{name}' is for tasks of the kind {' or '.join(metric.kinds)}, and this is one of the kind "
                f"{kind}: choose metrics among {', '.join(fitting)}; a recipe that gives the kind or the loss of its "
                "task has fitting ones by default"
            )


def _fits(metric: Metric, kind: str) -> bool:
    return not metric.kinds or kind in metric.kinds


def _metric(name: str) -> Metric:
    known = registry.everything("metric")
    k = top_k(name)
    if k is not None and name not in known:
        metric: Metric = registry.find("metric", "top_k")(k=k)
        return metric
    found: Metric = registry.find("metric", name)()
    return found
