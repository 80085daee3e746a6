"""What a tracker is, and which there are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from fedalloy.core.errors import SpecError, nearest
from fedalloy.records import atomic

TRACKERS = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "WeightsAndBiases"}
"""Names and classes; each is a module here."""
_REMEMBERED = "track.json"


@dataclass(frozen=True)
class Told:
    """What a tracker is told at the beginning; ``round`` is the last one that counts when a run is resumed."""

    folder: Path
    name: str
    recipe: Mapping[str, Any]
    round: int = 0

    def recall(self, tracker: str) -> str | None:
        """The id under which a tracker knows this run from an earlier sitting."""
        file = self.folder / _REMEMBERED
        known: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return known.get(tracker)

    def remember(self, tracker: str, run: str) -> None:
        """Keep that id beside the run."""
        file = self.folder / _REMEMBERED
        known = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        atomic.write_text(file, json.dumps({**known, tracker: run}, indent=2) + "\n")


class Tracker(Protocol):
    """Somebody who wants to know the numbers of a run while it goes."""

    def begin(self, told: Told) -> None:
        """A run begins or goes on."""

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """The numbers of a round."""

    def end(self, state: str, reason: str) -> None:
        """The run ended: finished, failed or stopped."""


def make_trackers(names: Sequence[str | Tracker], folder: str | Path | None) -> list[Tracker]:
    """Trackers by name; a value that is one already stays. A library that is missing is told before the first round."""
    if names and folder is None:
        raise SpecError("tracking needs a folder for the run: give one")
    return [_made(one) if isinstance(one, str) else one for one in dict.fromkeys(names)]


def flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """A recipe as dotted names.

    >>> flat({"run": {"rounds": 3}, "name": "a"})
    {'run.rounds': 3, 'name': 'a'}
    """
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return found


def needed(module: str, tracker: str) -> Any:
    """A library, or advice on how to get it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise SpecError(f"tracking with {tracker} needs {error.name}: pip install 'fedalloy[track]'") from error


def _made(name: str) -> Tracker:
    if name not in TRACKERS:
        raise SpecError(f"unknown tracker '{name}': {nearest(name, TRACKERS)}")
    tracker: Tracker = getattr(import_module(f"fedalloy.track.{name}"), TRACKERS[name])()
    return tracker
