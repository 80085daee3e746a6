"""What really travels over Flower is what is recorded, and what a simulation records.

(test_federation.py compares them for every algorithm that it plays.)
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import RecordDict

from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.protocol.tensor_messages import TensorMessage, pack, unpack
from tests.flower.fake import FakeNode, play, recipe_file
from tests.flower.test_federation import assert_equal, simulated
from tests.flower.watched import per_round, recorded, watched

pytestmark = pytest.mark.flower
MLP: dict[str, Any] = {
    "task": {"model": {"kind": "mlp", "hidden": [8]}},
    "run": {"rounds": 2},
    "evaluate": {"every": 2},
}
BODY, HEAD = 4 * (64 * 8 + 8), 4 * (8 * 10 + 10)
TOPK = {"algorithm": {"compressor": "topk", "ratio": 0.05}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("fedper", {}),
    ("lgfedavg", {}),
    ("fedcams", TOPK),
    ("fedcams", {"algorithm": {"compressor": "scaled_sign"}}),
]


@pytest.mark.parametrize(("algorithm", "tables"), CASES)
def test_messages_records_and_simulations_agree(algorithm, tables, tmp_path):
    recipe, grid = recipe_file(tmp_path, algorithm, **MLP, **tables), watched(tmp_path)
    ending = play(recipe, tmp_path / "run", grid)
    assert ending.status == "finished"
    assert recorded(tmp_path / "run") == per_round(grid, 2)
    expected, recorder = simulated(recipe)
    assert recorded(tmp_path / "run") == [(row["bytes_down"], row["bytes_up"]) for row in recorder.streams["rounds"]]
    for part, leaves in expected.state["shared"].items():
        assert_equal(ending.state["shared"][part], leaves)


def test_leaves_that_stay_are_in_the_first_message_and_in_no_other(tmp_path):
    grid = watched(tmp_path)
    play(recipe_file(tmp_path, "fedper", **{**MLP, "evaluate": {"every": 1}}), tmp_path / "run", grid)
    heads = [
        (node, message.header["kind"], message.header["round"])
        for node, message in grid.down
        if any("output" in name for name in message.parts.get("shared/params", {}))
    ]
    assert heads == [(node, "train", 1) for node in (100, 101, 102)]
    assert all("output.weight" not in message.parts.get("delta", {}) for _, message in grid.up)
    assert recorded(tmp_path / "run") == [(3 * (BODY + HEAD), 3 * BODY), (3 * BODY, 3 * BODY)]


def test_a_node_that_lost_its_disk_gets_its_leaves_again_and_they_are_counted(tmp_path):
    grid = watched(tmp_path)
    grid.lose = {101: 2}
    play(recipe_file(tmp_path, "fedper", **MLP), tmp_path / "run", grid)
    assert recorded(tmp_path / "run") == per_round(grid, 2)
    assert recorded(tmp_path / "run") == [(3 * (BODY + HEAD), 3 * BODY), (4 * BODY + HEAD, 3 * BODY)]
    rows = list(read_run(tmp_path / "run").rounds())
    assert "continues from the initial one" in rows[1]["lagging"]["1"]
    assert all(row["ids"] == [0, 1, 2] for row in rows)


def test_a_node_that_may_not_lag_is_not_sent_anything_again(tmp_path):
    grid = watched(tmp_path)
    grid.lose = {101: 2}
    recipe = recipe_file(tmp_path, "fedper", **MLP, engine={"on_lag": "drop", "minimum": 2})
    play(recipe, tmp_path / "run", grid)
    assert recorded(tmp_path / "run") == [(3 * (BODY + HEAD), 3 * BODY), (3 * BODY, 2 * BODY)]
    row = list(read_run(tmp_path / "run").rounds())[1]
    assert row["ids"] == [0, 2]
    assert "on_lag = 'drop'" in row["dropped"]["1"]


def test_a_node_that_loses_its_disk_before_an_evaluation_scores_all_the_same(tmp_path):
    grid, lost = watched(tmp_path), set[str]()

    def forgetful(node: FakeNode):
        def tamper(content: RecordDict) -> RecordDict:
            if unpack(content).header.get("stats") and not lost:
                lost.add(node.key)
                shutil.rmtree(node.config["fedalloy-store"])
            return content

        return tamper

    grid.nodes[101].tamper = forgetful(grid.nodes[101])
    tables = {**MLP, "run": {"rounds": 1}, "evaluate": {"every": 1}}
    play(recipe_file(tmp_path, "fedper", **tables), tmp_path / "run", grid)
    (row,) = read_run(tmp_path / "run").rounds()
    assert lost
    assert "unscored" not in row


def test_packed_updates_that_do_not_fit_are_dropped_and_named(tmp_path):
    def tamper(content: RecordDict) -> RecordDict:
        message = unpack(content)
        if "delta" not in message.parts:
            return content
        bad = {**message.parts["delta"], "places": message.parts["delta"]["places"].flip(0)}
        return pack(TensorMessage(message.header, {**message.parts, "delta": bad}))

    grid = watched(tmp_path)
    grid.nodes[101].tamper = tamper
    recipe = recipe_file(tmp_path, "fedcams", **TOPK, engine={"minimum": 2}, run={"rounds": 1})
    play(recipe, tmp_path / "run", grid)
    (row,) = read_run(tmp_path / "run").rounds()
    assert row["ids"] == [0, 2]
    assert "ascending positions" in row["dropped"]["1"]


def test_what_a_client_says_about_its_bytes_is_not_believed(tmp_path):
    def tamper(content: RecordDict) -> RecordDict:
        message = unpack(content)
        if "stats" not in message.header:
            return content
        return pack(
            TensorMessage({**message.header, "stats": {**message.header["stats"], "bytes_up": 1e12}}, message.parts)
        )

    grid = watched(tmp_path)
    grid.nodes[101].tamper = tamper
    play(recipe_file(tmp_path, "fedavg", run={"rounds": 1}), tmp_path / "run", grid)
    ((_, up),) = recorded(tmp_path / "run")
    assert up == 3 * 4 * (64 * 10 + 10)
