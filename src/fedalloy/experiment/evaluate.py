"""Evaluation of every client, with the global model and with its own: all values are kept, and summarised too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import aspects
from fedalloy.core.engine import ModelName
from fedalloy.core.protocols import DataPart
from fedalloy.experiment.trained import Trained
from fedalloy.tasks.evaluation import evaluate_clients, evaluate_models, evaluate_pool
from fedalloy.tasks.metrics.direction import higher_is_better
from fedalloy.tasks.metrics.metric import choose, over_all
from fedalloy.tasks.metrics.summary import summarise

Values = dict[str, Tensor]
"""One value per client, by metric."""
Summary = dict[str, dict[str, float]]
_AT_ONCE = 100


@dataclass(frozen=True)
class Evaluation:
    """Per-client values by metric in id order, and the values of the global model on the global test set.

    ``clients`` are the values that are reported: those of the clients' own models where they have some (then those of
    the global model are ``shared``), otherwise those of the global model.
    """

    clients: Values
    overall: dict[str, float]
    shared: Values | None = None
    summary: Summary = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "summary", summaries(self.clients))


def evaluate(trained: Trained, metrics: tuple[str, ...], ids: Tensor) -> Evaluation:
    """Score the models on the test parts of ``ids``, and the global model on the global test set too; or, where the
    run says so, on the validation parts alone."""
    if not trained.fed.engine.data_at_hand:
        return _by_clients(trained, metrics, ids)
    shared, overall = _global_scores(trained, metrics, ids)
    if not aspects.is_personalised(trained.fed.algorithm.solver):
        return Evaluation(shared, overall)
    part = trained.fed.config.evaluate_part
    return Evaluation(personal_scores(trained, metrics, ids, part=part)[0], overall, shared)


def personal_scores(
    trained: Trained,
    metrics: tuple[str, ...],
    ids: Tensor,
    mixes: Sequence[float | None] = (None,),
    part: DataPart = "test",
) -> list[Values]:
    """Every client's own model on its own part of the data, once per mix; states are read a few clients at a time.

    Where the clients' data are elsewhere, the part is their test part.
    """
    if not trained.fed.engine.data_at_hand:
        models: list[ModelName] = ["personal" if mix is None else mix for mix in mixes]
        algorithm, states = trained.fed.algorithm, trained.states(ids)
        return trained.fed.engine.scores(algorithm, trained.shared, states, ids, metrics, models)
    parts: list[list[Values]] = [[] for _ in mixes]
    task = trained.fed.task
    for some in ids.split(trained.at_once):
        states, block = trained.states(some), task.data(part, some)
        for mix, found in zip(mixes, parts, strict=True):
            theirs = [trained.model_of(states[client], mix) for client in some.tolist()]
            found.append(evaluate_models(task.objective, theirs, block, metrics))
    return [{name: torch.cat([part[name] for part in found]) for name in metrics} for found in parts]


def _by_clients(trained: Trained, metrics: tuple[str, ...], ids: Tensor) -> Evaluation:
    """Clients score the global model and their own where their data are. The score of all their test parts together
    follows from these for metrics that are means, if every client has told its own."""
    algorithm, model = trained.fed.algorithm, trained.server_model()
    shared = {**trained.shared, "params": model.params, "buffers": model.buffers}
    models: list[ModelName] = ["global", "personal"] if aspects.is_personalised(algorithm.solver) else ["global"]
    found = trained.fed.engine.scores(algorithm, shared, trained.states(ids), ids, metrics, models)
    overall = _over_all(trained, found[0], ids) if len(ids) == trained.fed.task.population else {}
    return Evaluation(found[-1], overall, found[0] if len(found) > 1 else None)


def _over_all(trained: Trained, scores: Values, ids: Tensor) -> dict[str, float]:
    sizes, rules = trained.fed.engine.test_sizes(ids), choose(tuple(scores))
    found = {name: over_all(rules[name], values, sizes) for name, values in scores.items()}
    return {name: value for name, value in found.items() if value is not None}


def summaries(values: Values) -> Summary:
    """Mean, spread and tails over clients, by metric."""
    return {name: summarise(vector, higher_is_better=higher_is_better(name)) for name, vector in values.items()}


def rows(evaluation: Evaluation, ids: Tensor, part: DataPart = "test") -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The entries of the round's row, and the rows of ``clients.jsonl``: the reported model comes last."""
    brief: dict[str, Any] = {"evaluation": evaluation.summary, "global": evaluation.overall}
    if evaluation.shared is None:
        return brief, [client_row("global", ids, evaluation.clients, part)]
    brief["evaluation_global"] = summaries(evaluation.shared)
    both = {"global": evaluation.shared, "personal": evaluation.clients}
    return brief, [client_row(model, ids, values, part) for model, values in both.items()]


def client_row(model: str, ids: Tensor, values: Values, part: DataPart = "test", **more: Any) -> dict[str, Any]:
    """One row of ``clients.jsonl``."""
    numbers = {name: _numbers(vector) for name, vector in values.items()}
    return {"split": part, "model": model, **more, "ids": ids.tolist(), **numbers}


def _global_scores(trained: Trained, metrics: tuple[str, ...], ids: Tensor) -> tuple[Values, dict[str, float]]:
    task, model, part = trained.fed.task, trained.server_model(), trained.fed.config.evaluate_part
    pieces = [ids] if task.pools else list(ids.split(_AT_ONCE))  # data that are read on demand: a few clients at a time
    found = []
    for some, following in zip_longest(pieces, pieces[1:]):
        if following is not None:
            task.prefetch(following.clone)
        found.append(evaluate_clients(*model, task.data(part, some), metrics))
    values = {name: torch.cat([one[name] for one in found]) for name in found[0]}
    pool = task.global_test if part == "test" else None
    return values, evaluate_pool(*model, pool, metrics) if pool is not None else {}


def _numbers(vector: Tensor) -> list[float | None]:
    """Plain numbers, None where there is no finite one; a hundred thousand clients are not looked at one by one."""
    if bool(vector.isfinite().all()):
        plain: list[float | None] = vector.tolist()
        return plain
    return [value if math.isfinite(value) else None for value in vector.tolist()]
