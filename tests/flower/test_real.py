"""Real processes on loopback: a SuperLink, SuperNodes, and the runs of our app and of other people's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.flwr_cli import CONNECTION, FlwrCli, FlwrFailed
from fedalloy.flower.layout import ServerPlace
from fedalloy.flower.pki import make_node_key, public_half
from fedalloy.flower.prefork.fallback import Fallback
from fedalloy.flower.prefork.forkserver import Prefork
from fedalloy.flower.programs import DidNotStart, wait_until
from fedalloy.methods.weightings.aaggff_s import AaggffS
from fedalloy.methods.weightings.samples import Samples
from tests.flower.sites import EXAMPLE, HONEST, HOSTILE, LIMIT, Site, changed_lines, end_grace
from tests.flower.test_federation import assert_equal

pytestmark = [pytest.mark.flower, pytest.mark.slow]
ALGORITHMS = ["fedavg", "scaffold", "superfed_lm", "aaggff_s", "fedlayerwise", "fedevg"]
# Scoring is a message more for every node that is scored: the personal models of all, of the others one.
SCORED = {"superfed_lm": {"clients": 3}}
ROUNDS = 2


def test_real_nodes_give_what_the_loop_gives(site):
    """All at a time, since a node with an order waiting does not sleep; but one goes ahead and brings the app along."""
    recipes = {
        name: site.recipe(name, algorithm={"name": name}, run={"rounds": ROUNDS}, evaluate=SCORED.get(name, {}))
        for name in ALGORITHMS
    }
    runs = {ALGORITHMS[0]: site.send(ALGORITHMS[0])}
    site.wait_for(ALGORITHMS[0], f"round 1/{ROUNDS}")
    runs |= {name: site.send(name) for name in ALGORITHMS[1:]}
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
        assert not (site.folder(name) / "bindings.json").exists(), "who is who was known before"


def test_a_killed_node_is_named_and_comes_back_as_itself_with_its_state(site):
    """Killed in round 2 and started again when round 3 is over. Meanwhile a stranger with another key in its place."""
    site.recipe(
        "killed-node", algorithm={"name": "superfed_lm"}, run={"rounds": 5}, engine={"minimum": 2, "deadline": 60.0}
    )
    before = dict(site.federation.node_ids)
    with site.hold_after(1) as hold:
        run = site.send("killed-node")
        site.wait_for("killed-node", "round 1/5")
        site.federation.kill_node("node-1")
        end_grace(site.federation, "node-1")
        hold(3)
        site.wait_for("killed-node", "round 3/5")
        _start_a_stranger_as(site.federation, "node-1")
        site.federation.start_node("node-1")
    assert site.federation.node_ids == before
    site.finish("killed-node", run)
    rows = site.rows("killed-node")
    assert len(rows) == 5
    assert "1" in rows[2]["dropped"], "round 3 went on without it"
    reasons = ("no answer within", "the node of 'node-1' is not connected", "its node is not connected")
    assert rows[2]["dropped"]["1"].startswith(reasons)
    back = [row for row in rows[3:] if 1 in row["ids"]]
    assert back, "it took part again"
    assert not any("1" in row.get("lagging", {}) for row in back), "it had the state that counts"


def _start_a_stranger_as(federation, name):
    key = federation.nodes[name].key
    real = {file: file.read_bytes() for file in (key, public_half(key))}
    for file in real:
        file.unlink()
    make_node_key(key)
    with pytest.raises(DidNotStart, match=f"{name} ended"):
        federation.start_node(name)
    for file, content in real.items():
        file.write_bytes(content)


def test_after_the_server_app_and_the_superlink_were_killed_the_same_command_goes_on(site):
    """The one in the middle of round 2, the other in the middle of round 3, with which its app goes on: the same
    command waits for that. Meanwhile the server forgets a node and lets it in again, with another key."""
    recipe = site.recipe("killed", algorithm={"name": "scaffold"}, run={"rounds": 4})
    with site.hold_after(1) as hold:
        site.send("killed")
        site.wait_for("killed", "round 1/4")
        site.wait_for_middle("killed", 2)
        # The lock of a run folder names the process that writes to it.
        os.kill(int((site.folder("killed") / "lock").read_text().split()[0]), signal.SIGKILL)
        assert [row["round"] for row in site.rows("killed")] == [1]
        hold(2)
        site.send("killed")
        site.wait_for("killed", "round 2/4")
        site.wait_for_middle("killed", 3)
        # The SuperLink alone, as a crash would: the app of its run goes on.
        site.federation.programs["server"].kill()
        site.federation.cli.close()
        site.federation.programs["front"].stop()
        assert [row["round"] for row in site.rows("killed")] == [1, 2]
        _restart_with_another_key_for(site, "node-2")
        run = site.send("killed")
        site.wait_for("killed", "is still being written by process")
    site.finish("killed", run)
    assert "continues (session 2)" in site.said("killed")
    assert "continues (session 3)" in site.said("killed")
    rows = site.rows("killed")
    assert [row["ids"] for row in rows] == [[0, 1, 2]] * 4
    assert not any(row.get("lagging") for row in rows), "interrupted rounds began again from the state before"
    ending, _ = site.expected(recipe)
    for part, leaves in ending.state["shared"].items():
        assert_equal(site.shared("killed")[part], leaves)


def _restart_with_another_key_for(site, name):
    """At a restart, too, the folder decides who is let in: a node is out while a key lies there that it does not have.
    Its own one, once removed, cannot come back."""
    public, federation = site.place / "server" / "nodes" / f"{name}.pub", site.federation
    own, private = public.read_bytes(), federation.nodes[name].key
    make_node_key(site.place / "another.key")
    public.write_bytes((site.place / "another.key.pub").read_bytes())
    federation.start_server()
    wait_until(lambda: not federation.programs[name].running, "the node whose key was exchanged ended", LIMIT)
    public.write_bytes(own)
    with pytest.raises(SpecError, match="is a key that was removed from this federation"):
        federation.register()
    public.write_bytes((site.place / "another.key.pub").read_bytes())
    (site.place / "another.key").replace(private)
    (site.place / "another.key.pub").replace(public_half(private))
    federation.register()
    federation.start_node(name)


def test_a_run_that_is_killed_without_prefork_ends_as_one_that_is_not_with_it(site, tmp_path):
    """In a federation in which every process is a new one, the server app and the node are killed when the node has
    answered and the app has not read it. With one node, since its processes are slow."""
    with ThreadPoolExecutor(1) as beside, Site(tmp_path / "site", HONEST[:1], launcher=Fallback()).up() as plain:
        assert isinstance(site.federation.launcher, Prefork)
        other = beside.submit(_one_client, plain, _kill_after_the_first_answer)
        rows, shared, wanted = _one_client(site)
        assert rows == other.result()[0]
        assert "continues (session 2)" in plain.said("both-ways")
        assert not list(tmp_path.glob("**/worker.lock")), "there every order is a process"
    assert [row["ids"] for row in rows] == [[0]] * 2
    assert not any(row.get("lagging") for row in rows)
    for part, leaves in wanted.items():
        assert_equal(shared[part], leaves)
        assert_equal(shared[part], other.result()[1][part], tolerance=0.0)


def _one_client(site: Site, interrupt: Callable[[Site, str], None] | None = None) -> tuple[Any, ...]:
    name = "both-ways"
    recipe = site.recipe(name, 1, algorithm={"name": "scaffold"}, run={"rounds": 2}, engine={"minimum": 1})
    if interrupt:
        interrupt(site, name)
    site.finish(name, site.send(name))
    # Where there are other nodes they are refused, as none of the recipe's clients.
    rows = [{column: value for column, value in row.items() if column != "refused"} for row in site.rows(name)]
    return rows, site.shared(name), site.expected(recipe, 1)[0].state["shared"]


def _kill_after_the_first_answer(site: Site, name: str) -> None:
    site.send(name)
    site.wait_for(name, "begins")
    run = json.loads((site.folder(name) / "federation.json").read_text())["run"]
    kept = site.place / "nodes" / "node-0" / "store" / run
    wait_until(lambda: any(kept.glob("*/state-000001.safetensors")), "the node answered", LIMIT)
    os.kill(int((site.folder(name) / "lock").read_text().split()[0]), signal.SIGKILL)
    assert not site.rows(name), "the app was killed too late to show anything"
    site.federation.kill_node("node-0")
    end_grace(site.federation, "node-0")
    site.federation.start_node("node-0")


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
        for name in guests:
            # Later runs must not take them for present.
            end_grace(federation, name)
    (row,) = site.rows("hostile")
    assert row["ids"] == [0, 1, 2]
    assert row["dropped"]["3"] == "not finite"
    assert "has shape" in row["dropped"]["4"]
    assert row["dropped"]["5"] == "it holds 200.0 MB, the limit is 50 MB"
    assert any("it says it is '0', but that is the node with key" in why for why in row["refused"].values())
    assert len(row["refused"]) == 1, "the node with the foreign key never got this far"
    ending, _ = site.expected(recipe, 6, sampling={"kind": "list", "cohorts": [[0, 1, 2]]})
    assert_equal(site.shared("hostile")["params"], ending.state["shared"]["params"])


def by_hand(monkeypatch: pytest.MonkeyPatch, rule: Any) -> dict[str, np.ndarray]:
    """The same rounds in this process, with the example's own functions: what must come out."""
    import torch

    monkeypatch.syspath_prepend(str(EXAMPLE))
    task = import_module("quickstart.task")
    model, state = task.new_model(), rule.init(3)
    for round in range(1, ROUNDS + 1):
        data = [task.load_data(client)[0] for client in range(3)]
        stats = {
            "loss_before": torch.tensor([task.evaluate(model, one)[0] for one in data], dtype=torch.float64),
            "num_examples": torch.tensor([len(one[1]) for one in data], dtype=torch.float64),
        }
        weights, state, _ = rule.weigh(Cohort(torch.arange(3), {}, stats), state, Context(round, 3, Key.of(0)))
        trained = [task.train(model, one, 1, 0.2) for one in data]
        model = {
            name: model[name]
            + sum(float(w) * (one[name] - model[name]) for w, one in zip(weights, trained, strict=True))
            for name in model
        }
    for name in [name for name in sys.modules if name.split(".")[0] == "quickstart"]:
        monkeypatch.delitem(sys.modules, name)
    return model


