"""Mixtures of the federated and the local model: every client's scores at lambda = 0, 0.1, ..., 1, and summaries.

Three summaries answer three questions. ``fixed``: lambda = 0.5 for all clients, chosen in advance. ``best_mean``: the
one lambda that is best for the mean over clients; it was chosen on the test parts, once. ``oracle``: every client at
the lambda that is best on its own test part; no client could choose it in practice, so it is an upper bound and not a
result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedalloy.experiment.evaluate import client_row, personal_scores
from fedalloy.experiment.trained import Trained
from fedalloy.tasks.metrics.direction import higher_is_better
from fedalloy.tasks.metrics.summary import mean, summarise

LAMBDAS = tuple(step / 10 for step in range(11))
FIXED = LAMBDAS.index(0.5)


def evaluate_mixes(
    trained: Trained, metrics: tuple[str, ...], ids: Tensor
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The entry ``evaluation_mix`` of the round's row, and the rows of ``clients.jsonl``."""
    found = personal_scores(trained, metrics, ids, LAMBDAS)
    together = {name: torch.stack([values[name] for values in found]) for name in metrics}
    brief = {name: readings(values, higher_is_better(name)) for name, values in together.items()}
    full = [client_row("mixed", ids, values, mix=mix) for mix, values in zip(LAMBDAS, found, strict=True)]
    return {"evaluation_mix": brief}, full


def readings(values: Tensor, higher: bool | None) -> dict[str, Any]:
    """The mean at every lambda and the three summaries, from values ``[lambdas, clients]``.

    A client without a value is skipped everywhere. A metric without a direction has ``fixed`` only.

    >>> read = readings(torch.tensor([[0.2, 0.8]] * 5 + [[0.4, 0.4]] + [[0.9, 0.2]] * 5), higher=True)
    >>> read["fixed"]["mean"], read["best_mean"]["lambda"], read["oracle"]["mean"]
    (0.4, 0.6, 0.85)
    """
    means = torch.tensor([mean(row) for row in values], dtype=torch.float64)
    fixed = {"lambda": LAMBDAS[FIXED], **summarise(values[FIXED], higher_is_better=higher)}
    read: dict[str, Any] = {"lambda": list(LAMBDAS), "mean": means.tolist(), "fixed": fixed}
    if higher is None:
        return read
    sign = 1.0 if higher else -1.0
    best = int(_known(sign * means).argmax())
    oracle = torch.where(values.isnan().all(0), torch.nan, sign * _known(sign * values).max(0).values)
    return read | {
        "best_mean": {"lambda": LAMBDAS[best], **summarise(values[best], higher_is_better=higher)},
        "oracle": summarise(oracle, higher_is_better=higher),
    }


def _known(values: Tensor) -> Tensor:
    """Missing values as minus infinity, so that they are never the best."""
    return values.masked_fill(values.isnan(), -torch.inf)
