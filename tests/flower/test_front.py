"""The door of a server: what is passed on, what is turned away, and what one visitor may cost."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import inspect
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

import uvicorn

from fedalloy.flower import front
from fedalloy.flower.contacts import REASON, Contacts
from fedalloy.flower.layout import server_files
from fedalloy.flower.pki import make_server_certificate

pytestmark = pytest.mark.flower
LIMITS = front.Limits(body=40 * 2**20, handshake=5.0, idle=5.0, request=60.0)


class Echo(BaseHTTPRequestHandler):
    """Stands for the SuperLink: answers with what it was sent."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    seen: list[tuple[str, dict[str, str]]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        self.send_response(200 if self.headers["x-flwr"] else 401)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("server")
    make_server_certificate(server_files(place))
    return place


@pytest.fixture(scope="module")
def inner(folder: Path) -> Iterator[int]:
    files = server_files(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def opened(folder: Path, inner: int, limits: front.Limits = LIMITS, contacts: Contacts | None = None) -> Iterator[int]:
    """A front in this process; the port it listens on."""
    files, listener = server_files(folder), front.door("127.0.0.1", 0)
    outer, link = front.contexts(files.certificate, files.key, files.ca_certificate)
    started: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    async def work() -> None:
        task = asyncio.ensure_future(front.Front(listener, outer, inner, link, limits, contacts=contacts).serve())
        started.append((asyncio.get_running_loop(), task))
        with contextlib.suppress(asyncio.CancelledError):
            await task

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    while not started:
        time.sleep(0.01)
    try:
        yield listener.getsockname()[1]
    finally:
        loop, task = started[0]
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        listener.close()


@pytest.fixture
def port(folder: Path, inner: int) -> Iterator[int]:
    with opened(folder, inner) as port:
        yield port


@pytest.fixture
def ask(folder: Path, port: int) -> Iterator[Callable[..., tuple[int, bytes]]]:
    """Ask the front something; all questions of a test go over one connection unless it is closed."""
    context = ssl.create_default_context(cafile=server_files(folder).ca_certificate)
    link = http.client.HTTPSConnection("localhost", port, timeout=30, context=context)

    def asked(path: str, body: Any = b"x", method: str = "POST", **headers: str) -> tuple[int, bytes]:
        link.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = link.getresponse()
        return answer.status, answer.read()

    yield asked
    link.close()


def test_what_nodes_ask_for_is_passed_on_whole(ask):
    Echo.seen.clear()
    for size in (0, 1, 5_300_000):
        body = bytes(size % 251 for _ in range(3)) * (size // 3)
        assert ask("/v1/fleet/push-object", body, x_flwr="signed", te="trailers") == (200, body)
    assert ask("/v1/fleet/pull-messages", b"who?") == (401, b"who?")
    (path, headers), *_ = Echo.seen
    assert path == "/v1/fleet/push-object"
    assert headers["x-flwr"] == "signed"
    assert "te" not in headers


def test_a_refusal_says_why_and_who_was_heard_is_noted(folder, inner, monkeypatch):
    """The SuperLink here refuses what has no header of its own."""
    contacts = Contacts(folder)
    noted: list[tuple[bytes, str, int, int]] = []

    def note(target: bytes, headers: Any, address: str, status: int, connection: int) -> str:
        noted.append((target, address, status, connection))
        return "unknown-key"

    monkeypatch.setattr(contacts, "note", note)
    context = ssl.create_default_context(cafile=server_files(folder).ca_certificate)
    with opened(folder, inner, contacts=contacts) as port:
        link = http.client.HTTPSConnection("localhost", port, timeout=30, context=context)
        link.request("POST", "/v1/fleet/activate-node", b"let me in")
        answer = link.getresponse()
        assert (answer.status, answer.headers[REASON], answer.read()) == (401, "unknown-key", b"let me in")
        link.close()
    assert noted == [(b"/v1/fleet/activate-node", "127.0.0.1", 401, 1)]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/v1/responses", "/health",
        "/docs", "/v1/fleet/register-node", "/v1/fleet/unregister-node", "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run", "//v1/fleet/get-run", "/v1/fleet/get-run/", "/v1/fleet/get-run?x=1",
        "/V1/fleet/get-run", "https://localhost/v1/control/start-run", "*", "/v1/fleet/get-run\x0b",
    ],
)  # fmt: skip
def test_nothing_else_is_passed_on(ask, path):
    Echo.seen.clear()
    with contextlib.suppress(http.client.InvalidURL):
        assert ask(path, x_flwr="signed")[0] in (404, 400)
    assert Echo.seen == []


def test_the_paths_are_those_of_flower():
    from flwr.superlink.routers.fleet.router import router

    ours = {path.decode() for path in front.PATHS}
    assert {vars(route)["path"] for route in router.routes} == ours | {f"{front.PREFIX}{one}" for one in SELF_SERVICE}


SELF_SERVICE = ("register-node", "unregister-node")


