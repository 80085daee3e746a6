"""The TLS front of a server: the only port that partners reach, which forwards only the paths that nodes need.

Flower's SuperLink serves nodes, operators and its own apps on one port, and does not authenticate operators. So it
listens on loopback only, and this program in front of it forwards the requests of nodes, one by one, and answers
everything else with 404. Keys are registered and runs are started on the server's machine.

Sizes, numbers and durations are bounded (:class:`Limits`); bodies are streamed and never stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any

import h11

from fedalloy.flower.contacts import REASON, Contacts, read_contacts

PREFIX = "/v1/fleet/"
PATHS = frozenset(
    f"{PREFIX}{name}".encode()
    for name in (
        "activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "get-run",
        "get-fab", "push-object", "pull-object", "confirm-message-received",
    )
)  # fmt: skip
"""The paths for nodes with a key. ``register-node`` and ``unregister-node`` are for nodes without one."""
_CHUNK = 65_536
_FRESH = 4.0
"""Seconds after which a connection to the SuperLink is not reused: it closes connections that are idle for five. A node
without an order asks every three, and a handshake costs more than its request."""
_HOP = frozenset(
    (b"connection", b"expect", b"host", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te")
) | {b"trailer", b"transfer-encoding", b"upgrade"}
"""Headers that belong to a connection, not to a request."""


@dataclass(frozen=True)
class Limits:
    """Limits per visitor: bytes, connections and seconds."""

    headers: int = 16_384
    body: int = 32 * 2**20
    connections: int = 1024
    per_address: int = 512
    handshake: float = 10.0
    idle: float = 30.0
    request: float = 600.0


class Turned(Exception):
    """A request that is not forwarded, with the HTTP status of the answer."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@dataclass
class Side:
    """One end of a connection, as HTTP."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    http: h11.Connection
    used: float = field(default_factory=time.monotonic)
    pending: bytes = b""

    async def next(self) -> Any:
        """The next event."""
        while True:
            event = self.http.next_event()
            if event is not h11.NEED_DATA:
                return event
            self.http.receive_data(await self.reader.read(_CHUNK))

    async def body(self) -> AsyncIterator[bytes]:
        """The parts of a body, as they arrive."""
        while True:
            event = await self.next()
            if not isinstance(event, h11.Data):
                break
            yield bytes(event.data)
        if not isinstance(event, h11.EndOfMessage):
            raise ConnectionResetError("the other side left in the middle")

    async def send(self, event: Any) -> None:
        """Send an event, at the receiver's pace; a head is sent together with the beginning of its body."""
        self.pending += self.http.send(event) or b""
        if not isinstance(event, h11.Request | h11.Response):
            data, self.pending = self.pending, b""
            self.writer.write(data)
            await self.writer.drain()

    def again(self) -> bool:
        """Whether another request may follow; prepares for it."""
        self.used = time.monotonic()
        if self.http.our_state is not h11.DONE or self.http.their_state is not h11.DONE:
            return False
        self.http.start_next_cycle()
        return True

    def close(self) -> None:
        """Close at once."""
        self.writer.transport.abort()


@dataclass
class Front:
    """Listens on a socket with TLS and forwards the requests of nodes to the SuperLink at ``port`` of this machine."""

    listener: socket.socket
    tls: ssl.SSLContext
    port: int
    inner: ssl.SSLContext
    limits: Limits = field(default_factory=Limits)
    visitors: Counter[str] = field(default_factory=Counter)
    contacts: Contacts | None = None
    opened: int = 0

    async def serve(self) -> None:
        """Accept connections; above the limit, new ones wait in the listen queue."""
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        self.listener.setblocking(False)
        places = asyncio.Semaphore(self.limits.connections)

        def left(visit: asyncio.Task[None]) -> None:
            tasks.discard(visit)
            places.release()

        while True:
            await places.acquire()
            try:
                visitor, address = await loop.sock_accept(self.listener)
            except OSError:  # no file descriptors left, or the visitor is gone
                places.release()
                await asyncio.sleep(0.1)
                continue
            task = asyncio.create_task(self._admit(visitor, str(address[0])))
            tasks.add(task)
            task.add_done_callback(left)

    async def _admit(self, visitor: socket.socket, address: str) -> None:
        if self.visitors[address] >= self.limits.per_address:
            visitor.close()
            return
        self.visitors[address] += 1
        # Without this, the second half of an answer waits for the ACK of the first: 40 ms for every request.
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            # An error of a visitor must only end this visit.
            with contextlib.suppress(OSError, TimeoutError, h11.ProtocolError):
                await self._receive(visitor, address)
        finally:
            visitor.close()
            self.visitors -= Counter({address: 1})

    async def _receive(self, visitor: socket.socket, address: str) -> None:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(_CHUNK)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol, visitor, ssl=self.tls, ssl_handshake_timeout=self.limits.handshake
        )
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        side = Side(reader, writer, h11.Connection(h11.SERVER, max_incomplete_event_size=self.limits.headers))
        try:
            self.opened += 1
            await Visit(side, self, address, self.opened).run()
            transport.close()
            async with asyncio.timeout(self.limits.handshake):
                await writer.wait_closed()
        finally:
            side.close()


