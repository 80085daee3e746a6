"""What a node keeps between rounds, on its own disk: by run and client, the states before and after its last round.

| file in ``STORE/RUN/CLIENT`` | content |
|---|---|
| ``index.json`` | ``before``, ``after``: the rounds whose states are kept (0: the initial one, which needs no file); |
| | ``ticket``: the newest order that was carried out; ``format``: that of this folder (none: 1) |
| ``state-000007.safetensors`` | the state after round 7 |
| ``own.safetensors`` | this client's local leaves of the model, as the server sent them once |
| ``sent.jsonl`` | everything that was sent, by name and bytes |
| ``aside/`` | states that could not be used and were replaced, and files of another version; never deleted here |
| ``lock`` | held while an order is carried out |

The server declares which state is valid. It is the one after the last round if that contribution was used, and the one
before it if not: because the round is repeated after an interruption, or because the answer was too late or was
dropped. A node that has neither (an older disk was restored, the server lost rounds) *lags*. Then it continues from
the newest state it has that is not newer, from the initial one if there is none, and reports it; or it refuses,
if the run has ``on_lag = "drop"``. States that a lagging node replaces are kept aside.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from filelock import lock_descriptor

from fedalloy.core.errors import CheckpointError
from fedalloy.core.types import State, Tree
from fedalloy.experiment.records import atomic, checkpoint
from fedalloy.flower.protocol.header import Refused

log = logging.getLogger("fedalloy.flower")
FORMAT = 1
"""The format of a folder; a later version that changes it reads all earlier ones."""
Ticket = tuple[int, int]
"""The server's session and the number of its message: later orders have higher tickets."""


@dataclass(frozen=True)
class Start:
    """The state a round begins with: made in ``round`` (0: none yet), and how it differs from the requested one."""

    round: int
    state: State | None
    lag: str = ""