def test_other_methods_and_bodies_without_a_length_are_turned_away(ask, folder, port):
    assert ask("/v1/fleet/get-run", method="GET")[0] == 404
    # The head alone: the front answers it and closes, so a body sent after it may find the connection closed.
    head = b"POST /v1/fleet/get-run HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    assert talk(folder, port, head).split(b" ")[1] == b"411"


def test_two_requests_in_one_are_not_smuggled_through(folder, port):
    Echo.seen.clear()
    hidden = b"POST /v1/control/start-run HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    head = b"POST /v1/fleet/get-run HTTP/1.1\r\nhost: x\r\nx-flwr: s\r\ncontent-length: 0\r\n"
    for trick in (b"content-length: %d\r\n" % len(hidden), b"transfer-encoding: chunked\r\n"):
        assert b"start-run" not in talk(folder, port, head + trick + b"\r\n" + hidden)
    talk(folder, port, head + b"\r\n" + hidden)
    assert {path for path, _ in Echo.seen} <= {"/v1/fleet/get-run"}


def talk(folder: Path, port: int, data: bytes) -> bytes:
    """Send bytes as they are; everything that comes back."""
    context = ssl.create_default_context(cafile=server_files(folder).ca_certificate)
    plain, found = socket.create_connection(("127.0.0.1", port), 30), b""
    with plain, context.wrap_socket(plain, server_hostname="localhost") as link:
        link.sendall(data)
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            while part := link.recv(65536):
                found += part
    return found


def test_too_much_is_turned_away_before_it_is_read(folder, port):
    start = b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\n"
    told = talk(folder, port, start + b"content-length: %d\r\n\r\n" % (LIMITS.body + 1))
    assert told.startswith(b"HTTP/1.1 413")
    assert talk(folder, port, start + b"x: " + b"y" * 2 * LIMITS.headers).startswith(b"HTTP/1.1 431")
    assert talk(folder, port, b"no http at all\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_who_says_nothing_is_not_waited_for(folder, inner):
    with opened(folder, inner, replace(LIMITS, handshake=0.3, idle=0.3, request=0.3)) as port:
        with socket.create_connection(("127.0.0.1", port), 30) as silent:
            assert silent.recv(1) == b"", "no handshake"
        begun = b"POST /v1/fleet/push-object HTTP/1.1\r\n"
        for said in (b"", begun, begun + b"host: x\r\ncontent-length: 9\r\n\r\nhalf"):
            talk(folder, port, said)


def test_places_are_counted_in_all_and_by_address(folder, inner):
    said = b"POST /v1/fleet/get-run HTTP/1.1\r\nhost: x\r\nx-flwr: s\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
    with opened(folder, inner, replace(LIMITS, connections=3, per_address=2)) as port:
        with contextlib.ExitStack() as held:
            for _ in range(2):
                held.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            time.sleep(0.1)
            third = held.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            assert third.recv(1) == b"", "one address too often"
        wait_for(lambda: talk_or_nothing(folder, port, said).startswith(b"HTTP/1.1 200"))
    with opened(folder, inner, replace(LIMITS, connections=1)) as port:
        with socket.create_connection(("127.0.0.1", port), 30):
            time.sleep(0.1)
            with socket.create_connection(("127.0.0.1", port), 30) as waiting:
                waiting.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    waiting.recv(1)
        assert talk(folder, port, said).startswith(b"HTTP/1.1 200")


def talk_or_nothing(folder: Path, port: int, data: bytes) -> bytes:
    with contextlib.suppress(OSError):
        return talk(folder, port, data)
    return b""


def wait_for(ready: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_without_a_superlink_nodes_are_told_to_try_again(folder):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        with opened(folder, unused.getsockname()[1]) as port:
            said = b"POST /v1/fleet/get-run HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
            assert talk(folder, port, said).startswith(b"HTTP/1.1 502")


def test_a_connection_that_the_superlink_has_closed_meanwhile_is_made_anew(ask, monkeypatch):
    monkeypatch.setattr(front, "_FRESH", 0.0)
    for _ in range(3):
        assert ask("/v1/fleet/get-run", b"x", x_flwr="signed") == (200, b"x")


def test_a_node_that_waits_for_work_needs_no_handshake_with_the_superlink_for_every_request():
    """It asks every three seconds at most, and the SuperLink closes a connection a few seconds after the last."""
    closes = inspect.signature(uvicorn.Config).parameters["timeout_keep_alive"].default
    assert 3.0 < front._FRESH < closes


def test_a_small_answer_is_not_kept_back(ask):
    """Two small pieces without TCP_NODELAY take 40 ms in every request; one piece does not."""
    took = []
    for _ in range(30):
        begun = time.monotonic()
        ask("/v1/fleet/get-run", b"x", x_flwr="signed")
        took.append(time.monotonic() - begun)
    assert min(took) < 0.03


def test_only_the_server_of_the_federation_is_passed_on_to(folder, inner, tmp_path):
    """Another program that took the SuperLink's port gets nothing."""
    make_server_certificate(server_files(tmp_path))
    Echo.seen.clear()
    with opened(tmp_path, inner) as port:
        said = b"POST /v1/fleet/get-run HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
        assert talk(tmp_path, port, said).startswith(b"HTTP/1.1 502")
    assert Echo.seen == []
