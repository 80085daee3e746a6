"""Addresses, answers and event streams of the live page, on the standard library's HTTP server.

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

import contextlib
import json
import sqlite3
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedalloy.core.errors import FedalloyError, SpecError
from fedalloy.experiment.records.stop import ask_to_stop
from fedalloy.report.live import answers, guard
from fedalloy.report.live.assets import asset
from fedalloy.report.live.events import Events
from fedalloy.report.live.questions import Query, run_in, taken_apart, whole_number
from fedalloy.report.live.runs import RunStore
from fedalloy.report.live.watch import Watch
from fedalloy.report.palette import assign

MOST_STREAMS = 48
"""The limit of open event streams."""
MOST_CONNECTIONS = 96
"""The limit of open connections, streams included; each is a thread."""
_MOST_BODY = 4096


def _refusal(text: str) -> bytes:
    return json.dumps({"error": text}).encode()


_FULL = _refusal("too many connections are open; close some pages")
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json; charset=utf-8\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_FULL), _FULL)
)


class LiveServer(ThreadingHTTPServer):
    """Serves one folder of runs on loopback."""

    daemon_threads = True
    # An event stream ends with its page: do not wait for it when the server ends.
    block_on_close = False

    def __init__(self, root: Path, port: int = 0, token: str | None = None, every: float | None = None) -> None:
        if not root.is_dir():
            raise SpecError(f"{root} is not a folder; name the one that holds your runs (runs/ by default)")
        if token is not None and len(token) < guard.SHORTEST_TOKEN:
            raise SpecError(f"the token has {len(token)} characters; choose {guard.SHORTEST_TOKEN} or more, or 'auto'")
        self.token, self.store = token, RunStore(root)
        self.watch = Watch(self.store, every)
        self.streams = threading.BoundedSemaphore(MOST_STREAMS)
        self._connections = threading.BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__(("127.0.0.1", port), Handler)
        except OSError as error:
            raise SpecError(f"port {port} is not available ({error.strerror}); choose another with --port") from None
        self.watch.start()

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def server_close(self) -> None:
        """Close the port and all files."""
        super().server_close()
        self.watch.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a new thread, unless there are too many."""
        if not self._connections.acquire(blocking=False):
            self._turn_away(request)
            return
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread could be started; at Ctrl-C there is one, which gives its place back itself
            self._connections.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The body of such a thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._connections.release()

    def _turn_away(self, request: Any) -> None:
        """A short answer from the accepting thread, which must not block."""
        with contextlib.suppress(OSError):
            request.setblocking(False)
            request.sendall(_TOO_MANY)
            request.recv(1 << 16)  # closing with unread data would reset the connection and lose the answer
        self.shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore pages that were closed during an answer."""


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: LiveServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "fedalloy", ""
    timeout = 30

    def do_GET(self) -> None:
        """Answer a GET request."""
        refusal = guard.refuse_reading(self.headers, is_page=self.path.partition("?")[0] == "/")
        if refusal:
            self._say(*refusal)
        else:
            self._safely(self._answer, self.path)

    def _answer(self, target: str) -> None:
        path, query = taken_apart(target)
        known: dict[str, Callable[[Query], None]] = {
            "/": lambda query: self._asset("live.html"),
            "/api/runs": self._runs,
            "/api/run": self._run,
            "/api/clients": self._clients,
            "/events": self._events,
        }
        if path in known:
            known[path](query)
        elif path.startswith("/assets/"):
            self._asset(path.removeprefix("/assets/"))
        else:
            self._say(404, "there is nothing here")

    def do_POST(self) -> None:
        """Answer a POST request."""
        refusal = guard.refuse_changing(self.headers, self.server.token)
        if not refusal and self.path != "/api/stop":
            refusal = 404, "there is nothing here"
        body = b"" if refusal else self._body()
        if refusal or body is None:
            self.close_connection = True  # unread data must not be parsed as the next request
            self._say(*(refusal or (413, "the request is too long")))
            return
        self._safely(self._stop, body.decode("utf-8", "replace"))

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""

    def _safely(self, answer: Callable[[str], None], question: str) -> None:
        """Turn errors of the request, the files and the code into one line for the page."""
        try:
            answer(question)
        except ConnectionError:  # the page was closed
            self.close_connection = True
        except (LookupError, FileNotFoundError):
            self._say(404, "this run does not exist (any more)")
        except ValueError as error:
            self._say(400, f"invalid request: {error}")
        except FedalloyError as error:
            self._say(409, str(error))
        except sqlite3.Error:
            self._say(503, "the index of this run is busy; try again")
        except Exception as error:
            self._say(500, f"internal error ({type(error).__name__}: {error})")

    def _runs(self, query: Query) -> None:
        store, since = self.server.store, self.server.watch.version
        lines = [store.summary(run) for run in sorted(store.folders)]
        styles = {name: style.to_json() for name, style in assign(line["name"] for line in lines).items()}
        self._json({
            "folder": store.root.name, "can_stop": self.server.token is not None, "since": since, "runs": lines,
            "styles": styles,
        })  # fmt: skip

    def _run(self, query: Query) -> None:
        run, watch = query["run"][0], self.server.watch
        with watch.page([run]):
            self._json(answers.details(self.server.store, run, watch.index(run)))

    def _clients(self, query: Query) -> None:
        run, watch, round = query["run"][0], self.server.watch, whole_number(query["round"][0], "round")
        with watch.page([run]):
            self._json(answers.clients(self.server.store, run, watch.index(run), round))

    def _events(self, query: Query) -> None:
        since = whole_number(query.get("since", ["0"])[0], "since")
        events = Events(self.server.watch, query.get("run", []), since)
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

    def _stop(self, body: str) -> None:
        run = run_in(body)
        ask_to_stop(self.server.store.folder(run))
        self._json({"asked": run})

    def _body(self) -> bytes | None:
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or len(length) > 16 or int(length) > _MOST_BODY:
            return None
        return self.rfile.read(int(length))

    def _asset(self, name: str) -> None:
        found = asset(name)
        if found is None:
            self._say(404, "there is nothing here")
            return
        self._send(200, *found)

    def _say(self, status: int, text: str) -> None:
        self._send(status, "application/json", _refusal(text))

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
