"""The files of a server and of its runs, as Flower, the front and the driver leave them."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedalloy.experiment.records.folder import RunFolder
from fedalloy.flower import admission
from fedalloy.flower.config import FOLDER
from fedalloy.flower.layout import ServerPlace
from fedalloy.flower.node_registry import identity_of

NOW = datetime.now(UTC).timestamp()


def told(ago: float) -> str:
    return datetime.fromtimestamp(NOW - ago, UTC).isoformat()


class Records:
    """The files of a server with three nodes, as Flower and the front write them."""

    def __init__(self, place: ServerPlace) -> None:
        self.place = place
        self.keys = admission.keys(place)
        with closing(sqlite3.connect(place.database)) as database, database:
            columns = "node_id, name, public_key, status, last_activated_at, last_deactivated_at, online_until"
            database.execute(f"CREATE TABLE node ({columns})")
            database.execute("CREATE TABLE run (run_id, override_config, primary_task_id)")
            times = "pending_at, starting_at, running_at, finished_at"
            database.execute(f"CREATE TABLE task (task_id, {times}, sub_status DEFAULT '', details DEFAULT '')")

    def node(self, name: str, state: str, until: float = 40.0) -> None:
        """``until``: seconds until Flower notices that it is gone."""
        row = (-len(name), name, self.keys[name], state, told(100), told(50), NOW + until)
        self._add("INSERT INTO node VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def run(self, number: int, folder: Path | None, ago: float = 9.0, over: str = "") -> None:
        settings = json.dumps({FOLDER: str(folder)} if folder else {})
        self._add("INSERT INTO run VALUES (?, ?, ?)", (number, settings, number))
        # Flower writes these times without a time zone.
        at = datetime.fromtimestamp(NOW - ago, UTC).replace(tzinfo=None).isoformat(" ")
        row = (number, at, at, at, at if over else None, over)
        self._add("INSERT INTO task VALUES (?, ?, ?, ?, ?, ?, '')", row)

    def contacts(self, **seen: dict[str, Any]) -> None:
        found = [{"key": identity_of(self.keys[name]), "name": name, **one} for name, one in seen.items()]
        found.append({"key": "key 99", "name": "", "refused": NOW - 5, "reason": "unknown-key"})
        (self.place.folder / "contacts.json").write_text(json.dumps({"contacts": found}))

    def end(self, number: int, how: str) -> None:
        """Let a run be over."""
        self._add("UPDATE task SET finished_at = pending_at, sub_status = ? WHERE task_id = ?", (how, number))

    def _add(self, what: str, row: tuple[Any, ...]) -> None:
        with closing(sqlite3.connect(self.place.database)) as database, database:
            database.execute(what, row)


def a_run(folder: Path, state: Any = "running", rows: int = 2) -> Path:
    made = RunFolder.create(folder, {"run": {"rounds": 10}}, {}, {"names": ["north", "south", "west"]})
    with made.lock():
        for round in range(1, rows + 1):
            last = round == rows
            dropped = {"1": "no answer within 60 s", "2": "not finite"} if last else {}
            row = {"round": round, "ids": [0] if last else [0, 1, 2], "dropped": dropped, "absent": [1] if last else []}
            made.append("rounds", row)
            made.append("timings", {"round": round, "clients": 3.0, "server": 1.0})
        made.set_status(state, rows)
    return folder
