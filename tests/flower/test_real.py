"""Real processes on loopback, encrypted and authenticated: a SuperLink, SuperNodes, and the runs sent to them.

One federation serves all tests of this file. Nothing here waits for a fixed time: what is awaited has happened when a
file says so, and the limits are far beyond what even a busy machine needs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedalloy.flower.bundle import write_bundle
from fedalloy.flower.config import ServerConfig
from fedalloy.flower.local import LocalFederation
from fedalloy.flower.operating import Run
from fedalloy.flower.processes import wait_until
from fedalloy.flower.scaffold import Plan, write_federation
from fedalloy.records import toml
from fedalloy.records.checkpoint import load as load_state
from fedalloy.records.reading import read_run
from tests.flower import shares
from tests.flower.test_federation import assert_equal, simulated

pytestmark = [pytest.mark.flower, pytest.mark.slow, pytest.mark.xdist_group("flower")]
HONEST = ("node-0", "node-1", "node-2")
HOSTILE = {"node-3": "nan", "node-4": "wrong_shapes", "node-5": "two_hundred_megabytes"}
ALGORITHMS = ["fedavg", "scaffold", "superfed_lm", "aaggff_s", "fedlayerwise", "fedevg"]
# Scoring is a message more for every node that is scored: the personal models of all, of the others one.
SCORED = {"superfed_lm": {"clients": 3}}
LIMIT = 600.0
ROOT = Path(__file__).resolve().parents[2]


class Site:
    """A federation and the runs sent to it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        # Besides the honest and the hostile ones: a second node-0, and one whose key nobody registered.
        names = (*HONEST, *HOSTILE, "node-6", "node-7")
        write_federation(place, Plan(nodes=names))
        for number, name in enumerate(names):
            source = f"tests.flower.hostile:{HOSTILE[name]}" if name in HOSTILE else "data"
            self.configure(name, data=source, client=0 if name == "node-6" else number, threads=1)
            shares.write_share(place / "nodes" / name / "data", 0 if number > 5 else number)
        (place / "server" / "nodes" / "node-7.pub").unlink()
        self.app = write_bundle(place / "app")
        self.federation = LocalFederation.of(place, startup=LIMIT)

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
            self.federation.register()
            for name in HONEST:
                self.federation._launch_node(name)
            self.federation.wait_online(*HONEST)
            yield self
        finally:
            self.federation.stop()

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

    def folder(self, name: str) -> Path:
        return self.place / "runs" / name

    def send(self, name: str) -> Run:
        """The command that starts a run, and that takes it up again."""
        config = ServerConfig(self.place / "recipes" / f"{name}.toml", self.folder(name), None, self.place / "who.json")
        return self.federation.run(self.app, config.to_keys())

    def said(self, name: str) -> str:
        log = self.folder(name) / "federation.log"
        return log.read_text() if log.exists() else ""

    def wait_for(self, name: str, text: str) -> None:
        """Return when a run has said something."""
        server = self.federation.programs["server"]
        wait_until(lambda: text in self.said(name), f"run {name} said '{text}'", LIMIT, [server])

    def finish(self, name: str, run: Run) -> None:
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        # The programs find fedalloy and the tests' own modules, wherever they are started.
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("OMP_NUM_THREADS", "1")
        with Site(tmp_path_factory.mktemp("federation") / "site").up() as site:
            yield site


def test_real_nodes_give_what_the_loop_gives(site):
    """Two runs at a time: a node that has an order waiting does not sleep, and no program starts too slowly for Flower,
    which gives a process half a minute before it starts another one for the same task."""
    recipes = {name: site.recipe(name, algorithm={"name": name}, evaluate=SCORED.get(name, {})) for name in ALGORITHMS}
    for pair in zip_longest(ALGORITHMS[::2], ALGORITHMS[1::2]):
        runs = {name: site.send(name) for name in pair if name}
        for name, run in runs.items():
            site.finish(name, run)
    for name, recipe in recipes.items():
        ending, recorder = site.expected(recipe)
        for part, leaves in ending.state["shared"].items():
            assert_equal(site.shared(name)[part], leaves)
        rows, wanted = site.rows(name), recorder.streams["rounds"]
        assert [row["ids"] for row in rows] == [row["ids"] for row in wanted]
        found, simulation = (all_rows[-1]["evaluation"]["loss"]["mean"] for all_rows in (rows, wanted))
        assert found == pytest.approx(simulation, abs=1e-5)
    assert set(json.loads((site.place / "who.json").read_text())) >= {"0", "1", "2"}


