"""The sessions of a run on a federation: its number for nodes, and how often its server has begun or continued it."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalloy.experiment.records import atomic

FILE = "federation.json"


@dataclass(frozen=True)
class ServerSession:
    """The number of a run's session: nodes refuse orders that an earlier session may still have in transit."""

    run: str
    number: int

    @staticmethod
    def open(folder: Path) -> ServerSession:
        """The next session of the run in a folder."""
        file = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        known: dict[str, Any] = {"run": uuid.uuid4().hex, "sitting": 0}
        if file.exists():
            known = json.loads(file.read_text(encoding="utf-8"))
        session = ServerSession(known["run"], known["sitting"] + 1)
        session._write(file)
        return session

    @staticmethod
    def renew(folder: Path) -> None:
        """Let a restored run have later sessions than any that its nodes may have seen since the backup: they would
        refuse its orders. Milliseconds since 1970 are later, whatever happened and however often it is restored."""
        file = folder / FILE
        if file.exists():
            known = json.loads(file.read_text(encoding="utf-8"))
            ServerSession(known["run"], max(known["sitting"], time.time_ns() // 1_000_000))._write(file)

    def _write(self, file: Path) -> None:
        atomic.write_text(file, json.dumps({"run": self.run, "sitting": self.number}) + "\n")
