"""A metric against lambda, the share of the local model in a client's model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records.reading import RunRecord, read_run
from fedalloy.report.plots.canvas import Options
from fedalloy.results.served import client_values, direction
from fedalloy.results.statistics import moments


@dataclass(frozen=True)
class MixtureScores:
    """``values`` is ``[lambdas, clients]``; clients without a value are NaN, losses that overflowed infinite."""

    lambdas: np.ndarray[Any, np.dtype[np.float64]]
    values: np.ndarray[Any, np.dtype[np.float64]]
    round: int
    metric: str


def gather_mixture(record: RunRecord, metric: str | None = None) -> MixtureScores:
    """The newest scores of a run at all lambdas."""
    metric = metric or record.recipe.get("run", {}).get("target_metric", "accuracy")
    rows = [row for row in record.clients() if row.get("model") == "mixed"]
    rows = [row for row in rows if row["round"] == rows[-1]["round"]]
    if not rows:
        raise SpecError(
            f"{record.path} has no scores at several lambdas: only methods that mix a federated and a local model "
            "record them (superfed, apfl), in their last round and every evaluate.mix_every rounds"
        )
    if metric not in rows[0]:
        raise SpecError(f"{record.path} was not scored by '{metric}'; add it to evaluate.metrics")
    higher = direction(record, metric)
    values = np.array([client_values(row, metric, higher) for row in rows], dtype=np.float64)
    return MixtureScores(np.array([row["mix"] for row in rows]), values, rows[-1]["round"], metric)


def draw(axes: Any, runs: Sequence[Path], options: Options) -> None:
    """The mean over clients, a band of one standard deviation, every client as a thin line."""
    found = gather_mixture(read_run(runs[0]), options.metric)
    known = found.values[:, ~np.isnan(found.values).all(0)]
    # A mean that is not finite leaves a gap in the line; do not average the finite values.
    mean, spread = np.array([moments(row) for row in known.tolist()]).T
    axes.plot(found.lambdas, known, color="0.8", linewidth=0.5)
    axes.fill_between(found.lambdas, mean - spread, mean + spread, alpha=0.3)
    axes.plot(found.lambdas, mean, marker="o", label=f"mean of {known.shape[1]} clients, ± one standard deviation")
    axes.set(xlabel="λ (0: federated model, 1: local model)", ylabel=found.metric, title=f"round {found.round}")
    axes.legend()
