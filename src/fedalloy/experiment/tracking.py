"""Trackers: other tools that receive the numbers of a run while it runs."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fedalloy.core import registry
from fedalloy.core.errors import RegistryError, SpecError
from fedalloy.experiment.callbacks import RunStart, Watching
from fedalloy.experiment.records import atomic
from fedalloy.experiment.records.scalars import scalars, seconds_of

if TYPE_CHECKING:
    from fedalloy.experiment.driver import RoundEvent

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


def as_callbacks(
    track: str | Sequence[str | Tracker],
    callbacks: Sequence[Any],
    watcher: Callable[[RoundEvent], None] | None,
    folder: str | Path | None,
) -> list[Any]:
    """Everything that a run calls, as callbacks; a tracker may also be among them, by its name or as an object."""
    tracking: list[Any] = [Tracking(one) for one in make_trackers(track, folder)]
    tracking += [Tracking(*make_trackers([one], folder)) if _is_tracker(one) else one for one in callbacks]
    return [*tracking, *([Watching(watcher)] if watcher else [])]


def _is_tracker(one: Any) -> bool:
    return isinstance(one, str) or all(callable(getattr(one, name, None)) for name in ("begin", "log", "end"))


def _made(name: str) -> Tracker:
    try:
        make = registry.find("tracker", name)
    except RegistryError as error:
        raise SpecError(str(error)) from None
    tracker: Tracker = make()
    return tracker


@dataclass
class Tracking:
    """The callback of a tracker, which gets the numbers of every round; one that raises is not called again."""

    tracker: Tracker | None

    def on_run_begin(self, start: RunStart, /) -> None:
        """The run begins or continues."""
        assert start.folder is not None
        run = TrackedRun(start.folder, start.name, start.recipe, start.round)
        self._safely(lambda one: one.begin(run))

    def on_round_end(self, event: RoundEvent, /) -> None:
        """The numbers of a round, and how long it took."""
        values, spent = scalars(event.row), {"seconds": seconds_of(event.seconds)}
        self._safely(lambda one: one.log(event.row["round"], values))
        self._safely(lambda one: one.log(event.row["round"], spent))

    def on_run_end(self, state: str, reason: str, /) -> None:
        """The run has ended."""
        self._safely(lambda one: one.end(state, reason))

    def _safely(self, do: Callable[[Tracker], None]) -> None:
        if self.tracker is None:
            return
        try:
            do(self.tracker)
        except Exception as error:
            said = f"{type(self.tracker).__name__} failed and is not called again: {error}"
            self.tracker = None
            warnings.warn(said, RuntimeWarning, stacklevel=4)
