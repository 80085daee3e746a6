"""Real processes on loopback: a federation with TLS and node keys, and an existing app that changes two lines."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.core.keys import Key
from fedalloy.core.types import Cohort, Context
from fedalloy.flower.local import LocalFederation
from fedalloy.flower.pki import make_node_key
from fedalloy.flower.processes import DidNotStart, carrying
from fedalloy.flower.scaffold import Plan, numbered, write_federation
from fedalloy.records.reading import read_run
from fedalloy.weightings.aaggff_s import AaggffS
from fedalloy.weightings.samples import Samples

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "flower-quickstart"
LIMIT = 900.0
ROUNDS = 2
pytestmark = [pytest.mark.flower, pytest.mark.xdist_group("flower")]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFederation]:
    folder = tmp_path_factory.mktemp("local") / "fed"
    write_federation(folder, Plan(numbered(3)))
    # A machine that runs other tests at the same time may need many times what an idle one does.
    running = LocalFederation.of(folder, startup=LIMIT)
    with running:
        yield running
    marks = [f"{running._token}.{name}" for name in running.programs]
    assert [list(carrying(mark)) for mark in marks] == [[] for _ in marks], "no process outlives the federation"
    assert not running.running_file.exists()


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


def test_an_existing_app_becomes_fair_by_changing_two_lines(federation, tmp_path, monkeypatch):
    results = {}
    for name, place in {"fedavg": EXAMPLE, "aaggff_s": switched(tmp_path / "app")}.items():
        output = tmp_path / f"{name}.npz"
        run = federation.run(place, {"num-server-rounds": ROUNDS, "output": str(output)})
        ended = run.wait(LIMIT)
        assert ended == "finished:completed", run.log()
        results[name] = dict(np.load(output))
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


def test_up_runs_a_recipe_follows_it_and_knows_when_it_is_finished(federation, tmp_path, monkeypatch):
    """The federation is the one that is running already: starting and stopping one is what the fixture tests."""

    @contextmanager
    def running(_: Path) -> Iterator[LocalFederation]:
        yield federation

    monkeypatch.setattr(LocalFederation, "of", running)
    recipe, folder = tmp_path / "tiny.toml", tmp_path / "run"
    recipe.write_text(RECIPE)
    line = ["flower", "up", str(recipe), "--nodes", "3", "-o", str(folder)]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert "round 1/1: 0, 1, 2" in done.output
    assert "finished in round 1" in done.output
    row = next(read_run(folder).rounds())
    assert row["ids"] == [0, 1, 2]
    again = CliRunner().invoke(app, line)
    assert again.exit_code == 0
    assert "finished" in again.output
    assert len(list(read_run(folder).rounds())) == 1
    monkeypatch.chdir(tmp_path)
    told = CliRunner().invoke(app, ["flower", "status", str(folder)])
    assert "finished after round 1" in told.output
    assert "nobody dropped out" in told.output


def test_status_knows_who_is_there(federation):
    done = CliRunner().invoke(app, ["flower", "status", str(federation.server.folder), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])["server"]
    assert told["running"]
    assert {one["name"]: one["number"] for one in told["nodes"]} == federation.node_ids
    assert {one["status"] for one in told["nodes"]} == {"online"}


def test_a_killed_node_comes_back_as_itself_and_a_stranger_does_not_get_in(federation):
    before = dict(federation.node_ids)
    federation.kill_node("node-2")
    federation.notice_silence("node-2")
    key = federation.nodes["node-2"].key
    real = key.read_bytes()
    key.unlink()
    key.with_name("node.key.pub").unlink()
    make_node_key(key)
    with pytest.raises(DidNotStart, match="node-2 ended"):
        federation.start_node("node-2")
    key.write_bytes(real)
    federation.start_node("node-2")
    assert federation.node_ids == before
