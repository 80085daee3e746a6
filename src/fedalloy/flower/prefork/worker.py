"""A node's worker: a process that carries out its orders, so that torch and the data are loaded once for many of them.

The process that Flower starts for a message only forwards it, through a socket in the node's store that only the
node's user can open: a JSON line, then the raw arrays, no pickle. The worker is started by the first message and ends
when there has been none for :data:`IDLE` seconds; everything in its memory can be loaded again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import lock_descriptor

import fedalloy
from fedalloy.flower.prefork import MALLOC, NotCarriedOut

if TYPE_CHECKING:
    from flwr.app import Array, RecordDict
    from flwr.app.message.arraychunk import ArrayChunk

SOCKET, LOCK, LOG = "worker.sock", "worker.lock", "node.log"
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
IDLE = 300.0
STARTUP = 300.0
"""Seconds until a worker must be ready: a busy machine needs many times as long as an idle one."""
_POLL = 0.05
_HEAD_BYTES = 8
_AT_ONCE = 1 << 24
_LARGE = 1 << 25
"""Bytes of an order that this process does not keep once it is sent: the worker needs the memory."""


def ask(store: Path, node_config: Mapping[str, Any], content: RecordDict) -> RecordDict:
    """Send an order to the worker of a store, which is started if there is none. Orders may be repeated, so if the
    worker ends, the order is sent to a new one, once; but not a large one, which is not kept for that."""
    large = sum(len(array.data) for record in content.array_records.values() for array in record.values()) > _LARGE
    for last in (large, True):
        try:
            told, answer = _exchange(store, node_config, content)
        except ConnectionError as error:
            if last:
                raise NotCarriedOut(f"the node's worker ended during the order; see {store / LOG}") from error
        else:
            if told["status"] == "answered":
                return answer
            if large:
                raise NotCarriedOut("the node's worker was of another version; the next order starts a new one")
    raise NotCarriedOut("the node's worker is of another version and does not end")


def _exchange(store: Path, node_config: Mapping[str, Any], content: RecordDict) -> tuple[dict[str, Any], RecordDict]:
    with _connected(store) as link:
        send_frame(link, {"fedalloy": fedalloy.__version__, "config": dict(node_config)}, content, _LARGE)
        return receive_frame(link, _LARGE)


@contextlib.contextmanager
def _connected(store: Path) -> Iterator[socket.socket]:
    """A connection to the worker; the first process starts it, and the others wait for that."""
    store.mkdir(parents=True, exist_ok=True, mode=0o700)
    with socket.socket(socket.AF_UNIX) as link:
        with (store / LOCK).open("w") as lock:
            lock_descriptor(lock.fileno(), poll_interval=_POLL)
            if not _connect(link, store):
                _start(link, store)
        yield link


def _connect(link: socket.socket, store: Path) -> bool:
    # A socket path may only have about a hundred characters, so it is opened relative to its folder.
    with contextlib.chdir(store):
        try:
            link.connect(SOCKET)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def _start(link: socket.socket, store: Path) -> None:
    # Torch keeps and reuses memory as the system does it by default.
    environment = {name: value for name, value in os.environ.items() if name not in MALLOC}
    with (store / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedalloy.flower.prefork.worker", str(store.resolve())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env=environment,
        )  # fmt: skip
    end = time.monotonic() + STARTUP
    while not _connect(link, store):
        if process.poll() is not None or time.monotonic() > end:
            raise NotCarriedOut(f"the node's worker did not start; see {store / LOG}")
        time.sleep(_POLL)
    # The worker outlives this process: suppress the ResourceWarning.
    process.returncode = 0


def serve(store: Path, idle: float = IDLE) -> None:
    """Answer orders until there have been none for ``idle`` seconds; the data are read again only if they have
    changed."""
    from fedalloy.flower.node.answer import respond
    from fedalloy.flower.node.data import local_task, remembering

    answer = functools.partial(respond, make_task=remembering(local_task))
    os.chdir(store)
    Path(SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        os.umask(0o077)
        listening.bind(SOCKET)
        listening.listen()
        listening.settimeout(idle)
        while True:
            try:
                link, _ = listening.accept()
            except TimeoutError:
                break
            with link:
                link.settimeout(None)
                if not _answer(link, answer):
                    break
    Path(SOCKET).unlink(missing_ok=True)


def _answer(link: socket.socket, respond: Callable[[RecordDict, Mapping[str, Any]], RecordDict]) -> bool:
    """Answer one order; false if it comes from another version, which needs its own worker."""
    from flwr.app import RecordDict

    with contextlib.suppress(ConnectionError, BrokenPipeError):
        said, content = receive_frame(link)
        if said["fedalloy"] != fedalloy.__version__:
            Path(SOCKET).unlink(missing_ok=True)
            send_frame(link, {"status": "leaving"}, RecordDict())
            return False
        send_frame(link, {"status": "answered"}, respond(content, said["config"]), most=0)
    return True


def send_frame(link: socket.socket, said: dict[str, Any], content: RecordDict, most: float = math.inf) -> None:
    """Write plain values and records; arrays above ``most`` bytes are forgotten, one after another, when they are
    written."""
    arrays = [(part, name, array) for part, record in content.array_records.items() for name, array in record.items()]
    values = [(part, key, value) for part, record in content.config_records.items() for key, value in record.items()]
    strings = [(part, key, value) for part, key, value in values if isinstance(value, bytes)]
    head = {
        "said": said,
        "records": list(content.config_records),
        "config": [entry for entry in values if not isinstance(entry[2], bytes)],
        "bytes": [(part, key, len(value)) for part, key, value in strings],
        "arrays": [(p, name, a.dtype, list(a.shape), a.stype, len(a.data)) for p, name, a in arrays],
    }
    text = json.dumps(head).encode()
    link.sendall(len(text).to_bytes(_HEAD_BYTES, "big") + text)
    for _, _, data in strings:
        _send(link, data)
    for _, _, array in arrays:
        _send(link, array.data)
        if len(array.data) > most:
            array.data = b""


def _send(link: socket.socket, data: bytes) -> None:
    if data:  # sendall of nothing could fail: the other side may already be gone
        link.sendall(data)


def receive_frame(link: socket.socket, most: float = math.inf) -> tuple[dict[str, Any], RecordDict]:
    """Read what :func:`send_frame` wrote; ``ConnectionError`` when the other side is gone. Arrays above ``most`` bytes
    are kept as Flower's chunks, one by one, so that each can be forgotten when it is sent."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    head = json.loads(_read(link, int.from_bytes(_read(link, _HEAD_BYTES), "big")))
    values: dict[str, dict[str, Any]] = {part: {} for part in head["records"]}
    for part, key, value in head["config"]:
        values[part][key] = value
    for part, key, size in head["bytes"]:
        values[part][key] = _read(link, size)
    content = RecordDict({part: ConfigRecord(record) for part, record in values.items()})
    records: dict[str, ArrayRecord] = {}
    for part, name, dtype, shape, stype, size in head["arrays"]:
        array = Array(dtype=dtype, shape=tuple(shape), stype=stype, data=b"")
        if size > most:
            _divide(array, list(_chunks(link, size)))
        else:
            setattr(array, "data", _received(link, size))  # noqa: B010 (any buffer will do, and this one is not copied)
        records.setdefault(part, ArrayRecord())[name] = array
    for part, record in records.items():
        content[part] = record
    return head["said"], content


