"""A recorder with listeners: everything is recorded as ever, and trackers hear of the numbers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fedalloy.core.protocols import ClientStore
from fedalloy.core.types import State
from fedalloy.records.folder import RunState, StreamName
from fedalloy.records.scalars import scalars, seconds_of
from fedalloy.results.outcome import name_of
from fedalloy.run.recorder import Recorder
from fedalloy.track.tracker import Told, Tracker


class Tracked:
    """Wraps a :class:`fedalloy.run.recorder.Recorder`; a tracker that raises is not asked again."""

    def __init__(
        self, recorder: Recorder, trackers: Sequence[Tracker], folder: Path, recipe: Mapping[str, Any]
    ) -> None:
        self._recorder, self._trackers = recorder, list(trackers)
        self._folder, self._recipe = folder, recipe

    def append(self, stream: StreamName, row: Mapping[str, Any]) -> None:
        """Record a row, and tell its numbers."""
        self._recorder.append(stream, row)
        if stream == "rounds":
            values = scalars(row)
            self._each(lambda one: one.log(row["round"], values))
        elif stream == "timings":
            spent = {"seconds": seconds_of(row)}
            self._each(lambda one: one.log(row["round"], spent))

    def checkpoint(self, round: int, server: State, clients: ClientStore, extra: Mapping[str, Any]) -> None:
        """Nothing that a tracker need know."""
        self._recorder.checkpoint(round, server, clients, extra)

    def snapshot(self, round: int, x: Tensor, y: Tensor) -> None:
        """Samples are kept where the run is; trackers hear of numbers alone."""
        self._recorder.snapshot(round, x, y)

    def status(self, state: RunState, round: int, reason: str = "") -> None:
        """A run is running when it begins, and something else when it ends."""
        self._recorder.status(state, round, reason)
        if state == "running":
            told = Told(self._folder, name_of(self._recipe), self._recipe, round)
            self._each(lambda one: one.begin(told))
        else:
            self._each(lambda one: one.end(state, reason))

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                do(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                said = f"{type(tracker).__name__} failed and is left out from here on: {error}"
                warnings.warn(said, RuntimeWarning, stacklevel=3)
