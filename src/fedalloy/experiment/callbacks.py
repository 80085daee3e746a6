"""Callbacks: objects that a run calls while it goes on, for early stopping, logging, checkpoints or another tool.

An object needs only those methods that it wants called; :class:`Callback` has all of them and does nothing. Trackers
(:mod:`fedalloy.experiment.tracking`) and progress bars are callbacks too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedalloy.core.errors import SpecError, nearest
from fedalloy.tasks.metrics.direction import better, higher_is_better

if TYPE_CHECKING:
    from fedalloy.experiment.driver import RoundEvent

log = logging.getLogger("fedalloy")
HOOKS = ("on_run_begin", "on_evaluate", "on_round_end", "on_checkpoint", "on_run_end")


@dataclass(frozen=True)
class RunStart:
    """Passed at the beginning of a run; when it is resumed, ``round`` is the last valid one."""

    name: str
    recipe: Mapping[str, Any] = field(repr=False)
    folder: Path | None = None
    round: int = 0
    rounds: int = 0


@dataclass
class Wishes:
    """What callbacks have asked of the run."""

    stop: str | None = None
    save: bool = False


class Callback:
    """The methods that a run calls; override some of them."""

    def on_run_begin(self, start: RunStart, /) -> None:
        """A run begins or continues."""

    def on_evaluate(self, event: RoundEvent, /) -> None:
        """The models have been scored: ``event.evaluation``. Called before ``on_round_end``."""

    def on_round_end(self, event: RoundEvent, /) -> None:
        """A round has ended and is recorded."""

    def on_checkpoint(self, round: int, /) -> None:
        """A checkpoint of this round has been written; only for runs with a folder."""

    def on_run_end(self, state: str, reason: str, /) -> None:
        """The run is finished, failed, stopped or interrupted."""


class Hooks:
    """The callbacks of a run, called in their order."""

    def __init__(self, callbacks: Iterable[Any] = ()) -> None:
        self._callbacks = [_checked(one) for one in callbacks]

    def call(self, hook: str, *arguments: Any) -> None:
        """Call one method of every callback that has it; an error in it ends the run."""
        for one in self._callbacks:
            method = getattr(one, hook, None)
            if method is not None:
                method(*arguments)

    def round_ended(self, event: RoundEvent) -> None:
        """Call what a round calls."""
        if event.evaluation is not None:
            self.call("on_evaluate", event)
        self.call("on_round_end", event)


@dataclass
class Watching:
    """A function that is called after every round."""

    watcher: Any

    def on_round_end(self, event: RoundEvent) -> None:
        """Pass it on."""
        self.watcher(event)


@dataclass
class EarlyStopping(Callback):
    """Finish a run when ``metric`` (its mean over clients; default: the first that is scored) has not improved by more
    than ``least`` for ``patience`` evaluations.

    A resumed run counts from its first evaluation; the setting ``patience`` of :func:`fedalloy.fit` counts on.
    """

    patience: int = 5
    metric: str | None = None
    least: float = 0.0
    _best: float | None = field(default=None, init=False, repr=False)
    _stale: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_count(self.patience, "EarlyStopping: patience must be 1 or more evaluations")
        number = isinstance(self.least, Real) and not isinstance(self.least, bool)
        if not number or not math.isfinite(self.least) or self.least < 0:
            raise SpecError(f"EarlyStopping: least must be a number of 0 or more, got {self.least!r}")

    def on_run_begin(self, start: RunStart, /) -> None:
        self._best, self._stale = None, 0

    def on_evaluate(self, event: RoundEvent, /) -> None:
        metric, value = event.score(self.metric)
        higher = higher_is_better(metric)
        if higher is None:
            raise SpecError(f"EarlyStopping: '{metric}' has no direction, so nothing is better: name another metric")
        least = self.least if higher else -self.least
        improved = not math.isnan(value) and (self._best is None or better(value, self._best + least, higher))
        self._best, self._stale = (value, 0) if improved else (self._best, self._stale + 1)
        if self._stale >= self.patience:
            event.finish(f"no better {metric} in {self._stale} evaluations")


@dataclass
class Checkpoints(Callback):
    """Write a checkpoint after every so many rounds, besides those of ``checkpoint_every`` seconds."""

    every: int = 10

    def __post_init__(self) -> None:
        _check_count(self.every, "Checkpoints: every must be 1 or more rounds")

    def on_round_end(self, event: RoundEvent, /) -> None:
        if event.progress.round % self.every == 0:
            event.save()


@dataclass
class LogRounds(Callback):
    """Log one line per evaluation with the logger ``fedalloy``, at level INFO."""

    metric: str | None = None

    def on_evaluate(self, event: RoundEvent, /) -> None:
        metric, value = event.score(self.metric)
        log.info("round %d of %d: %s %.4f", event.progress.round, event.rounds, metric, value)


def _check_count(value: Any, said: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SpecError(f"{said}, got {value!r}")


def _checked(callback: Any) -> Any:
    """Refuse an object that would never be called, and a method that is misspelt."""
    if isinstance(callback, type):
        raise SpecError(f"{callback.__name__} is a class: give an object of it, {callback.__name__}()")
    known = [name for name in HOOKS if callable(getattr(callback, name, None))]
    strange = [name for name in dir(type(callback)) if name.startswith("on_") and name not in HOOKS]
    if strange:
        raise SpecError(f"{type(callback).__name__}.{strange[0]} is never called: {nearest(strange[0], HOOKS)}")
    if not known:
        raise SpecError(f"{callback!r} is no callback: it has none of {', '.join(HOOKS)}")
    return callback
