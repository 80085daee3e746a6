"""Runs that an earlier version began are continued without a refusal, and reach what it would have reached."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts.old_runs import METHODS, continue_comparison, continue_run, reached, runs_in

OLD = Path(__file__).with_name("old_runs")
EXPECTED = json.loads((OLD / "expected.json").read_text(encoding="utf-8"))
WITHIN = 1e-6
"""Another machine may add up in another order."""


def differences(found: Any, expected: Any, where: str = "") -> list[str]:
    """Every place where two JSON values differ by more than rounding."""
    if isinstance(found, dict) and isinstance(expected, dict):
        gone = [f"{where}.{name}: in one only" for name in sorted(found.keys() ^ expected.keys())]
        return gone + [line for name in expected if name in found
                       for line in differences(found[name], expected[name], f"{where}.{name}")]  # fmt: skip
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for place, (one, other) in pairs for line in differences(one, other, f"{where}.{place}")]
    if isinstance(found, float) and isinstance(expected, float):
        near = math.isclose(found, expected, rel_tol=WITHIN, abs_tol=WITHIN)
        return [] if near else [f"{where}: {found} instead of {expected}"]
    return [] if found == expected else [f"{where}: {found!r} instead of {expected!r}"]


@pytest.mark.parametrize("name", METHODS)
def test_an_interrupted_run_of_an_earlier_version_is_continued(tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(OLD / name, folder)
    assert json.loads((folder / "status.json").read_text())["state"] == "stopped"
    continue_run(folder)
    found = reached(folder)
    assert found["state"] == "finished"
    assert differences(found["rounds"], EXPECTED[name]["rounds"]) == []


def test_an_interrupted_comparison_of_an_earlier_version_is_continued(tmp_path):
    folder = tmp_path / "comparison"
    shutil.copytree(OLD / "comparison", folder)
    before = (folder / "fedavg" / "seed-7" / "timings.jsonl").read_bytes()
    continue_comparison(folder)
    assert (folder / "fedavg" / "seed-7" / "timings.jsonl").read_bytes() == before, "a finished run is made again"
    found = {str(run.relative_to(tmp_path)): reached(run)["rounds"] for run in runs_in(folder)}
    expected = {name: one["rounds"] for name, one in EXPECTED.items() if name.startswith("comparison/")}
    assert sorted(found) == ["comparison/fedavg/seed-7", "comparison/scaffold/seed-7"]
    assert differences(found, expected) == []


def test_a_difference_is_found():
    row = EXPECTED["fedavg"]["rounds"][-1]
    assert differences(row, row) == []
    assert differences(row, {**row, "round": 9}) == [".round: 4 instead of 9"]
    assert differences({"a": [1.0, 2.0]}, {"a": [1.0, 2.1]}) == [".a.1: 2.0 instead of 2.1"]
    assert differences({"a": 1}, {"b": 1}) == [".a: in one only", ".b: in one only"]
