"""A federation of real processes on loopback, encrypted and authenticated, and the runs that tests send to it.

Nothing here waits for a fixed time: what is awaited has happened when a file says so, and the limits are far beyond
what even a busy machine needs.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedalloy.experiment.records import atomic, toml
from fedalloy.experiment.records.checkpoint import load as load_state
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.bundle import write_bundle
from fedalloy.flower.config import ServerConfig
from fedalloy.flower.flwr_cli import SubmittedRun
from fedalloy.flower.local import LocalFederation
from fedalloy.flower.programs import carrying, wait_until
from fedalloy.flower.project_templates import FederationPlan, write_federation
from tests.flower import shares
from tests.flower.test_federation import simulated

HONEST = ("node-0", "node-1", "node-2")
HOSTILE = {"node-3": "nan", "node-4": "wrong_shapes", "node-5": "two_hundred_megabytes"}
LIMIT = 600.0
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flower-quickstart"


def end_grace(federation: LocalFederation, name: str) -> None:
    """Let the minute be over for which a server believes that a killed node is still there: what Flower's own table
    says about how long the node counts as online is set to the past."""
    with contextlib.closing(sqlite3.connect(federation.server.database, timeout=LIMIT)) as database, database:
        # Flower's ids are unsigned, the table's are not.
        signed = int.from_bytes(int(federation.node_ids[name]).to_bytes(8, "big"), "big", signed=True)
        changed = database.execute("UPDATE node SET online_until = 1 WHERE node_id = ?", (signed,)).rowcount
    assert changed == 1, f"Flower's table of nodes does not know {name}"


def changed_lines(diff: str) -> tuple[list[str], list[str]]:
    """The lines a diff takes away and those it adds."""
    lines = [line for line in diff.splitlines() if not line.startswith(("---", "+++"))]
    return [one[1:] for one in lines if one.startswith("-")], [one[1:] for one in lines if one.startswith("+")]


def switched(folder: Path) -> Path:
    """The example after its two lines were changed."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    gone, come = changed_lines((EXAMPLE / "to-aaggff.diff").read_text())
    assert len(gone) == len(come) == 2
    file = folder / "quickstart" / "server_app.py"
    text = file.read_text()
    for old, new in zip(gone, come, strict=True):
        assert text.count(f"{old}\n") == 1, f"the example no longer has the line {old!r}"
        text = text.replace(f"{old}\n", f"{new}\n")
    file.write_text(text)
    return folder


FOREIGN = {
    "pyproject.toml": """
[project]
name = "foreign"
version = "1.0.0"
description = "Somebody else's app"
license = "Apache-2.0"
dependencies = []
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[tool.flwr.app]
publisher = "stranger"
[tool.flwr.app.components]
serverapp = "foreign.server_app:app"
clientapp = "foreign.client_app:app"
[tool.flwr.app.config]
output = ""
""",
    "foreign/__init__.py": "",
    "foreign/client_app.py": """
from pathlib import Path
from flwr.clientapp import ClientApp
Path("ran").touch()
app = ClientApp()
""",
    "foreign/server_app.py": """
import json, time
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()

@app.main()
def main(grid, context):
    nodes = list(grid.get_node_ids())
    ids = set(grid.push_messages([Message(RecordDict(), node, "query", group_id="1") for node in nodes]))
    said = []
    while ids:
        for one in grid.pull_messages(list(ids)):
            ids.discard(one.metadata.reply_to_message_id)
            said.append(str(one.error.reason if one.has_error() else "answered"))
        time.sleep(0.1)
    with open(context.run_config["output"], "w") as file:
        json.dump(said, file)
""",
}