def _divide(array: Array, chunks: list[tuple[str, ArrayChunk]]) -> None:
    """Give an array its chunks where Flower keeps them; to a Flower that looks for them elsewhere, the data."""
    vars(array)["_chunks"] = chunks
    if array.slice_array() is not chunks:
        array.data = b"".join(chunk.data for _, chunk in chunks)


def _chunks(link: socket.socket, size: int) -> Iterator[tuple[str, ArrayChunk]]:
    """The chunks into which Flower divides an array, each in memory of its own, and their ids."""
    from flwr.app.message.arraychunk import ArrayChunk
    from flwr.common.constant import FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE as LENGTH

    for start in range(0, size, LENGTH):
        chunk = ArrayChunk(memoryview(_received(link, min(LENGTH, size - start))))
        yield chunk.object_id, chunk


def _read(link: socket.socket, size: int) -> bytes:
    return bytes(_received(link, size))


def _received(link: socket.socket, size: int) -> bytearray:
    """Read ``size`` bytes; memory is allocated as they arrive, not as they are announced."""
    found = bytearray()
    while len(found) < size:
        came = link.recv(min(size - len(found), _AT_ONCE))
        if not came:
            raise ConnectionError("the other process is gone")
        found += came
    return found


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    serve(Path(sys.argv[1]))
