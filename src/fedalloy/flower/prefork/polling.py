"""Looking for work: often after there was some, less and less often while there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_WORKING = 0.1
"""Seconds between two looks at what is being done just now."""
_SHARE = 0.1
"""Of the time since there was something to do: how long to sleep before looking again."""


class Backoff:
    """Stands in for the module ``time`` in a loop that sleeps while it has nothing to do.

    It sleeps for a tenth of the time that has passed since there was something; sleeping ``at_work`` seconds at most
    is how the loop waits for the end of what it does.
    """

    def __init__(
        self, shortest: float, longest: float, at_work: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shortest, self.longest, self.at_work, self.clock = shortest, longest, at_work, clock
        self.work()

    def work(self) -> None:
        """There is something to do."""
        self.busy = self.clock()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def delay(self, seconds: float) -> float:
        """How long to sleep where ``seconds`` were meant."""
        if seconds <= self.at_work:
            self.work()
            return min(seconds, _WORKING)
        return min(self.longest, max(self.shortest, _SHARE * (self.clock() - self.busy)))

    def sleep(self, seconds: float) -> None:
        """Sleep, but not so long."""
        time.sleep(self.delay(seconds))


def retry_sooner() -> None:
    """A message may be announced before all of it is there; who asks for the rest too early waits for a tenth of a
    second at first, then for longer and longer, instead of a whole second."""
    from flwr.supercore.inflatable import inflatable_utils

    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        defaults = function.__kwdefaults__ or {}
        defaults["initial_backoff"] = min(defaults["initial_backoff"], _WORKING)
