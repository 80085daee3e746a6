"""Where a run writes: a folder on disk, or lists in memory; the driver cannot tell which."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from fedalloy.core.protocols import ClientStore
from fedalloy.core.types import State
from fedalloy.experiment.records import snapshots
from fedalloy.experiment.records.folder import RunFolder, RunState, StreamName

Row = dict[str, Any]
SHOWN_EVERY = 0.5
"""Seconds after which rows are handed to the operating system, for those who watch."""


class Recorder(Protocol):
    """The streams of a run (``rounds``, ``clients``, ``timings``), its checkpoints and its status."""

    def append(self, stream: StreamName, row: Mapping[str, Any]) -> None:
        """Add one row."""

    def checkpoint(self, round: int, server: State, clients: ClientStore, extra: Mapping[str, Any]) -> None:
        """Make everything up to this round safe."""

    def snapshot(self, round: int, x: Tensor, y: Tensor) -> None:
        """Keep the synthetic samples of a round."""

    def status(self, state: RunState, round: int, reason: str = "") -> None:
        """Say how the run stands."""


@dataclass
class MemoryRecorder:
    """Keeps the rows in lists; a run without a folder cannot be resumed."""

    streams: dict[StreamName, list[Row]] = field(default_factory=lambda: {"rounds": [], "clients": [], "timings": []})

    def append(self, stream: StreamName, row: Mapping[str, Any]) -> None:
        self.streams[stream].append(dict(row))

    def checkpoint(self, round: int, server: State, clients: ClientStore, extra: Mapping[str, Any]) -> None:
        """Nothing to make safe."""

    def snapshot(self, round: int, x: Tensor, y: Tensor) -> None:
        """A run without a folder hands out its samples when it ends."""

    def status(self, state: RunState, round: int, reason: str = "") -> None:
        """Nobody else is looking."""


@dataclass
class FolderRecorder:
    """Writes into a locked run folder; readers see a row within a moment of the end of its round."""

    folder: RunFolder
    _shown: float = 0.0

    def append(self, stream: StreamName, row: Mapping[str, Any]) -> None:
        self.folder.append(stream, row)
        # Timings are a round's last row: whoever sees them sees the whole round.
        if stream == "timings" and time.monotonic() - self._shown >= SHOWN_EVERY:
            self.folder.flush()
            self._shown = time.monotonic()

    def checkpoint(self, round: int, server: State, clients: ClientStore, extra: Mapping[str, Any]) -> None:
        self.folder.checkpoint(round, server, clients.commit(round), extra)

    def snapshot(self, round: int, x: Tensor, y: Tensor) -> None:
        snapshots.save(self.folder.path, round, x, y)

    def status(self, state: RunState, round: int, reason: str = "") -> None:
        if state == "interrupted":
            self.folder.note_interruption(round, reason)
        else:
            self.folder.set_status(state, round, reason)
