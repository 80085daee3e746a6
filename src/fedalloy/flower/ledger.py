"""The run folder of a strategy: rows of every round, and checkpoints to resume from."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import MetricRecord
from flwr.serverapp.strategy import Result

from fedalloy.core.algorithm import Algorithm, ServerState
from fedalloy.core.errors import CheckpointError
from fedalloy.core.spec import algorithm_to_spec
from fedalloy.experiment.records import atomic
from fedalloy.experiment.records.environment import describe
from fedalloy.experiment.records.folder import Checkpoint, RunFolder, RunState
from fedalloy.experiment.records.lock import held, wait_for_turn
from fedalloy.experiment.records.reading import read_json, read_run

_log = logging.getLogger("flwr")
_FIELDS = ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp")


@dataclass
class Ledger:
    """Where a strategy writes; without a folder, only rows are kept, in memory."""

    folder: RunFolder | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)

    def row(self, row: dict[str, Any], seconds: Mapping[str, float]) -> None:
        """One round, and how long its phases took."""
        self.rows.append(row)
        if self.folder:
            self.folder.append("rounds", row)
            self.folder.append("timings", {"round": row["round"], **seconds})

    def names(self, names: list[str]) -> None:
        """The names of the clients; they may change when a node that was away connects."""
        if self.folder and names:
            file, kept = self.folder.path / "manifest.json", {"clients": len(names), "names": names}
            if read_json(file) != kept:
                atomic.write_text(file, json.dumps(kept, indent=2) + "\n")

    def scores(self, row: Mapping[str, Any]) -> None:
        """One evaluation with every client's values."""
        if self.folder:
            self.folder.append("clients", row)

    def save(self, round: int, state: ServerState, extra: Mapping[str, Any]) -> None:
        """Save everything up to this round."""
        if self.folder:
            self.folder.checkpoint(round, state, {}, extra)
            self.folder.set_status("running", round)

    def close(self, state: RunState, round: int, reason: str = "") -> None:
        """Record how the run ended."""
        if self.folder:
            self.folder.set_status(state, round, reason)


@contextmanager
def open_ledger(
    place: Path | None, algorithm: Algorithm, seed: int, name: str = ""
) -> Iterator[tuple[Ledger, Checkpoint | None]]:
    """The ledger, and the checkpoint to resume from if the folder holds one of the same algorithm."""
    if place is None:
        yield Ledger(), None
        return
    recipe: dict[str, Any] = {"algorithm": algorithm_to_spec(algorithm), "run": {"seeds": [seed]}}
    recipe |= {"name": name} if name else {}
    wait_for_turn(place, _log.info)
    folder = _open(place, recipe)
    with held(place, folder.lock, _log.info):
        saved = folder.latest()
        folder.rewind(saved)
        yield Ledger(folder), saved


def _open(place: Path, recipe: Mapping[str, Any]) -> RunFolder:
    if not (place / "recipe.toml").exists():
        return RunFolder.create(place, recipe, describe())
    found = read_run(place).recipe
    different = [name for name in ("algorithm", "run") if found.get(name) != recipe[name]]
    if different:
        raise CheckpointError(
            f"{place} holds the run of another strategy ({', '.join(different)} differs); use its original "
            "settings, or choose another folder"
        )
    return RunFolder.open(place)


def result_to_json(result: Result) -> dict[str, Any]:
    """The metrics of all rounds, for a checkpoint."""
    return {name: {str(round): dict(record) for round, record in getattr(result, name).items()} for name in _FIELDS}


def result_from_json(kept: Mapping[str, Any]) -> Result:
    """The inverse of :func:`result_to_json`."""
    result = Result()
    for name in _FIELDS:
        getattr(result, name).update({int(round): MetricRecord(one) for round, one in kept[name].items()})
    return result
