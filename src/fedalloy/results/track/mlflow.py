"""MLflow: the store that ``MLFLOW_TRACKING_URI`` names, or ``mlflow.db`` beside the run."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from fedalloy.core.registry import register
from fedalloy.experiment.tracking import TrackedRun
from fedalloy.results.track import needed

SEND_EVERY = 1.0
"""Seconds between two messages."""
_MOST_AT_ONCE = 1000
_LONGEST = 500
_STATES = {"finished": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "interrupted": "KILLED"}


@register("tracker", "mlflow")
class MLflow:
    """One MLflow run per run; the recipe as parameters, numbers with the round as their step."""

    def __init__(self) -> None:
        self._mlflow, self._entities = needed("mlflow", "MLflow"), needed("mlflow.entities", "MLflow")
        self._client: Any = None
        self._run, self._waiting, self._sent = "", list[Any](), 0.0

    def begin(self, run: TrackedRun) -> None:
        """Continue the MLflow run of an earlier session, or create one."""
        beside = f"sqlite:///{run.folder.resolve().parent / 'mlflow.db'}"
        self._client = self._mlflow.MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or beside)
        known = run.recall("mlflow")
        if known:
            self._client.update_run(known, status="RUNNING")
        self._run = known or self._create(run)

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Collect numbers and send them in batches: a message per round would slow down a fast run."""
        now = time.time()
        metric = self._entities.Metric
        self._waiting += [metric(_name(name), value, int(now * 1000), round) for name, value in values.items()]
        if now - self._sent >= SEND_EVERY:
            self._send()
            self._sent = now

    def end(self, state: str, reason: str) -> None:
        """Send the rest and the final state."""
        self._send()
        if reason:
            self._client.set_tag(self._run, "reason", reason)
        self._client.set_terminated(self._run, _STATES.get(state, "FAILED"))

    def _create(self, run: TrackedRun) -> str:
        title = run.folder.resolve().parent.name or "fedalloy"
        found = self._client.get_experiment_by_name(title)
        artifacts = (run.folder.resolve().parent / "mlflow-artifacts").as_uri()
        where = found.experiment_id if found else self._client.create_experiment(title, artifact_location=artifacts)
        made = str(self._client.create_run(where, run_name=f"{run.name} {run.folder.name}").info.run_id)
        run.remember("mlflow", made)
        values = [self._entities.Param(_name(name), str(value)[:_LONGEST]) for name, value in _flat(run.recipe).items()]
        for begin in range(0, len(values), 100):
            self._client.log_batch(made, params=values[begin : begin + 100])
        return made

    def _send(self) -> None:
        while self._waiting:
            some, self._waiting = self._waiting[:_MOST_AT_ONCE], self._waiting[_MOST_AT_ONCE:]
            self._client.log_batch(self._run, metrics=some)


def _name(name: str) -> str:
    """A name as MLflow allows it.

    >>> _name("info/angle(α)")
    'info/angle___'
    """
    return re.sub(r"[^\w\-. /:]", "_", name, flags=re.ASCII)


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A recipe as dotted names.

    >>> _flat({"run": {"rounds": 3}, "name": "a"})
    {'run.rounds': 3, 'name': 'a'}
    """
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return found
