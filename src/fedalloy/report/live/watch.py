"""One thread that watches the files of runs and notifies the pages of changes, so that pages need not poll.

It pauses while no page is open. Otherwise it compares times and sizes of files, and reads what was added to the runs
that some page shows.
"""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedalloy.core.errors import FedalloyError
from fedalloy.experiment.records.index import Index
from fedalloy.report.live.gathered import gathered
from fedalloy.report.live.runs import RunStore

LOOK_EVERY = 0.5
"""Seconds between two checks."""
_SCAN_EVERY = 4
"""Checks between two searches for new runs."""
_KEPT_OPEN = 32
"""Indices that stay open although no page shows them."""
_STEPS = 8
"""Blocks of a stream that are read between two events."""


class Watch:
    """Keeps a version number of every run's last change; it only grows."""

    def __init__(self, store: RunStore, every: float | None = None) -> None:
        self.store, self.version = store, 0
        self.changed: dict[str, int] = {}
        self.errors: dict[str, str] = {}
        self.reading: set[str] = set()
        self._every = LOOK_EVERY if every is None else every
        self._news = threading.Condition()
        self._watched: Counter[str] = Counter()
        self._pages = 0
        self._indices: OrderedDict[str, tuple[Path, Index]] = OrderedDict()
        self._opening = threading.Lock()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="fedalloy-watch", daemon=True)

    def start(self) -> None:
        """Check once and start the thread."""
        self.look(scan=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and close all files."""
        with self._news:
            self._ended = True
            self._news.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
        with self._opening:
            for _, index in self._indices.values():
                index.close()
            self._indices.clear()

    @property
    def ended(self) -> bool:
        """Whether the server is closing."""
        return self._ended

    @contextmanager
    def page(self, runs: Iterable[str]) -> Iterator[None]:
        """Register an open page that shows the list and details of these runs."""
        chosen = list(runs)
        with self._news:
            self._pages += 1
            self._watched.update(chosen)
            self._news.notify_all()
        try:
            yield
        finally:
            with self._news:
                self._pages -= 1
                self._watched.subtract(chosen)

    def wait(self, seen: int, seconds: float) -> int:
        """Wait until a change is newer than ``seen``, or for ``seconds``; returns the newest number."""
        with self._news:
            self._news.wait_for(lambda: self.version > seen or self._ended, seconds)
            return self.version

    def index(self, run: str) -> Index:
        """The index of a run, opened on first use."""
        folder = self.store.folder(run)
        with self._opening:
            if run not in self._indices:
                self._indices[run] = folder, Index(folder, gathered())
            self._indices.move_to_end(run)
            spare = [one for one in self._indices if one != run and not self._watched[one]]
            for one in spare[: max(0, len(self._indices) - _KEPT_OPEN)]:
                self._indices.pop(one)[1].close()
            return self._indices[run][1]

    def look(self, scan: bool) -> None:
        """Check all runs once."""
        if scan and self.store.scan():
            self._tell(set(self.changed) ^ set(self.store.folders))
        for run in list(self.store.folders):
            if not (scan or self.store.is_going(run)):  # runs that have ended are checked less often
                continue
            try:
                if self.store.refresh(run):
                    self._tell([run])
            except (LookupError, OSError):  # deleted since the last search
                continue
        for run in [run for run, times in self._watched.items() if times > 0]:
            self._read_on(run)

    def _read_on(self, run: str) -> None:
        try:
            index = self.index(run)
            before, said, more = len(index), self.errors.pop(run, ""), True
            for _ in range(_STEPS):
                more = more and index.update()
            (self.reading.add if more else self.reading.discard)(run)
            if len(index) != before or more:
                self._tell([run])
        except (LookupError, OSError, sqlite3.Error):
            return
        except FedalloyError as error:
            self.errors[run] = str(error)
            if said != str(error):
                self._tell([run])

    def _tell(self, runs: Iterable[str]) -> None:
        with self._news:
            self.version += 1
            self.changed.update(dict.fromkeys(runs, self.version))
            self._news.notify_all()

    def _run(self) -> None:
        looks = 0
        while not self._ended:
            with self._news:
                self._news.wait_for(lambda: self._pages > 0 or self._ended)
                self._news.wait_for(lambda: self._ended, self._every)
            if not self._ended:
                looks += 1
                self.look(scan=looks % _SCAN_EVERY == 0)