def test_the_diff_shown_in_the_readme_is_the_diff():
    readme, (gone, come) = (EXAMPLE / "README.md").read_text(), changed_lines((EXAMPLE / "to-aaggff.diff").read_text())
    for line in (*(f"-{one}" for one in gone), *(f"+{one}" for one in come)):
        assert line in readme.splitlines()


def test_an_existing_app_becomes_fair_by_changing_two_lines(site, tmp_path, monkeypatch):
    results, runs = {}, {}
    for name, place in {"fedavg": EXAMPLE, "aaggff_s": site.place / "switched"}.items():
        output = {"output": str(tmp_path / f"{name}.npz")}
        runs[name] = site.federation.run(place, {"num-server-rounds": ROUNDS, **output})
    for name, run in runs.items():
        assert run.wait(LIMIT) == "finished:completed", run.log()
        results[name] = dict(np.load(tmp_path / f"{name}.npz"))
    for name, rule in {"fedavg": Samples(), "aaggff_s": AaggffS()}.items():
        for leaf, value in by_hand(monkeypatch, rule).items():
            np.testing.assert_allclose(results[name][leaf], value, rtol=1e-4, atol=1e-5)
    assert np.abs(results["fedavg"]["weight"] - results["aaggff_s"]["weight"]).max() > 1e-3