@dataclass(frozen=True)
class NodeStore:
    """The states of one client in one run; use it inside ``with store.lock():``."""

    folder: Path

    @staticmethod
    def of(store: Path, run: str, client: str) -> NodeStore:
        """The folder of a run and a client below a node's store."""
        if not re.fullmatch(r"[0-9a-f]{8,64}", run):
            raise Refused("the server gave no valid name for its run")
        return NodeStore(store / run / _file_name(client))

    @contextmanager
    def lock(self) -> Iterator[NodeStore]:
        """Carry out one order at a time; another process of this node waits."""
        while True:
            with self._lock_file() as file:
                lock_descriptor(file.fileno())
                if not self._is_here(file):
                    continue  # the folder was deleted while this waited for it
                yield self
                return

    def accept(self, ticket: Ticket) -> None:
        """Refuse an order that was overtaken by a newer one."""
        newest = tuple(self._index()["ticket"])
        if ticket < newest:
            raise Refused(f"this order ({ticket}) was overtaken by a newer one ({newest})")

    def start(self, wanted: int, on_lag: str = "continue") -> Start:
        """The state after round ``wanted``, or its substitute."""
        if wanted == 0:
            return Start(0, None)
        index = self._index()
        kept = sorted({index["before"], index["after"]}, reverse=True)
        trouble = ""
        for round in (one for one in kept if 0 < one <= wanted):
            try:
                state = checkpoint.load(self._path(round))
            except CheckpointError as error:
                # Its text names a path of this machine, and what is said here is sent to the server.
                log.warning("%s", error)
                trouble = f"; that of round {round} cannot be used (see the node's log)"
            else:
                return Start(round, state, "" if round == wanted else self._lag(wanted, round, on_lag, trouble))
        return Start(0, None, self._lag(wanted, 0, on_lag, trouble))

    def finish(self, round: int, started: int, state: State | None, ticket: Ticket, lagged: bool = False) -> None:
        """Keep the state after a round beside the one before it; without a state only the ticket is stored. A node that
        ``lagged`` keeps aside what it could not use."""
        index = self._index() | {"ticket": list(ticket), "format": FORMAT}
        if state is not None:
            if lagged and self._path(round).exists():
                self._put_aside(self._path(round))
            checkpoint.save(self._path(round), state)
            index |= {"before": started, "after": round}
        atomic.write_text(self.folder / "index.json", json.dumps(index))
        for file in self.folder.glob("state-*.safetensors"):
            if file not in {self._path(index["before"]), self._path(index["after"])}:
                self._put_aside(file) if lagged else file.unlink()

    def own(self) -> tuple[dict[str, Tree], dict[str, list[str]]] | None:
        """This client's local leaves, as they were received, and the names of all leaves in their order; None if they
        were never received or are lost."""
        try:
            kept = checkpoint.load(self.folder / "own.safetensors")
            return kept["leaves"], kept["order"]
        except (CheckpointError, KeyError):
            return None

    def keep_own(self, leaves: Mapping[str, Tree], order: Mapping[str, list[str]]) -> None:
        """Keep this client's local leaves; they do not change during a run."""
        if self.own() is None:
            checkpoint.save(self.folder / "own.safetensors", {"leaves": dict(leaves), "order": dict(order)})

    def sent(self, row: Mapping[str, Any]) -> None:
        """Record what is about to be sent."""
        with (self.folder / "sent.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _lock_file(self) -> IO[str]:
        while True:
            atomic.make_folder(self.folder)
            with suppress(FileNotFoundError):  # deleted at this moment
                return (self.folder / "lock").open("w")

    def _is_here(self, file: IO[str]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), (self.folder / "lock").stat())
        except FileNotFoundError:
            return False

    def _index(self) -> dict[str, Any]:
        """The index of this folder; one that is lost or damaged is made again from the states that are there."""
        file, ticket = self.folder / "index.json", {"ticket": [0, 0]}
        try:
            index: dict[str, Any] = {"before": 0, "after": 0} | ticket | json.loads(file.read_text(encoding="utf-8"))
            _check_index(index)
        except FileNotFoundError:
            return self._found() | ticket
        except (ValueError, TypeError):
            self._put_aside(file)
            return self._found() | ticket
        if index.get("format", 1) > FORMAT:
            # Of a later version, after a downgrade: what it means is not known here, so it is not used.
            for one in (file, *self.folder.glob("*.safetensors")):
                self._put_aside(one)
            return self._found() | ticket
        return index

    def _found(self) -> dict[str, Any]:
        """The rounds of the two newest states that are there."""
        there = [int(file.stem.removeprefix("state-")) for file in self.folder.glob("state-*.safetensors")]
        before, after = [0, 0, *sorted(there)][-2:]
        return {"before": before, "after": after}

    def _put_aside(self, file: Path) -> None:
        """Move a file out of the way, and keep it."""
        aside = self.folder / "aside"
        aside.mkdir(exist_ok=True)
        file.rename(aside / f"{time.time_ns()}-{file.name}")

    def _path(self, round: int) -> Path:
        return self.folder / f"state-{round:06d}.safetensors"

    def _lag(self, wanted: int, round: int, on_lag: str, trouble: str) -> str:
        has = f"that of round {round}" if round else "none"
        said = f"the valid state is that of round {wanted}, this node has {has}{trouble}"
        if on_lag == "drop":
            raise Refused(f"{said}; the run drops nodes that lag (on_lag = 'drop')")
        return f"{said} and continues from {'it' if round else 'the initial one'}"


def _check_index(index: Mapping[str, Any]) -> None:
    """Raise TypeError if an index does not hold whole numbers where they are needed; a later format may differ."""
    form = index.get("format", 1)
    if type(form) is int and form > FORMAT:
        return
    first, second = index["ticket"]
    if not all(type(number) is int for number in (form, index["before"], index["after"], first, second)):
        raise TypeError("the index holds something else than whole numbers")


def _file_name(client: str) -> str:
    """A folder name for a client; names that differ stay different."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", client)[:40].strip(".") or "client"
    return plain if plain == client else f"{plain}-{hashlib.sha256(client.encode()).hexdigest()[:8]}"
