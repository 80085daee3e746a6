"""Scores of a run by name, read from its folder.

A score is a statistic of the target metric over clients at the last evaluation, or of another metric: ``ece:mean``.

| statistic | meaning |
|---|---|
| ``mean``, ``variance``, ``gini`` | over clients, with equal weights; variance in percent squared, Gini times 100 |
| ``weighted_mean`` | the mean over clients, weighted by their numbers of examples |
| ``worst``, ``best``, ``gap`` | the client served worst (of a loss, the one with the largest) and best, and how far apart they are |
| ``worst10``, ``best20``, ``gap10``, ... | the same for the mean over that many percent of the clients |
| ``global``, ``best_global`` | on the global test set, at the end and at its best round |
| ``rounds`` | the round that reached the target; infinite where none did |
| ``mix_fixed``, ``mix_best_mean``, ``mix_oracle`` | mixtures of two models (:mod:`fedalloy.experiment.mixing`) |
| ``mix_validated`` | the same with lambda chosen on validation parts; a method without mixtures has its mean |
| ``objective`` | the sum of AAggFF's decision losses -log(1 + <p, r>) |
| ``cumulative_loss`` | the sum over rounds of AAggFF-S's weighted loss sum_i p_i F_i, with the p that made the model |
| ``logged_objective`` | what the public code of AAggFF logs: the sum of -log(1 + sum_i p_i F_i) |
| ``regret``, ``regret_half`` | per round, against the best fixed decision in hindsight: all rounds, the first half |
| ``regret_bound`` | what the theorem of AAggFF-S allows for ``regret``: 2 L K (1 + log(1 + T / (16 K))) / T |

Metrics of which more is better (accuracies and other shares) are in percent, others (losses, calibration errors) as they
are. A score that is not finite is left out, except rounds.
"""  # noqa: E501 (a row of a table stays one line)

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.experiment.recipe.resolving import sampling_of
from fedalloy.experiment.recipe.tables import SamplingTable
from fedalloy.experiment.records.reading import RunRecord, last_clients, read_run
from fedalloy.experiment.records.scalars import seconds_of
from fedalloy.methods.weightings.regret import regret, regret_bound
from fedalloy.results.lines import responses_of
from fedalloy.results.outcome import RunOutcome, outcome_of
from fedalloy.results.served import client_values, direction, scored
from fedalloy.studies.reproduce.results import Measured, is_rounds
from fedalloy.tasks.metrics import summary
from fedalloy.tasks.metrics.direction import best

_TAIL = re.compile(r"(worst|best|gap)(\d+)?")
_MIX = {"mix_fixed": "fixed", "mix_validated": "validated", "mix_best_mean": "best_mean", "mix_oracle": "oracle"}
Row = dict[str, Any]


def measure_run(folder: Path, case: str, method: str, scores: list[str], reused: float = 0.0) -> Measured:
    """One run as a line of the results; ``reused`` is that of its case (see ``Measured``)."""
    record = read_run(folder)
    outcome = outcome_of(record, record.rounds())
    seconds = sum(seconds_of(row) for row in record.timings())
    found = scores_of(record, outcome, scores) if outcome.finished else {}
    clients = len((record.manifest or {}).get("sizes", ())) or None
    return Measured(
        case,
        method,
        outcome.seed,
        outcome.state,
        outcome.round,
        found,
        outcome.reason,
        seconds,
        planned=outcome.rounds,
        clients=clients,
        cohort=_cohort(record, clients),
        table=table_used(record.recipe),
        reused=reused,
    )


def table_used(recipe: Row) -> str:
    """A digest of the learned table of weights in a run's recipe; empty where there is none.

    >>> table_used({"algorithm": {"name": "fedavg"}}), table_used({"algorithm": {"table": [[0.5, 0.5]]}})
    ('', '30ffc98e')
    """
    found = [recipe[place]["table"] for place in ("algorithm", "weighting") if "table" in (recipe.get(place) or {})]
    return hashlib.sha256(json.dumps(found[0]).encode()).hexdigest()[:8] if found else ""


def _cohort(record: RunRecord, clients: int | None) -> int | None:
    table = SamplingTable.model_validate(record.recipe.get("sampling", {}))
    return None if clients is None else sampling_of(table).size(clients)


def scores_of(record: RunRecord, outcome: RunOutcome, names: list[str]) -> dict[str, float]:
    """The scores that this run has; those that do not apply to it (regret of a rule without decisions) are left out."""
    rows, last = list(record.rounds()), scored(last_clients(record.path))
    sizes = (record.manifest or {}).get("sizes")
    known = {name: _score(name, record, rows, last, sizes, outcome) for name in names}
    return {name: value for name, value in known.items() if value is not None and _counts(name, value)}


def _counts(name: str, value: float) -> bool:
    return math.isfinite(value) or (is_rounds(name) and value > 0)


def split_score(name: str, target: str) -> tuple[str, str]:
    """The metric and the statistic of a score.

    >>> split_score("worst20", "accuracy"), split_score("ece:mean", "accuracy")
    (('accuracy', 'worst20'), ('ece', 'mean'))
    """
    metric, colon, statistic = name.rpartition(":")
    return (metric if colon else target), statistic


