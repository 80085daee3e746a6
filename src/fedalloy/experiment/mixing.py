"""Mixtures of the federated and the local model: every client's scores at lambda = 0, 0.1, ..., 1, and summaries.

Four summaries answer four questions. ``fixed``: lambda = 0.5 for all clients, chosen in advance. ``validated``: every
client at the lambda that is best on its own validation part, which it can choose in practice (ties: the nearest to
0.5); there is one if the task has validation parts and the clients' data are in this process. ``best_mean``: the one
lambda that is best for the mean over clients; it was chosen on the test parts, once. ``oracle``: every client at the
lambda that is best on its own test part; no client could choose it in practice, so it is an upper bound and not a
result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedalloy.experiment.evaluate import Values, client_row, personal_scores
from fedalloy.experiment.trained import Trained
from fedalloy.tasks.metrics.direction import higher_is_better
from fedalloy.tasks.metrics.summary import mean, summarise

LAMBDAS = tuple(step / 10 for step in range(11))
FIXED = LAMBDAS.index(0.5)


def evaluate_mixes(
    trained: Trained, metrics: tuple[str, ...], ids: Tensor
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The entry ``evaluation_mix`` of the round's row, and the rows of ``clients.jsonl``."""
    part = trained.fed.config.evaluate_part
    found = personal_scores(trained, metrics, ids, LAMBDAS, part)
    valid = _on_validation(trained, metrics, ids) if part == "test" else {}
    brief = {name: readings(_stacked(found, name), higher_is_better(name), valid.get(name)) for name in metrics}
    full = [client_row("mixed", ids, values, part, mix=mix) for mix, values in zip(LAMBDAS, found, strict=True)]
    return {"evaluation_mix": brief}, full


def _on_validation(trained: Trained, metrics: tuple[str, ...], ids: Tensor) -> Values:
    """By metric the values ``[lambdas, clients]`` on the validation parts; empty where there are none."""
    if not trained.fed.engine.data_at_hand or not bool(trained.fed.task.data("valid", ids).size.any()):
        return {}
    found = personal_scores(trained, metrics, ids, LAMBDAS, "valid")
    return {name: _stacked(found, name) for name in metrics}


def readings(values: Tensor, higher: bool | None, valid: Tensor | None = None) -> dict[str, Any]:
    """The mean at every lambda and the summaries, from values ``[lambdas, clients]`` on test and validation parts.

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
    if valid is not None:
        read["validated"] = summarise(_at_best(values, sign * valid), higher_is_better=higher)
    return read | {
        "best_mean": {"lambda": LAMBDAS[best], **summarise(values[best], higher_is_better=higher)},
        "oracle": summarise(oracle, higher_is_better=higher),
    }


def _at_best(values: Tensor, valid: Tensor) -> Tensor:
    """Every client's value at the lambda with the largest validation value; 0.5 without a validation value."""
    nearest_first = torch.arange(len(LAMBDAS)).sub(FIXED).abs().argsort(stable=True)
    best = nearest_first[_known(valid)[nearest_first].argmax(0)]
    return values.gather(0, best.unsqueeze(0)).squeeze(0)


def _stacked(found: list[Values], name: str) -> Tensor:
    return torch.stack([values[name] for values in found])


def _known(values: Tensor) -> Tensor:
    """Missing values as minus infinity, so that they are never the best."""
    return values.masked_fill(values.isnan(), -torch.inf)