def test_a_killed_node_is_named_and_comes_back_with_its_state(site):
    """Killed in round 2; started again when round 3 is over; it must count again in one of the five rounds left."""
    site.recipe(
        "killed-node",
        algorithm={"name": "superfed_lm"},
        run={"rounds": 8},
        engine={"minimum": 2, "deadline": 60.0},
    )
    run = site.send("killed-node")
    site.wait_for("killed-node", "round 1/8")
    site.federation.kill_node("node-1")
    site.federation.notice_silence("node-1")
    site.wait_for("killed-node", "round 3/8")
    site.federation.start_node("node-1")
    site.finish("killed-node", run)
    rows = site.rows("killed-node")
    assert len(rows) == 8
    assert "1" in rows[2]["dropped"], "round 3 went on without it"
    reasons = ("no answer within", "the node of '1' is not connected", "its node is not connected")
    assert rows[2]["dropped"]["1"].startswith(reasons)
    back = [row for row in rows[3:] if 1 in row["ids"]]
    assert back, "it took part again"
    assert not any("1" in row.get("lagging", {}) for row in back), "it had the state that counts"


def test_a_killed_server_app_goes_on_where_it_was(site):
    recipe = site.recipe("killed-server", algorithm={"name": "scaffold"}, run={"rounds": 4})
    site.send("killed-server")
    site.wait_for("killed-server", "round 2/4")
    # The lock of a run folder names the process that writes to it. It is in the middle of round 3 now.
    os.kill(int((site.folder("killed-server") / "lock").read_text()), signal.SIGKILL)
    assert len(site.rows("killed-server")) < 4
    site.finish("killed-server", site.send("killed-server"))
    assert "goes on (sitting 2)" in site.said("killed-server")
    ending, _ = site.expected(recipe)
    for part, leaves in ending.state["shared"].items():
        assert_equal(site.shared("killed-server")[part], leaves)


def test_hostile_nodes_are_dropped_and_named_and_impostors_refused(site):
    """Six clients of which three are hostile, a second node that says it is client 0, and a node with a foreign key."""
    federation, guests = site.federation, [*HOSTILE, "node-6"]
    recipe = site.recipe(
        "hostile", clients=6, algorithm={"name": "fedavg"}, run={"rounds": 1}, engine={"max_megabytes": 50.0}
    )
    try:
        for name in (*guests, "node-7"):
            federation._launch_node(name)
        federation.wait_online(*guests)
        site.finish("hostile", site.send("hostile"))
        stranger = federation.programs["node-7"]
        wait_until(lambda: not stranger.running, "the node with the foreign key ended", LIMIT)
        assert stranger.process.returncode != 0
    finally:
        for name in (*guests, "node-7"):
            if name in federation.programs:
                federation.kill_node(name)
    (row,) = site.rows("hostile")
    assert row["ids"] == [0, 1, 2]
    assert row["dropped"]["3"] == "not finite"
    assert "has shape" in row["dropped"]["4"]
    assert row["dropped"]["5"] == "it holds 200.0 MB, the limit is 50 MB"
    assert any("it says it is '0', but that is the node with key" in why for why in row["refused"].values())
    assert len(row["refused"]) == 1, "the node with the foreign key never got this far"
    ending, _ = site.expected(recipe, 6, sampling={"kind": "list", "cohorts": [[0, 1, 2]]})
    assert_equal(site.shared("hostile")["params"], ending.state["shared"]["params"])
