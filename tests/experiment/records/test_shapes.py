"""Files of run folders that say what no run says are refused by name."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records import checkpoint
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.reading import read_json, read_run
from fedalloy.experiment.records.shapes import ROW, fault, row_fault
from fedalloy.results.export.tables import rows

GOOD = {
    "round": 1,
    "ids": [0, 2],
    "weights": [0.5, None],
    "dropped": {"1": "late"},
    "train_loss": None,
    "own": {"x": 1},
}


def test_an_ordinary_row_is_fine():
    assert fault(GOOD, ROW) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("round", -1), ("round", 2**40), ("round", 1.0), ("round", True), ("ids", [2**40]), ("ids", ["1"]),
        ("ids", [-1]), ("own", "\ud800"), ("own", {"\ud800": 1}), ("info", {"\ud800": 1}), ("dropped", {"1": "\ud800"}),
        ("weights", ["a"]), ("weights", {"layer": 3}), ("dropped", {"x": "y"}), ("dropped", {"1": 2}),
        ("train_loss", math.inf), ("train_loss", "1"), ("evaluation", {"accuracy": 0.5}), ("info", [1]),
        ("evaluation", {"accuracy": {"mean": "turtle:Turtle"}}), ("evaluation_mix", {"accuracy": {"mean": "x"}}),
        ("own", math.nan), ("global", {"loss": "x"}),
    ],
)  # fmt: skip
def test_a_row_that_no_run_writes_is_named(name, value):
    assert fault({**GOOD, name: value}, ROW) == f"'{name}'"


def test_scores_of_clients_are_lists_of_numbers():
    row = {"round": 1, "split": "test", "model": "global", "ids": [0, 1], "accuracy": [0.5, None]}
    assert row_fault(row) is None
    for wrong in ("high", 0.5, ["a", "b"], {"0": 1}, None):
        assert row_fault({**row, "accuracy": wrong}) == "'accuracy'"


def test_depth_is_bounded():
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    assert fault({"round": 1, "own": deep}, ROW) == "'own'"


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"clients": -1}', '{"names": [1]}', '{"clients": 1e300}', '{"sizes": [1, null]}']
)
def test_a_manifest_is_checked(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        read_json(tmp_path / "manifest.json")


def test_rows_with_absurd_numbers_are_refused(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {"run": {"rounds": 1}}, {})
    (folder.path / "rounds.jsonl").write_text(json.dumps({**GOOD, "ids": [2**50]}) + "\n")
    with pytest.raises(CheckpointError, match=r"row 1 is damaged: 'ids'"):
        list(read_run(tmp_path / "run").rounds())


SAVED = {"round": 1, "lengths": {"rounds": 0, "clients": 0}, "server": {}, "clients": {}, "extra": {}}


@pytest.mark.parametrize(
    ("name", "value"),
    [("round", "1"), ("lengths", {"rounds": 0}), ("lengths", {"rounds": 0.5, "clients": 0}), ("clients", {"x": {}}),
     ("server", None), ("extra", [])],
)  # fmt: skip
def test_a_checkpoint_whose_checksum_fits_is_looked_at_all_the_same(tmp_path, name, value):
    folder = RunFolder.create(tmp_path / "run", {"run": {"rounds": 1}}, {})
    checkpoint.save(folder.path / "checkpoints" / "round-000001.safetensors", {**SAVED, name: value})
    with pytest.raises(CheckpointError, match=f"{name}' is missing or invalid"):
        folder.latest()


@pytest.mark.parametrize("entry", [["tensor", "nowhere"], ["raw", "w", "load", [2]], ["float", "zz"], ["tuple", 3]])
def test_a_skeleton_that_cannot_be_put_together_is_damage(tmp_path, monkeypatch, entry):
    tensors, skeleton = {"w": torch.ones(2)}, {"w": entry}
    monkeypatch.setattr(checkpoint, "flatten", lambda state: (tensors, skeleton))
    checkpoint.write(tmp_path / "c.safetensors", {})
    with pytest.raises(CheckpointError, match="cannot be used"):
        checkpoint.load(tmp_path / "c.safetensors")


def test_a_row_without_weights_has_none_to_export(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {"run": {"rounds": 1}}, {})
    (folder.path / "rounds.jsonl").write_text('{"round":1,"ids":[0],"dropped":{}}\n')
    assert list(rows("weights", [tmp_path / "run"])) == []
