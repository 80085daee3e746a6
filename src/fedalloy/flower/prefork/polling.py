"""Polling for work: often after there was some, less and less often while there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_WORKING = 0.1
"""Seconds between two checks on work in progress."""
_SHARE = 0.1
"""The fraction of the time since the last work to sleep between polls."""


class Backoff:
    """Replaces the module ``time`` in a loop that sleeps while it has nothing to do.

    It sleeps for a tenth of the time since the last work; sleeps of at most ``at_work`` seconds are those in which the
    loop waits for work in progress.
    """

    def __init__(
        self, shortest: float, longest: float, at_work: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.shortest, self.longest, self.at_work, self.clock = shortest, longest, at_work, clock
        self.work()

    def work(self) -> None:
        """Note that there is work."""
        self.busy = self.clock()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def delay(self, seconds: float) -> float:
        """How long to sleep instead of ``seconds``."""
        if seconds <= self.at_work:
            self.work()
            return min(seconds, _WORKING)
        return min(self.longest, max(self.shortest, _SHARE * (self.clock() - self.busy)))

    def sleep(self, seconds: float) -> None:
        """Sleep for ``delay(seconds)``."""
        time.sleep(self.delay(seconds))


def retry_sooner() -> None:
    """A message may be announced before all of it is there; a request that comes too early is repeated after a tenth of
    a second at first, then after longer and longer, instead of after a whole second."""
    from flwr.supercore.inflatable import inflatable_utils

    for function in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        defaults = function.__kwdefaults__ or {}
        defaults["initial_backoff"] = min(defaults["initial_backoff"], _WORKING)
