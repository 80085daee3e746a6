"""Requests to ``fedalloy serve``, as bytes on a connection: the line, the headers, the body."""

from __future__ import annotations

import functools
import socket
import tempfile
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

from benchmarks.fuzz.driving import Way
from benchmarks.fuzz.mutating import VALUES, Case, mutated_bytes, mutated_json
from benchmarks.fuzz.watching import HOOK, Fault

TOKEN = "a-token-for-fuzzing"
_LINES = [
    b"GET / HTTP/1.1", b"GET /api/runs HTTP/1.1", b"GET /api/run?run=a HTTP/1.1",
    b"GET /events?since=0&run=a:0 HTTP/1.1",
    b"GET /api/clients?run=a&round=2 HTTP/1.1", b"GET /assets/live.js HTTP/1.1", b"GET /api/run?run=b/c HTTP/1.1",
]  # fmt: skip
_HEADS = [b"Host: localhost:8421", b"Accept: */*"]
_POST = [b"Content-Type: application/json", b"X-Fedalloy-Token: " + TOKEN.encode(), b"Content-Length: 11"]
_ALLOWED = (501, 503, 505)
"""Allowed refusals beyond 4xx: an unsupported method or version, and too many connections."""


@functools.cache
def examples() -> list[Case]:
    """Every address, and the one that changes something."""
    asked = [b"\r\n".join([line, *_HEADS, b"", b""]) for line in _LINES]
    stop = b"\r\n".join([b"POST /api/stop HTTP/1.1", *_HEADS, *_POST, b"", b'{"run":"a"}'])
    return [{"request": text} for text in [*asked, stop]]


def change(case: Case, random: Random) -> Case:
    """A change of the target, a header, the body, or anything."""
    return {"request": _changed(case["request"], random)}


def _changed(data: bytes, random: Random) -> bytes:
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    way = random.randrange(7)
    if way <= 1:
        lines[0] = _changed_target(lines[0], random)
    elif way == 2:
        place = random.randrange(len(lines))
        lines[place] = mutated_bytes(lines[place], random)
    elif way == 3:
        lines.insert(1, lines[random.randrange(len(lines))])
    elif way == 4 and len(lines) > 1:
        del lines[random.randrange(1, len(lines))]
    elif way == 5 and body:
        try:
            body = mutated_json(body, random)
        except (ValueError, RecursionError):  # an earlier change has made it something else
            body = mutated_bytes(body, random)
        lines = [b"Content-Length: %d" % len(body) if line.startswith(b"Content-Length") else line for line in lines]
    else:
        return mutated_bytes(data, random)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def _changed_target(line: bytes, random: Random) -> bytes:
    """Another value in the query, or another path."""
    method, _, rest = line.partition(b" ")
    target, _, version = rest.rpartition(b" ")
    value = VALUES[random.randrange(len(VALUES))]
    said = (
        quote(str(value), safe="/.:%", errors="replace").encode()
        if random.randrange(2)
        else str(value).encode("utf-8", "replace")
    )
    path, _, query = target.partition(b"?")
    fields = query.split(b"&") if query else []
    if fields and random.randrange(4):
        place = random.randrange(len(fields))
        name = fields[place].partition(b"=")[0]
        fields[place] = (name + b"=" + said, said + b"=1", fields[place] + b":" + said, fields[place] * 3)[
            random.randrange(4)
        ]
    elif random.randrange(2):
        fields.append(b"run=" + said)
    else:
        path = path + b"/" + said
    return b" ".join([method, path + (b"?" + b"&".join(fields) if fields else b""), version])


def read(case: Case, folder: Path) -> str:
    """The answer of a server over two runs, in this thread: its status must be an allowed one."""
    status = _status(_server(), case.get("request", b""))
    if 200 <= status < 300:
        return "answered"
    if 400 <= status < 500 or status in _ALLOWED:
        return "refused"
    if status == 0:
        return "no request"
    raise Fault("crash", f"answered with {status}")


def _status(server: Any, request: bytes) -> int:
    from fedalloy.report.live.server import Handler

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        ours.sendall(request[: 1 << 16])
        ours.shutdown(socket.SHUT_WR)
        theirs.settimeout(1.0)
        Handler(theirs, ("127.0.0.1", 1), server)
        theirs.shutdown(socket.SHUT_WR)
        ours.setblocking(True)
        first = ours.makefile("rb").readline(1000)
    words = first.split()
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 200 if first else 0


_STARTED: list[Any] = []


def _server() -> Any:
    """A server over two runs, made once; it does not listen, and its streams end at once."""
    if not _STARTED:
        from fedalloy.report.live.server import LiveServer

        place = Path(tempfile.mkdtemp(prefix="fuzz-served-", dir="/dev/shm"))
        HOOK.also = (str(place),)  # served files are allowed too
        for name in ("a", "b/c"):
            _write_run(place / name)
        server = LiveServer(place, 0, TOKEN)
        for name in server.store.folders:
            server.watch.index(name).update_fully()
        server.server_close()
        server.watch._ended = True
        _STARTED.append(server)
    return _STARTED[0]


def _write_run(path: Path) -> None:
    from fedalloy.experiment.records.folder import RunFolder

    folder = RunFolder.create(
        path, {"run": {"rounds": 3, "seeds": [1]}, "algorithm": {"name": "fedavg"}}, {"python": "3"}
    )
    with folder.lock():
        for round in (1, 2, 3):
            row: dict[str, Any] = {
                "round": round,
                "ids": [0, 1],
                "weights": [0.5, 0.5],
                "dropped": {},
                "absent": [],
                "train_loss": 1.0,
            }
            folder.append("rounds", {**row, "evaluation": {"accuracy": {"mean": 0.5, "worst": 0.1}}})
            folder.append(
                "clients", {"round": round, "split": "test", "model": "global", "ids": [0, 1], "accuracy": [0, 1]}
            )
            folder.append("timings", {"round": round, "clients": 0.5})
        folder.set_status("finished", 3)


WAY = Way("http-requests", examples, read, 10_000, change=change)
