"""Stopping, pausing and resuming the runs of a server.

A run is asked to end after the round in progress, with a checkpoint. Only what does not end in time is ended by
Flower, in the middle of a round, which is then repeated when the run continues. A pause is a stop with a mark in the
run folder, by which ``resume`` finds what to continue.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.recipe import load
from fedalloy.experiment.records.stop import ask_to_stop
from fedalloy.flower.database import RunEntry, run_entries
from fedalloy.flower.flwr_cli import FlwrCli, SubmittedRun
from fedalloy.flower.layout import PAUSED
from fedalloy.flower.submission import WANTED, Study, state_of

_LOOK = 0.5
Say = Callable[[str], None]


@dataclass
class Control:
    """The runs of a server; ``patience`` are the seconds that a run has to end by itself."""

    cli: FlwrCli
    say: Say
    patience: float = 60.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def stop(self) -> list[str]:
        """End all unfinished runs; their numbers."""
        asked = self._unfinished()
        for one in asked:
            if one.folder:
                with contextlib.suppress(CheckpointError, OSError):  # nobody writes it: there is nothing to finish
                    ask_to_stop(one.folder)
        self._wait(asked)
        for one in self._unfinished(asked):
            self.say(f"run {one.number} did not end within {self.patience:g} s; it is ended in the middle of a round")
            SubmittedRun(self.cli, one.number).stop()
        return [one.number for one in asked]

    def pause(self) -> list[str]:
        """Stop all unfinished runs, and mark them to be resumed."""
        for one in self._unfinished():
            if one.folder and one.folder.is_dir():
                (one.folder / PAUSED).touch()
        return self.stop()

    def resume(self) -> list[str]:
        """Continue the runs that were paused; their new numbers."""
        going = {one.folder for one in self._unfinished() if not one.restored}
        started: dict[Path, str] = {}
        for one in run_entries(self.cli.place):
            if one.folder and one.folder not in {*going, *started} and _is_paused(one.folder):
                study = Study(self.cli, load(one.folder / WANTED), one.folder, one.seed)
                started[one.folder] = study.begin(lambda text: None)[0].id
        return list(started.values())

    def _unfinished(self, among: Sequence[RunEntry] | None = None) -> list[RunEntry]:
        wanted = None if among is None else {one.number for one in among}
        found = [one for one in run_entries(self.cli.place) if not one.over]
        return [one for one in found if wanted is None or one.number in wanted]

    def _wait(self, asked: Sequence[RunEntry]) -> None:
        end = self.clock() + self.patience
        while self._unfinished(asked) and self.clock() < end:
            self.sleep(_LOOK)


def _is_paused(folder: Path) -> bool:
    """Whether a run waits for ``resume``; one whose last round was the one in progress has nothing left to do."""
    return (folder / PAUSED).exists() and state_of(folder) != "finished"
