"""The whole federation in one process: every algorithm gives what the loop gives, and every fault is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from fedalloy.recipe import load, parse, resolve
from fedalloy.records.reading import read_run
from tests.flower.fake import federation, play, recipe_file

pytestmark = pytest.mark.flower
ALGORITHMS = ["fedavg", "scaffold", "superfed_lm", "aaggff_s", "fedlayerwise", "fedboosting", "ditto"]


def simulated(recipe: Path):
    """The same recipe by the loop engine."""
    tables = load(recipe).model_dump(exclude_none=True) | {"engine": {"kind": "loop"}}
    return resolve(parse(tables)).run()


def assert_equal(one, other, tolerance=1e-5):
    assert one.keys() == other.keys()
    for name, leaf in one.items():
        assert torch.allclose(leaf, other[name], atol=tolerance), name


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nodes_give_what_the_loop_gives(algorithm, tmp_path):
    recipe = recipe_file(tmp_path, algorithm)
    ending = play(recipe, tmp_path / "run", federation(tmp_path))
    expected, recorder = simulated(recipe)
    assert ending.status == "finished"
    for part, leaves in expected.state["shared"].items():
        assert_equal(ending.state["shared"][part], leaves)
    rows, wanted = list(read_run(tmp_path / "run").rounds()), recorder.streams["rounds"]
    assert [row["ids"] for row in rows] == [row["ids"] for row in wanted]
    assert rows[-1]["evaluation"]["accuracy"]["mean"] == pytest.approx(wanted[-1]["evaluation"]["accuracy"]["mean"])
