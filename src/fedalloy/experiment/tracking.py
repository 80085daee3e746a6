"""Trackers: other tools that receive the numbers of a run while it runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.errors import RegistryError, SpecError
from fedalloy.core.protocols import ClientStore
from fedalloy.core.types import State
from fedalloy.experiment.recorder import Recorder
from fedalloy.experiment.records import atomic
from fedalloy.experiment.records.folder import RunState, StreamName
from fedalloy.experiment.records.reading import name_of
from fedalloy.experiment.records.scalars import scalars, seconds_of

_REMEMBERED = "track.json"


@dataclass(frozen=True)
class TrackedRun:
    """Passed to a tracker at the beginning; when a run is resumed, ``round`` is the last valid one."""

    folder: Path
    name: str
    recipe: Mapping[str, Any]
    round: int = 0

    def recall(self, tracker: str) -> str | None:
        """The id that a tracker gave this run in an earlier session."""
        return self._known().get(tracker)

    def remember(self, tracker: str, run: str) -> None:
        """Store that id beside the run."""
        text = json.dumps({**self._known(), tracker: run}, indent=2) + "\n"
        atomic.write_text(self.folder / _REMEMBERED, text)

    def _known(self) -> dict[str, str]:
        file = self.folder / _REMEMBERED
        known: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        return known


class Tracker(Protocol):
    """Receives the numbers of a run while it runs; registered trackers are created without arguments."""

    def begin(self, run: TrackedRun, /) -> None:
        """A run begins or continues."""

    def log(self, round: int, values: Mapping[str, float], /) -> None:
        """The numbers of a round."""

    def end(self, state: str, reason: str, /) -> None:
        """The run ended: finished, failed or stopped."""


def make_trackers(names: str | Sequence[str | Tracker], folder: str | Path | None) -> list[Tracker]:
    """Trackers by name, or given as objects. A missing library is an error before the first round."""
    if names and folder is None:
        raise SpecError("tracking needs a folder for the run: give one")
    asked: Sequence[str | Tracker] = [names] if isinstance(names, str) else names
    once = [one for place, one in enumerate(asked) if not isinstance(one, str) or one not in asked[:place]]
    return [_made(one) if isinstance(one, str) else one for one in once]


def _made(name: str) -> Tracker:
    try:
        make = registry.find("tracker", name)
    except RegistryError as error:
        raise SpecError(str(error)) from None
    tracker: Tracker = make()
    return tracker


class TrackingRecorder:
    """Wraps a :class:`fedalloy.experiment.recorder.Recorder` and passes the numbers to trackers; a tracker that
    raises is not called again."""

    def __init__(
        self, recorder: Recorder, trackers: Sequence[Tracker], folder: Path, recipe: Mapping[str, Any]
    ) -> None:
        self._recorder, self._trackers = recorder, list(trackers)
        self._folder, self._recipe = folder, recipe

    def append(self, stream: StreamName, row: Mapping[str, Any]) -> None:
        """Record a row, and pass its numbers to the trackers."""
        self._recorder.append(stream, row)
        if stream == "rounds":
            values = scalars(row)
            self._each(lambda one: one.log(row["round"], values))
        elif stream == "timings":
            spent = {"seconds": seconds_of(row)}
            self._each(lambda one: one.log(row["round"], spent))

    def checkpoint(self, round: int, server: State, clients: ClientStore, extra: Mapping[str, Any]) -> None:
        """Trackers are not involved."""
        self._recorder.checkpoint(round, server, clients, extra)

    def snapshot(self, round: int, x: Tensor, y: Tensor) -> None:
        """Samples are kept with the run; trackers get numbers only."""
        self._recorder.snapshot(round, x, y)

    def status(self, state: RunState, round: int, reason: str = "") -> None:
        """The state is ``running`` when a run begins, and another one when it ends."""
        self._recorder.status(state, round, reason)
        if state == "running":
            run = TrackedRun(self._folder, name_of(self._recipe), self._recipe, round)
            self._each(lambda one: one.begin(run))
        else:
            self._each(lambda one: one.end(state, reason))

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                do(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                said = f"{type(tracker).__name__} failed and is not called again: {error}"
                warnings.warn(said, RuntimeWarning, stacklevel=3)