def _score(
    name: str, record: RunRecord, rows: list[Row], last: Row, sizes: list[int] | None, outcome: RunOutcome
) -> float | None:
    metric, statistic = split_score(name, outcome.metric)
    higher = direction(record, metric)
    unit = 100.0 if higher else 1.0
    if statistic == "rounds":
        return float(outcome.reached or math.inf)
    if statistic in ("global", "best_global"):
        return _on_global(rows, metric, statistic == "best_global", higher, unit)
    if statistic == "mix_validated" and not any("evaluation_mix" in row for row in rows):
        statistic = "mean"
    if statistic in _MIX:
        return _mixed(rows, metric, _MIX[statistic], unit)
    if statistic in ("cumulative_loss", "logged_objective"):
        return _weighted_losses(rows, statistic == "logged_objective")
    if statistic == "regret_bound":
        return _bound(record.recipe, len(rows), len(sizes or ()))
    if statistic in ("objective", "regret", "regret_half"):
        return _decisions(rows, statistic)
    if metric not in last:
        return None
    told = next((row["evaluation"].get(metric) for row in reversed(rows) if row.get("evaluation")), None)
    values = torch.tensor(client_values(last, metric, higher, told), dtype=torch.float64)
    return over_clients(statistic, values, _sizes(last, sizes), unit, higher)


def over_clients(
    statistic: str, values: Tensor, sizes: Tensor | None, unit: float = 100.0, higher: bool | None = True
) -> float | None:
    """A statistic of one value per client; None where it needs sizes or a direction that are not known."""
    if statistic == "mean":
        return unit * summary.mean(values)
    if statistic == "weighted_mean":
        return None if sizes is None else unit * summary.mean(values, sizes)
    if statistic == "variance":
        return summary.variance(values, unit)
    if statistic == "gini":
        return 100 * summary.gini(values)
    tail = _TAIL.fullmatch(statistic)
    if tail is None:
        raise SpecError(
            f"unknown score '{statistic}': allowed are those of fedalloy.studies.reproduce.scoring, such as worst20"
        )
    share = int(tail[2] or 0) / 100
    if tail[1] == "gap":
        return unit * summary.parity_gap(values, share)
    if higher is None:
        return None
    return unit * (summary.worst_served if tail[1] == "worst" else summary.best_served)(values, higher, share)


def _on_global(rows: list[Row], metric: str, at_best: bool, higher: bool | None, unit: float) -> float | None:
    found = [row["global"][metric] for row in rows if row.get("global", {}).get(metric) is not None]
    if not found or (at_best and higher is None):
        return None
    leader = best(found, float, bool(higher)) if at_best else found[-1]
    return None if leader is None else unit * float(leader)


def _mixed(rows: list[Row], metric: str, kind: str, unit: float) -> float | None:
    found = [row["evaluation_mix"][metric] for row in rows if metric in row.get("evaluation_mix", {})]
    value = found[-1].get(kind) if found else None
    value = value.get("mean") if isinstance(value, Mapping) else value
    return None if value is None else unit * float(value)


def _weighted_losses(rows: list[Row], logged: bool) -> float | None:
    told = [float(row["info"]["weighted_loss"]) for row in rows if "weighted_loss" in row.get("info", {})]
    return sum(-math.log1p(loss) if logged else loss for loss in told) if told else None


def _decisions(rows: list[Row], statistic: str) -> float | None:
    told = [row["info"] for row in rows if "decision_loss" in row.get("info", {})]
    responses = [responses_of(info) or [] for info in told]
    if not told or not all(responses):
        return None
    losses = torch.tensor([float(info["decision_loss"]) for info in told], dtype=torch.float64)
    if statistic == "objective":
        return float(losses.sum())
    # Responses of a cohort do not determine the loss of a fixed decision over all clients.
    if any(len(response) != len(info.get("p", ())) for response, info in zip(responses, told, strict=True)):
        return None
    count = max(1, len(told) // 2) if statistic == "regret_half" else len(told)
    return float(regret(torch.tensor(responses, dtype=torch.float64)[:count], losses[:count])) / count


def _bound(recipe: Row, rounds: int, clients: int) -> float | None:
    """The bound per round; None for rules that the theorem is not about."""
    algorithm, weighting = recipe.get("algorithm", {}), recipe.get("weighting") or {}
    table = weighting if weighting.get("kind") == "aaggff_s" else algorithm
    cdf = table.get("cdf")
    other_range = isinstance(cdf, Mapping) and "variant" in cdf
    if "aaggff_s" not in (table.get("name"), table.get("kind")) or table.get("mode") == "official" or other_range:
        return None
    return regret_bound(rounds, clients, table.get("C1", 0.0), table.get("C2")) / rounds if rounds and clients else None


def _sizes(last: Row, sizes: list[int] | None) -> Tensor | None:
    return torch.tensor(sizes, dtype=torch.float64)[torch.tensor(last["ids"])] if sizes else None
