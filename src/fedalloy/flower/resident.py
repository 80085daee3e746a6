"""A node's resident process: it carries out the orders, so that torch and the data are loaded once and not every time.

Flower starts a new process for every message. That process only passes the message on, through a socket in the node's
store which nobody but the node's user can open. The resident is started by the first message and goes when there has
been none for :data:`IDLE` seconds; what it keeps in memory is no more than what can be made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fedalloy

if TYPE_CHECKING:
    from flwr.app import RecordDict

SOCKET, LOCK, LOG = "resident.sock", "resident.lock", "node.log"
IDLE = 300.0
STARTUP = 300.0
"""Seconds that a resident has for getting ready: a busy machine needs many times what an idle one does."""
_POLL = 0.05


class NoResident(Exception):
    """The resident process cannot be started, or went away."""


def ask(store: Path, node_config: Mapping[str, Any], content: RecordDict) -> RecordDict:
    """Let the resident of a store answer; one is started if there is none. An order may be carried out again, so one
    whose resident went away is given to the next, once."""
    for last in (False, True):
        try:
            told, answer = _exchange(store, node_config, content)
        except ConnectionError as error:
            if last:
                raise NoResident(f"the node's resident process ended at work; {store / LOG} may say why") from error
        else:
            if told["status"] == "answered":
                return answer
    raise NoResident("the node's resident process is of another version and does not go away")


def _exchange(store: Path, node_config: Mapping[str, Any], content: RecordDict) -> tuple[dict[str, Any], RecordDict]:
    from fedalloy.flower.frames import receive_frame, send_frame

    with _connected(store) as link:
        send_frame(link, {"fedalloy": fedalloy.__version__, "config": dict(node_config)}, content)
        return receive_frame(link)


@contextlib.contextmanager
def _connected(store: Path) -> Iterator[socket.socket]:
    """A connection to the resident; whoever comes first starts it, and the others wait for that."""
    store.mkdir(parents=True, exist_ok=True, mode=0o700)
    with socket.socket(socket.AF_UNIX) as link:
        with (store / LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _connect(link, store):
                _start(link, store)
        yield link


def _connect(link: socket.socket, store: Path) -> bool:
    # The name of a socket may have a hundred letters: it is named from inside its folder.
    with contextlib.chdir(store):
        try:
            link.connect(SOCKET)
        except (FileNotFoundError, ConnectionRefusedError):
            return False
    return True


def _start(link: socket.socket, store: Path) -> None:
    with (store / LOG).open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "fedalloy.flower.resident", str(store.resolve())],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    end = time.monotonic() + STARTUP
    while not _connect(link, store):
        if process.poll() is not None or time.monotonic() > end:
            raise NoResident(f"the node's resident process did not start; {store / LOG} says why")
        time.sleep(_POLL)
    # It outlives this process, which is not to be complained about.
    process.returncode = 0


def serve(store: Path, idle: float = IDLE) -> None:
    """Answer one order after another until there are none."""
    from fedalloy.flower import answering, node
    from fedalloy.flower.data import remembering

    node.local_task = remembering(node.local_task)  # type: ignore[attr-defined]
    os.chdir(store)
    Path(SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as door:
        os.umask(0o077)
        door.bind(SOCKET)
        door.listen()
        door.settimeout(idle)
        while True:
            try:
                link, _ = door.accept()
            except TimeoutError:
                break
            with link:
                link.settimeout(None)
                if not _answer(link, answering.respond):
                    break
    Path(SOCKET).unlink(missing_ok=True)


def _answer(link: socket.socket, respond: Any) -> bool:
    """One order; false when it comes from another version, which should start a resident of its own."""
    from flwr.app import RecordDict

    from fedalloy.flower.frames import receive_frame, send_frame

    with contextlib.suppress(ConnectionError, BrokenPipeError):
        said, content = receive_frame(link)
        if said["fedalloy"] != fedalloy.__version__:
            Path(SOCKET).unlink(missing_ok=True)
            send_frame(link, {"status": "leaving"}, RecordDict())
            return False
        send_frame(link, {"status": "answered"}, respond(content, said["config"]))
    return True


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    serve(Path(sys.argv[1]))
