"""Addresses, answers and streams of events of the live page, on the standard library's server.

| address | answer |
|---|---|
| ``GET /`` | the page |
| ``GET /assets/NAME`` | its script, style and charts, from a fixed list |
| ``GET /api/runs`` | one line about every run, and whether runs can be stopped here |
| ``GET /api/run?run=ID`` | everything about a run |
| ``GET /api/clients?run=ID&round=N`` | the scores of clients at an evaluation |
| ``GET /events?since=N&run=ID:ROWS&...`` | server-sent events: changed lines, and what was added to these runs |
| ``POST /api/stop`` ``{"run": ID}`` | asks a run to end after its round; needs the token |
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fedalloy.core.errors import FedalloyError, SpecError
from fedalloy.records.stop import ask_to_stop
from fedalloy.report.data.curves import LOWER_IS_BETTER
from fedalloy.report.palette import assign
from fedalloy.serve import answers, guard
from fedalloy.serve.assets import asset
from fedalloy.serve.events import Events
from fedalloy.serve.runs import RunStore
from fedalloy.serve.watch import Watch

MOST_STREAMS = 48
"""Open streams of events; each is a thread."""
_MOST_BODY = 4096
Query = dict[str, list[str]]


class LiveServer(ThreadingHTTPServer):
    """Serves one folder of runs on loopback."""

    daemon_threads = True
    # A stream of events ends when its page does: nobody waits for it.
    block_on_close = False

    def __init__(self, root: Path, port: int = 0, token: str | None = None, every: float | None = None) -> None:
        if not root.is_dir():
            raise SpecError(f"{root} is no folder; name the one that holds your runs (runs/ by default)")
        if token is not None and len(token) < guard.SHORTEST_TOKEN:
            raise SpecError(f"the token has {len(token)} characters; choose {guard.SHORTEST_TOKEN} or more, or 'auto'")
        self.token, self.store = token, RunStore(root)
        self.watch = Watch(self.store, every)
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise SpecError(f"port {port} cannot be had ({error.strerror}); choose another with --port") from None
        self.watch.start()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def server_close(self) -> None:
        """Let go of the port and of all files."""
        super().server_close()
        self.watch.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A page that was closed in the middle of an answer is nothing to report."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: LiveServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fedalloy", ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer a question."""
        where = urlsplit(self.path)
        refusal = guard.refuse_reading(self.headers, is_page=where.path == "/")
        if refusal:
            self._say(*refusal)
            return
        known: dict[str, Callable[[Query], None]] = {
            "/": lambda query: self._asset("live.html"),
            "/api/runs": self._runs,
            "/api/run": self._run,
            "/api/clients": self._clients,
            "/events": self._events,
        }
        answer = known.get(where.path)
        if answer:
            self._safely(answer, parse_qs(where.query, max_num_fields=100))
        elif where.path.startswith("/assets/"):
            self._asset(where.path.removeprefix("/assets/"))
        else:
            self._say(404, "there is nothing here")

    def do_POST(self) -> None:
        """Do something."""
        refusal = guard.refuse_changing(self.headers, self.server.token)
        if not refusal and urlsplit(self.path).path != "/api/stop":
            refusal = 404, "there is nothing here"
        body = b"" if refusal else self._body()
        if refusal or body is None:
            self.close_connection = True  # what was not read must not be taken for the next request
            self._say(*(refusal or (413, "that is too long")))
            return
        self._safely(self._stop, {"body": [body.decode("utf-8", "replace")]})

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line each."""

    def _safely(self, answer: Callable[[Query], None], query: Query) -> None:
        """Faults of the question and of the files end in one line for the page."""
        try:
            answer(query)
        except (LookupError, FileNotFoundError):
            self._say(404, "there is no such run (any more)")
        except ValueError:
            self._say(400, "this cannot be understood")
        except FedalloyError as error:
            self._say(409, str(error))
        except sqlite3.Error:
            self._say(503, "the index of this run is busy; try again")

    def _runs(self, query: Query) -> None:
        store, since = self.server.store, self.server.watch.version
        lines = [store.summary(run) for run in sorted(store.folders)]
        styles = {name: style.to_json() for name, style in assign(line["name"] for line in lines).items()}
        self._json({
            "folder": store.root.name, "can_stop": self.server.token is not None, "since": since, "runs": lines,
            "styles": styles, "lower_is_better": sorted(LOWER_IS_BETTER),
        })  # fmt: skip

    def _run(self, query: Query) -> None:
        run, watch = query["run"][0], self.server.watch
        with watch.page([run]):
            self._json(answers.details(self.server.store, run, watch.index(run)))

    def _clients(self, query: Query) -> None:
        run, watch, round = query["run"][0], self.server.watch, int(query["round"][0])
        with watch.page([run]):
            names, metric = answers.names_of(self.server.store.folder(run)), self.server.store.summary(run)["metric"]
            self._json(answers.clients(watch.index(run).clients(round), names, metric))

    def _events(self, query: Query) -> None:
        events = Events(self.server.watch, query.get("run", []), int(query.get("since", ["0"])[0]))
        if not self.server.streams.acquire(blocking=False):
            self._say(503, "too many pages are open")
            return
        try:
            self._head(200, "text/event-stream", None)
            for text in events:
                self.wfile.write(text.encode())
                self.wfile.flush()
        except OSError:  # the page was closed
            pass
        finally:
            self.server.streams.release()
            self.close_connection = True

    def _stop(self, query: Query) -> None:
        asked = json.loads(query["body"][0])
        if not isinstance(asked, dict) or not isinstance(asked.get("run"), str):
            raise ValueError("no run")
        ask_to_stop(self.server.store.folder(asked["run"]))
        self._json({"asked": asked["run"]})

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or int(length) > _MOST_BODY:
            return None
        return self.rfile.read(int(length))

    def _asset(self, name: str) -> None:
        found = asset(name)
        if found is None:
            self._say(404, "there is nothing here")
            return
        self._send(200, *found)

    def _say(self, status: int, text: str) -> None:
        self._send(status, "application/json", json.dumps({"error": text}).encode())

    def _json(self, value: Any) -> None:
        self._send(200, "application/json", json.dumps(value, allow_nan=False, separators=(",", ":")).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self._head(status, kind, len(body))
        self.wfile.write(body)

    def _head(self, status: int, kind: str, length: int | None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind if kind.startswith("image/") else f"{kind}; charset=utf-8")
        if length is not None:
            self.send_header("Content-Length", str(length))
        if length is None or self.close_connection:
            self.send_header("Connection", "close")
        for name, value in guard.HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
