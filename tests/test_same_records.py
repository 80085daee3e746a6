"""Records of two versions of the source: what counts as the same, and what a short run leaves to compare."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest

from scripts import same_records
from scripts.same_records import compare, differences, run_case

SOURCE = Path(__file__).resolve().parents[1] / "src"
ROW = {"weights": [0.25, 0.75], "loss": 2.0, "info": None}
CASE = {"rounds.jsonl": [ROW], "state": {"w": "ab"}}


def test_equal_records_are_the_same_and_nothing_known_twice_too():
    row = {"loss": float("nan"), "ids": [0, 1]}
    assert not list(differences(row, copy.deepcopy(row)))
    assert compare({"fedavg": CASE}, {"fedavg": copy.deepcopy(CASE), "another": {}}) == []


@pytest.mark.parametrize("change", [{"loss": 2.0 + 1e-15}, {"weights": [0.25]}, {"info": 0.0}, {"more": 1}])
def test_the_last_bit_counts(change):
    other = {**CASE, "rounds.jsonl": [{**ROW, **change}]}
    assert compare({"fedavg": CASE}, {"fedavg": other}) == ["fedavg"]


def test_a_case_that_is_missing_differs():
    assert compare({"fedavg": CASE}, {}) == ["fedavg"]


@pytest.mark.parametrize(("size", "bad"), [(1e-13, []), (1e-11, ["fedadp"])])
def test_of_methods_that_read_noted_norms_the_records_are_near_and_the_state_is_not_compared(size, bad):
    other = {"rounds.jsonl": [{**ROW, "loss": 2.0 + 2 * size}], "state": {"w": "cd"}}
    assert compare({"fedadp": CASE}, {"fedadp": other}) == bad


def test_a_difference_is_named_by_its_place():
    assert dict(differences({"a": [1.0, 4.0]}, {"a": [1.0, 5.0]})) == {"/a/1": 0.25}


def test_a_case_leaves_rows_and_hashes_of_the_last_state(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(same_records, "_BASE", [*same_records._BASE, "run.rounds=1"])
    found = run_case(tmp_path, "ewwa")
    assert [row["ids"] for row in found["rounds.jsonl"]] == [list(range(8))]
    assert {name for name in found["state"] if name.startswith("server/shared/params/hidden1")} != set()
    assert all(len(digest) == 64 for digest in found["state"].values())
