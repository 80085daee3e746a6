"""The event stream of one page: summary lines of changed runs, and what was added to the runs it shows."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

from fedalloy.experiment.records.index import Index
from fedalloy.report.live.answers import additions, gathered, log
from fedalloy.report.live.questions import cursor
from fedalloy.report.live.watch import Watch

MOST_SHOWN = 40
"""Runs whose additions one page may request."""
HEARTBEAT = 15.0
"""Seconds without events after which a comment is sent: it detects closed pages and keeps proxies from closing."""


class Events:
    """Iterates over the texts to send; ends when the server does."""

    def __init__(self, watch: Watch, shown: Sequence[str], since: int = 0) -> None:
        self._watch = watch
        self._rows = dict(cursor(one) for one in shown[:MOST_SHOWN])
        for run in self._rows:
            watch.store.folder(run)  # refuse an unknown run at once
        self._pictured: dict[str, int] = {}
        # A page that was open before the server restarted may have a larger number than the new server.
        self._seen = since if since <= watch.version else 0

    def __iter__(self) -> Iterator[str]:
        with self._watch.page(self._rows):
            latest = self._watch.version
            changed = self._changed() | set(self._rows)
            while not self._watch.ended:
                self._seen = latest
                yield "".join(self._news(changed)) or ": keep-alive\n\n"
                latest = self._watch.wait(self._seen, HEARTBEAT)
                changed = self._changed()

    def _changed(self) -> set[str]:
        return {run for run, when in list(self._watch.changed.items()) if when > self._seen}

    def _news(self, changed: set[str]) -> Iterator[str]:
        if changed:
            yield _event("runs", [self._line(run) for run in sorted(changed)])
        for run in self._rows:
            if run in changed:
                yield from self._added(run)

    def _line(self, run: str) -> dict[str, Any]:
        try:
            return self._watch.store.summary(run)
        except (LookupError, OSError):
            return {"id": run, "gone": True}

    def _added(self, run: str) -> Iterator[str]:
        try:
            index = self._watch.index(run)
            found = additions(index, self._rows[run])
            if found is None:
                self._rows[run] = 0
                yield _event("anew", {"run": run})
                return
            if found["rows"] > self._rows[run]:
                self._rows[run] = found["rows"]
                complete = run not in self._watch.reading
                yield _event("added", {"run": run, "complete": complete, **found, **self._pictures(run, index)})
            elif run in self._watch.errors:
                yield _event("trouble", {"run": run, "text": self._watch.errors[run]})
        except (LookupError, OSError, sqlite3.Error):
            return

    def _pictures(self, run: str, index: Index) -> dict[str, Any]:
        """Everything except lines: small, so it is sent completely, but only when it may have changed visibly."""
        rows, before = self._rows[run], self._pictured.get(run, 0)
        if rows < before * 1.05:
            return {}
        self._pictured[run] = rows
        return {**gathered(self._watch.store, run, index), **log(index)}


def _event(kind: str, value: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(value, allow_nan=False, separators=(',', ':'))}\n\n"
