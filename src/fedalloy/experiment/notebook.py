"""Runs in a notebook: a progress bar in the cell, and a stop button that keeps what there is."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedalloy.experiment.callbacks import Callback, RunStart

if TYPE_CHECKING:
    from fedalloy.experiment.driver import RoundEvent

_EVERY = 0.2
"""Seconds between two updates of a bar."""


def in_notebook() -> bool:
    """Whether this is a cell of a notebook: IPython with a kernel, not a terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")


@dataclass
class Bar:
    """A bar with a text beside it: HTML in a notebook, one line of text that is written over elsewhere."""

    _handle: Any = field(default=None, init=False, repr=False)
    _told: float = field(default=0.0, init=False, repr=False)

    def show(self, done: int, whole: int, text: str, last: bool = False) -> None:
        """Show how far it is; updates that follow each other too fast are left out."""
        now = time.monotonic()
        if last or now - self._told >= _EVERY:
            self._told = now
            self._html(done, whole, text) if in_notebook() else self._line(done, whole, text, last)

    def _html(self, done: int, whole: int, text: str) -> None:
        from html import escape

        display = sys.modules["IPython"].display
        made = display.HTML(f'<progress value="{done}" max="{whole}"></progress> {done}/{whole} {escape(text)}')
        if self._handle is None:
            self._handle = display.display(made, display_id=True)
        else:
            self._handle.update(made)

    @staticmethod
    def _line(done: int, whole: int, text: str, last: bool) -> None:
        print(f"\r{done}/{whole} {text}\033[K", end="\n" if last else "", file=sys.stderr, flush=True)


@dataclass
class ProgressBar(Callback):
    """A bar with the round, the newest score and the speed."""

    metric: str | None = None
    _bar: Bar = field(default_factory=Bar, init=False, repr=False)
    _begun: tuple[float, int] = field(default=(0.0, 0), init=False, repr=False)
    _score: str = field(default="", init=False, repr=False)
    _at: tuple[int, int] = field(default=(0, 0), init=False, repr=False)

    def on_run_begin(self, start: RunStart, /) -> None:
        self._bar, self._begun, self._score = Bar(), (time.monotonic(), start.round), ""
        self._at = (start.round, start.rounds)

    def on_round_end(self, event: RoundEvent, /) -> None:
        if event.evaluation is not None:
            self._score = "{} {:.3f}, ".format(*event.score(self.metric))
        self._at = (event.progress.round, event.rounds)
        self._bar.show(*self._at, self._text())

    def on_run_end(self, state: str, reason: str, /) -> None:
        self._bar.show(*self._at, f"{self._text()}, {state}{f': {reason}' if reason else ''}", last=True)

    def _text(self) -> str:
        begun, first = self._begun
        return f"{self._score}{(self._at[0] - first) / max(time.monotonic() - begun, 1e-9):.1f} rounds/s"
