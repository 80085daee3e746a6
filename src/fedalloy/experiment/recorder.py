"""Where a run writes: a folder on disk, or lists in memory, behind one interface."""

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
"""Seconds after which rows are flushed to the operating system, so that readers see them."""


class Recorder(Protocol):
    """The streams of a run (``rounds``, ``clients``, ``timings``), its checkpoints and its status."""

    def append(self, stream: StreamName, row: Mapping[str, Any]) -> None:
        """Add one row."""

    def client_line(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row of ``clients`` as it is written."""

    def checkpoint(self, round: int, server: State, clients: ClientStore, extra: Mapping[str, Any]) -> None:
        """Save everything up to this round."""

    def snapshot(self, round: int, x: Tensor, y: Tensor) -> None:
        """Keep the synthetic samples of a round."""

    def status(self, state: RunState, round: int, reason: str = "") -> None:
        """Set the status of the run."""


@dataclass
class MemoryRecorder:
    """Keeps the rows in lists; a run without a folder cannot be resumed."""

    streams: dict[StreamName, list[Row]] = field(default_factory=lambda: {"rounds": [], "clients": [], "timings": []})

    def append(self, stream: StreamName, row: Mapping[str, Any]) -> None:
        self.streams[stream].append(dict(row))

    def client_line(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return row

    def checkpoint(self, round: int, server: State, clients: ClientStore, extra: Mapping[str, Any]) -> None:
        """Does nothing."""

    def snapshot(self, round: int, x: Tensor, y: Tensor) -> None:
        """Does nothing: ``RunResult.synthetic`` returns the samples at the end."""

    def status(self, state: RunState, round: int, reason: str = "") -> None:
        """Does nothing."""


@dataclass
class FolderRecorder:
    """Writes into a locked run folder; readers see a row shortly after the end of its round."""

    folder: RunFolder
    _shown: float = 0.0

    def append(self, stream: StreamName, row: Mapping[str, Any]) -> None:
        self.folder.append(stream, row)
        # Timings are written last: a reader that sees them sees the whole round.
        if stream == "timings" and time.monotonic() - self._shown >= SHOWN_EVERY:
            self.folder.flush()
            self._shown = time.monotonic()

    def client_line(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.folder.client_line(row)

    def checkpoint(self, round: int, server: State, clients: ClientStore, extra: Mapping[str, Any]) -> None:
        self.folder.checkpoint(round, server, clients.commit(round), extra)

    def snapshot(self, round: int, x: Tensor, y: Tensor) -> None:
        snapshots.save(self.folder.path, round, x, y)

    def status(self, state: RunState, round: int, reason: str = "") -> None:
        if state == "interrupted":
            self.folder.note_interruption(round, reason)
        else:
            self.folder.set_status(state, round, reason)
