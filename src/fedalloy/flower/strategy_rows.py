"""What a strategy records of a round: the clients' own metrics, as columns in the order of the ids."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from fedalloy.core import registry
from fedalloy.core.errors import SpecError, nearest
from fedalloy.tasks.metrics.direction import higher_is_better
from fedalloy.tasks.metrics.summary import summarise

Metrics = Mapping[int, Mapping[str, float]]
"""The single numbers that clients sent, by client."""
_SIZES = ("num-examples", "num_examples")


def check_scores(scores: Mapping[str, str]) -> dict[str, str]:
    """The names of metrics in the records; refuses one that is not a metric of fedalloy, or is given twice."""
    known = registry.everything("metric")
    for theirs, ours in scores.items():
        if higher_is_better(ours) is None and ours not in known:
            raise SpecError(f"scores: '{theirs}' cannot be recorded as '{ours}'; {nearest(ours, known)}")
    if len(set(scores.values())) < len(scores):
        raise SpecError("scores: two metrics cannot be recorded under one name")
    return dict(scores)


def training(metrics: Metrics) -> dict[str, Any]:
    """The columns of a round: every metric by client, and the mean training loss and the steps where clients send them.

    >>> training({0: {"train_loss": 1.0, "num-examples": 5}, 2: {"train_loss": 3.0}})
    {'metrics': {'num-examples': [5, nan], 'train_loss': [1.0, 3.0]}, 'train_loss': 2.0}
    """
    columns = _columns(metrics)
    plain = {name.replace("-", "_"): column for name, column in columns.items()}
    losses = [value for value in plain.get("train_loss", ()) if not math.isnan(value)]
    return {
        "metrics": columns,
        **({"train_loss": sum(losses) / len(losses)} if losses else {}),
        **({"num_steps": plain["num_steps"]} if "num_steps" in plain else {}),
    }


def client_scores(scores: Metrics, names: Mapping[str, str]) -> dict[str, list[float]]:
    """The columns of an evaluation, under the names of the records; sizes are none of them."""
    found = {name: column for name, column in _columns(scores).items() if name not in _SIZES}
    return {names.get(name, name): column for name, column in found.items()}


def evaluation(columns: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """The summary of every metric over the clients."""
    values = {name: torch.tensor(column, dtype=torch.float64) for name, column in columns.items()}
    return {name: summarise(column, higher_is_better=higher_is_better(name)) for name, column in values.items()}


def _columns(metrics: Metrics) -> dict[str, list[float]]:
    names = sorted({name for one in metrics.values() for name in one})
    return {name: [one.get(name, math.nan) for one in metrics.values()] for name in names}