class Site:
    """A federation and the runs sent to it."""

    def __init__(self, place: Path, honest: tuple[str, ...] = HONEST, others: tuple[str, ...] = (), **how: Any) -> None:
        self.place, self.honest = place, honest
        write_federation(place, FederationPlan(nodes=(*honest, *others)))
        for number, name in enumerate((*honest, *others)):
            source = f"tests.flower.hostile:{HOSTILE[name]}" if name in HOSTILE else "data"
            self.configure(name, data=source, client=number, threads=1)
            shares.write_share(place / "nodes" / name / "data", 0 if number > 5 else number)
        self.app = write_bundle(place / "app")
        self.federation = LocalFederation.of(place, startup=LIMIT, **how)

    @staticmethod
    def large(place: Path) -> Site:
        """Besides the honest and the hostile ones: a second node-0, and one whose key nobody registered."""
        site = Site(place, HONEST, (*HOSTILE, "node-6", "node-7"))
        site.configure("node-6", client=0)
        # One of the honest nodes brings its data by a function, which also lets a test hold it.
        site.configure("node-0", data="tests.flower.gates:data")
        (place / "server" / "nodes" / "node-7.pub").unlink()
        site.federation = LocalFederation.of(place, startup=LIMIT, apps=(EXAMPLE, switched(place / "switched")))
        return site

    def configure(self, name: str, **values: Any) -> None:
        """Change a node's file."""
        file = self.place / "nodes" / name / "node.toml"
        kept = [line for line in file.read_text().splitlines() if line.partition("=")[0].strip() not in values]
        file.write_text("\n".join([*kept, *(f"{key} = {json.dumps(value)}" for key, value in values.items())]) + "\n")

    @contextlib.contextmanager
    def up(self) -> Iterator[Site]:
        """Start the server and the honest nodes, and leave nothing behind."""
        try:
            self.federation.start_server()
            for name in self.honest:
                self.federation._launch_node(name)
            self.federation.wait_online(*self.honest)
            self.federation._say_where()
            yield self
        finally:
            self.federation.stop()
        marks = [f"{self.federation._token}.{name}" for name in self.federation.programs]
        assert [list(carrying(mark)) for mark in marks] == [[] for _ in marks], "no process outlives the federation"

    def recipe(self, name: str, clients: int = 3, **tables: dict[str, Any]) -> Path:
        made: dict[str, Any] = {
            **shares.tables(clients),
            "run": {"rounds": 3, "seeds": [5]},
            "evaluate": {"every": 100, "clients": 1},
            "engine": {"kind": "flower", "deadline": LIMIT, "minimum": 3, "wait": LIMIT},
        }
        made |= {key: {**made.get(key, {}), **table} for key, table in tables.items()}
        file = self.place / "recipes" / f"{name}.toml"
        file.parent.mkdir(exist_ok=True)
        file.write_text(toml.dumps(made))
        return file

    def foreign_app(self) -> Path:
        """An app that the nodes were not told of."""
        for name, text in FOREIGN.items():
            file = self.place / "foreign" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return self.place / "foreign"

    def folder(self, name: str) -> Path:
        return self.place / "runs" / name

    def send(self, name: str) -> SubmittedRun:
        """The command that starts a run, and that takes it up again."""
        config = ServerConfig(self.place / "recipes" / f"{name}.toml", self.folder(name))
        return self.federation.run(self.app, config.to_keys())

    @contextlib.contextmanager
    def hold_after(self, round: int) -> Iterator[Callable[[float], None]]:
        """Let the first node answer nothing of later rounds, so that a run stands still in the middle of the next one;
        what is returned sets another round."""
        gate = self.place / "nodes" / "node-0" / "gate"
        try:
            atomic.write_text(gate, str(round))
            yield lambda later: atomic.write_text(gate, str(later))
        finally:
            gate.unlink()

    def said(self, name: str) -> str:
        log = self.folder(name) / "federation.log"
        return log.read_text() if log.exists() else ""

    def wait_for(self, name: str, text: str) -> None:
        """Return when a run has said something."""
        server = self.federation.programs["server"]
        wait_until(lambda: text in self.said(name), f"run {name} said '{text}'", LIMIT, [server])

    def wait_for_middle(self, name: str, round: int) -> None:
        """Return when the first node is held in a round, and the others have done their part of it."""
        run = json.loads((self.folder(name) / "federation.json").read_text())["run"]
        held = self.place / "nodes" / HONEST[0] / "held"
        stores = [self.place / "nodes" / node / "store" / run for node in HONEST[1:]]

        def middle() -> bool:
            done = all(list(store.glob(f"*/state-{round:06d}.safetensors")) for store in stores)
            return done and held.exists() and held.read_text() == str(round)

        wait_until(
            middle, f"run {name} was in the middle of round {round}", LIMIT, [self.federation.programs["server"]]
        )

    def finish(self, name: str, run: SubmittedRun) -> None:
        """Return when a run is complete. Its own folder is asked first, because asking Flower costs much more."""

        def over() -> bool:
            file = self.folder(name) / "status.json"
            state = json.loads(file.read_text())["state"] if file.exists() else "running"
            return state in ("finished", "failed") or (time.monotonic() > ask and run.status().startswith("finished"))

        ask = time.monotonic() + 120
        wait_until(over, f"run {name} ended", LIMIT, [self.federation.programs["server"]])
        assert run.wait(LIMIT) == "finished:completed", self.said(name)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return list(read_run(self.folder(name)).rounds())

    def shared(self, name: str) -> dict[str, Any]:
        """The parts at the end of a run."""
        newest = max((self.folder(name) / "checkpoints").glob("*.safetensors"))
        found: dict[str, Any] = load_state(newest)["server"]["shared"]
        return found

    def expected(self, recipe: Path, clients: int = 3, **tables: dict[str, Any]):
        return simulated(recipe, **shares.simulation(self.place / f"all-{clients}", clients), **tables)