RECIPE = """
[task]
model = "logistic"
[partition]
kind = "iid"
clients = 8
[algorithm]
name = "fedavg"
batch_size = 64
[run]
rounds = 1
"""


def test_up_runs_a_recipe_follows_it_and_knows_when_it_is_finished(programs_find_us, tmp_path, monkeypatch):
    """A federation of its own, made, started and stopped by the command; in plain text, because it was asked for."""
    recipe, folder = tmp_path / "tiny.toml", tmp_path / "run"
    recipe.write_text(RECIPE)
    line = ["flower", "up", str(recipe), "--nodes", "2", "--insecure", "-o", str(folder)]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert "round 1/1: 0, 1" in done.output, "without keys nodes have no names"
    assert "finished in round 1" in done.output
    row = next(read_run(folder).rounds())
    assert row["ids"] == [0, 1]
    again = CliRunner().invoke(app, line)
    assert again.exit_code == 0
    assert "finished" in again.output
    assert len(list(read_run(folder).rounds())) == 1
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, ["flower", "status", str(folder)])
    assert "finished after round 1" in told.output
    assert "no client dropped out" in told.output
    assert not (folder / "federation" / "server" / "running.json").exists()


def test_an_app_that_is_not_fedalloys_is_refused_and_nothing_of_it_runs(site):
    app = site.foreign_app()
    run = site.federation.run(app, {"output": str(site.place / "said.json")})
    assert run.wait(LIMIT) == "finished:completed", run.log()
    said = json.loads((site.place / "said.json").read_text())
    assert [why for why in said if "this node runs only fedalloy's own app" not in why] == []
    assert len(said) == len(HONEST)
    assert not list(site.place.glob("**/ran")), "its client was never imported"
    assert not list((site.place / "nodes").glob("*/flwr/apps/*foreign*")), "nor was it unpacked"


def test_partners_reach_what_nodes_need_and_nothing_else(site, tmp_path):
    """Somebody outside, with all that a partner has: no key is registered and no run is started through the front."""
    server = site.federation.server
    shutil.copy(server.files.ca_certificate, tmp_path / "ca.crt")
    make_node_key(tmp_path / "stranger.key")
    outside = FlwrCli(ServerPlace(tmp_path, "127.0.0.1", 1, local_port=server.port))
    try:
        for words in (
            ("supernode", "register", str(tmp_path / "stranger.key.pub"), CONNECTION),
            ("supernode", "list", CONNECTION),
            ("run", str(site.app), CONNECTION),
        ):
            with pytest.raises(FlwrFailed, match="404"):
                outside.ask(*words)
    finally:
        outside.close()
    assert listening_on(server.link_port) == {"127.0.0.1"}


def listening_on(port: int) -> set[str]:
    """The addresses of this machine on which somebody listens on a port; IPv6 is named by its first digits."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            (address, number), state = line.split()[1].split(":"), line.split()[3]
            if int(number, 16) == port and state == "0A":
                found.add(".".join(str(one) for one in bytes.fromhex(address)[::-1]) if table == "tcp" else address)
    return found


def test_status_knows_who_is_there(site):
    done = CliRunner().invoke(app, ["flower", "status", str(site.federation.server.folder), "--json"])
    told = json.loads(done.stdout.splitlines()[-1])["server"]
    assert told["running"]
    assert told["open"]
    nodes = {one["name"]: one for one in told["nodes"]}
    assert {name: one["number"] for name, one in nodes.items() if name} == site.federation.node_ids
    assert {nodes[name]["state"] for name in HONEST} == {"connected"}
    assert all(nodes[name]["last_contact"] for name in HONEST)
