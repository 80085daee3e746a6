"""What ``benchmarks.chaos`` says about a study: a wrong state, a wrong record and a lost state are found."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from benchmarks.chaos import checking
from benchmarks.chaos.checking import Verdict, judge
from benchmarks.chaos.services import lies
from fedalloy.experiment.records import checkpoint
from fedalloy.flower.node import answer
from fedalloy.flower.protocol.tensor_messages import TensorMessage, unpack
from fedalloy.flower.protocol.tensor_messages import pack as as_records
from tests.flower import shares
from tests.flower.fake import federation, play, recipe_file

pytestmark = pytest.mark.flower


@pytest.fixture
def verdict(tmp_path, monkeypatch):
    """The verdict about a study of three nodes with states, of which one does not count in the last round."""
    monkeypatch.setattr(checking, "NODES", 3)
    grid = federation(tmp_path)
    for client, node in enumerate(grid.nodes.values()):
        shares.write_share(tmp_path / f"node-{client}" / "data", client)
        shares.write_share(tmp_path / "all", client)
        node.config["fedalloy-store"] = str(tmp_path / f"node-{client}" / "store")
        node.config["fedalloy-data"] = str(tmp_path / f"node-{client}" / "data")
    tables = shares.tables(3) | {"run": {"rounds": 3, "seeds": [7]}, "engine": {"minimum": 2, "deadline": 5.0}}
    recipe = recipe_file(tmp_path, "scaffold", **tables)
    recipe.write_text(recipe.read_text().replace('kind = "dirichlet"\n', "").replace("alpha = 0.5\n", ""))

    def say(text: str) -> None:
        grid.nodes[102].online = "round 2/3" not in text

    play(recipe, tmp_path / "runs" / "scaffold", grid, say=say)
    (tmp_path / "runs" / "scaffold" / "federation.log").touch()
    return lambda: judge(Place(tmp_path), "scaffold", recipe, tmp_path / "runs" / "scaffold")


@dataclass
class Place:
    """Where the nodes are."""

    place: Path

    def folder(self, node: int) -> Path:
        return self.place / f"node-{node}"


def states(folder: Path, client: int) -> list[Path]:
    return sorted((folder / f"node-{client}" / "store").rglob("state-*.safetensors"))


def test_the_states_of_all_nodes_are_compared(verdict):
    found = verdict()
    assert (found.rounds, found.missing, found.states, found.problems) == (3, 1, 3, [])
    assert found.distance < checking.TOLERANCE
    assert found.state_distance < checking.TOLERANCE


def test_another_state_and_a_lost_one_are_found(verdict, tmp_path):
    (*_, newest) = states(tmp_path, 0)
    state = checkpoint.load(newest)
    next(iter(state["solver"]["control"].values())).add_(1e-3)
    checkpoint.save(newest, state)
    for file in states(tmp_path, 1):
        file.unlink()
    first, second = verdict().problems
    assert first.startswith("the state of node-0 is 0.001 from that of the records")
    assert second == "node-1 does not have its state of round 3"


def test_a_changed_record_is_found(verdict, tmp_path):
    file = tmp_path / "runs" / "scaffold" / "rounds.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["ids"], rows[0]["dropped"] = [0, 1], {"2": "no answer"}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found: Verdict = verdict()
    assert found.distance > checking.TOLERANCE
    assert "from that of the records" in found.problems[0]


def test_the_node_that_lies_answers_and_lies_sometimes(monkeypatch):
    """It takes the options with which a node sends, and sends numbers that are none or another shape, or the truth."""
    monkeypatch.setattr(answer, "as_records", as_records)  # put back at the end
    lies()
    said, seen = vars(answer)["as_records"], set()
    for _ in range(50):
        message = TensorMessage({"status": "ok"}, {"delta": {"w": torch.ones(2, 2)}})
        leaf = unpack(said(message, release=True)).parts["delta"]["w"]
        seen.add("shape" if leaf.shape != (2, 2) else "number" if leaf.isnan().any() else "honest")
    assert seen == {"shape", "number", "honest"}