@dataclass
class Visit:
    """One connection from outside, and the connection to the SuperLink that belongs to it."""

    visitor: Side
    front: Front
    address: str = ""
    number: int = 0
    link: Side | None = None

    async def run(self) -> None:
        """Handle requests until the visitor leaves or is refused."""
        limits = self.front.limits
        try:
            while True:
                async with asyncio.timeout(limits.idle):
                    request = await self.visitor.next()
                if not isinstance(request, h11.Request):
                    return
                async with asyncio.timeout(limits.request):
                    await self._handle(request)
                if not self.visitor.again():
                    return
        except h11.RemoteProtocolError as error:
            await self._turn_away(error.error_status_hint or 400)
        except Turned as refusal:
            await self._turn_away(refusal.status)
        finally:
            if self.link:
                self.link.close()

    async def _handle(self, request: h11.Request) -> None:
        headers = _checked(request, self.front.limits.body)
        try:
            link = await self._connected()
            await link.send(h11.Request(method=b"POST", target=request.target, headers=headers))
            async for part in self.visitor.body():
                await link.send(h11.Data(data=part))
            await link.send(h11.EndOfMessage())
        except (OSError, h11.LocalProtocolError):
            raise Turned(502) from None
        answer = await _answered(link)
        await self._answer(link, answer, self._noted(request, answer.status_code))

    def _noted(self, request: h11.Request, status: int) -> list[tuple[bytes, bytes]]:
        """Note who was answered how; the header with the reason of a refusal."""
        if self.front.contacts is None:
            return []
        reason = self.front.contacts.note(request.target, request.headers, self.address, status, self.number)
        return [(REASON.encode(), reason.encode())] if reason else []

    async def _answer(self, link: Side, answer: h11.Response, more: list[tuple[bytes, bytes]]) -> None:
        """Forward the answer as it arrives."""
        headers = [pair for pair in answer.headers if pair[0] not in _HOP] + more
        await self.visitor.send(h11.Response(status_code=answer.status_code, headers=headers))
        async for part in link.body():
            await self.visitor.send(h11.Data(data=part))
        await self.visitor.send(h11.EndOfMessage())
        if not link.again():
            link.close()
            self.link = None

    async def _connected(self) -> Side:
        """The connection to the SuperLink: that of the last request, unless it may already be closed."""
        if self.link and time.monotonic() - self.link.used < _FRESH and not self.link.reader.at_eof():
            return self.link
        if self.link:
            self.link.close()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", self.front.port, ssl=self.front.inner, server_hostname="localhost", limit=_CHUNK
        )
        self.link = Side(reader, writer, h11.Connection(h11.CLIENT))
        return self.link

    async def _turn_away(self, status: int) -> None:
        """Answer with a status and close the connection without reading the rest."""
        if self.visitor.http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        # The time, by which a node can tell before it joins that its clock is wrong.
        headers = [("content-length", "0"), ("connection", "close"), ("date", formatdate(usegmt=True))]
        await self.visitor.send(h11.Response(status_code=status, headers=headers))
        await self.visitor.send(h11.EndOfMessage())


async def _answered(link: Side) -> h11.Response:
    """The beginning of the SuperLink's answer."""
    with contextlib.suppress(OSError, h11.ProtocolError):
        answer = await link.next()
        if isinstance(answer, h11.Response):
            return answer
    raise Turned(502)


def _checked(request: h11.Request, most: int) -> list[tuple[bytes, bytes]]:
    """The headers to forward; raises ``Turned`` for a request that must not be forwarded."""
    if request.method != b"POST" or request.target not in PATHS:
        raise Turned(404)
    given = dict(request.headers)
    if b"content-length" not in given:
        raise Turned(411)
    if int(given[b"content-length"]) > most:
        raise Turned(413)
    return [(b"host", b"localhost"), *(pair for pair in request.headers if pair[0] not in _HOP)]


def door(host: str, port: int) -> socket.socket:
    """A listening socket."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=256, dualstack_ipv6=both)


def contexts(certificate: Path, key: Path, authority: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """TLS contexts for partners and for the SuperLink, which must have the certificate of the federation."""
    outer = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    outer.minimum_version = ssl.TLSVersion.TLSv1_2
    outer.load_cert_chain(certificate, key)
    return outer, ssl.create_default_context(cafile=authority)


def main(folder: str, host: str, port: str, inner: str) -> None:
    """Serve until a signal, or until the parent process is gone."""
    from fedalloy.flower.layout import server_files

    files, limits = server_files(Path(folder)), Limits()
    _allow_files(2 * limits.connections + 64)
    try:
        listener = door(host, int(port))
    except OSError as error:
        sys.exit(f"the front cannot listen on {host}:{port}: {error}")
    outer, link = contexts(files.certificate, files.key, files.ca_certificate)
    contacts = Contacts(Path(folder), known=read_contacts(Path(folder)))
    front = Front(listener, outer, int(inner), link, limits, contacts=contacts)
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(_until_told(front.serve(), contacts.write))


async def _until_told(work: Coroutine[Any, Any, None], meanwhile: Callable[[], None]) -> None:
    task, parent = asyncio.ensure_future(work), os.getppid()
    stop: Callable[[], Any] = task.cancel
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    while not task.done():
        await asyncio.wait([task], timeout=1.0)
        meanwhile()
        if os.getppid() != parent:
            task.cancel()
    await task


def _allow_files(wanted: int) -> None:
    """Raise the limit of open files: every connection needs two."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


if __name__ == "__main__":
    main(*sys.argv[1:])
