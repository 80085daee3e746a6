"""Examples with several inputs over a federation: by name from files, by place from a function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.spec import from_spec
from fedalloy.experiment.recipe import load, parse, resolve
from fedalloy.flower.node.data import local_task
from fedalloy.flower.node.policy import Policy
from fedalloy.flower.protocol.orders import check_task
from fedalloy.flower.review import Review
from fedalloy.tasks.sources.client_data import examples_of, read_client
from tests.flower.fake import federation, play, recipe_file
from tests.flower.test_federation import assert_equal
from tests.flower.two_inputs import CALLED, MODEL, SHAPE, write_share

pytestmark = pytest.mark.flower


def recipe_of(place: Path, shape: Any) -> Path:
    dataset = {"kind": "nodes", "shape": shape, "classes": 3}
    tables: dict[str, Any] = {"task": {"dataset": dataset, "model": MODEL}, "partition": {"clients": 3}}
    recipe = recipe_file(place, algorithm={"lr": 0.1, "batch_size": 4}, **tables)
    recipe.write_text(recipe.read_text().replace('kind = "dirichlet"\n', "").replace("alpha = 0.5\n", ""))
    return recipe


@pytest.mark.parametrize("shape", [SHAPE, [[3], [5]]])
def test_several_inputs_give_what_the_loop_gives(shape, tmp_path):
    recipe, policy = recipe_of(tmp_path, shape), tmp_path / "policy.toml"
    policy.write_text(f"models = {json.dumps([MODEL])}\n")
    grid = federation(tmp_path, **{"fedalloy-policy": str(policy)})
    for client, node in enumerate(grid.nodes.values()):
        write_share(tmp_path / f"data-{client}", client)
        write_share(tmp_path / "all", client)
        node.config["fedalloy-data"] = str(tmp_path / f"data-{client}") if shape == SHAPE else CALLED
    ending = play(recipe, tmp_path / "run", grid)
    tables = load(recipe).model_dump(exclude_none=True) | {"engine": {"kind": "batched"}, "partition": {}}
    tables["task"] |= {"dataset": {"kind": "folder", "path": str(tmp_path / "all")}}
    expected, _ = resolve(parse(tables)).run()
    assert ending.status == "finished"
    for part, leaves in expected.state["shared"].items():
        assert_equal(ending.state["shared"][part], leaves, 1e-5)


def test_a_review_names_the_inputs(tmp_path):
    assert "examples of shape words 5 and numbers 3" in Review.of(load(recipe_of(tmp_path, SHAPE))).text()


@pytest.mark.parametrize("shape", [{"words": [5]}, {"words": [5], "numbers": [4]}, [[5], [3]], [5]])
def test_inputs_of_another_form_are_refused_by_their_node(shape, tmp_path):
    write_share(tmp_path, 0)
    spec = check_task({"shape": shape, "classes": 3, "model": MODEL}, [MODEL])
    with pytest.raises(DataError, match=r"examples have shape \{'words': \(5,\), 'numbers': \(3,\)\}, the recipe's"):
        local_task(str(tmp_path), 0, spec, policy=Policy(models=(MODEL,)))


@pytest.mark.parametrize("shape", [{}, {"words": [0]}, {"words": 5}, [[-1]], {"a": {"b": [2]}}])
def test_shapes_that_are_none_are_refused(shape):
    with pytest.raises(SpecError, match=r"shape"):
        from_spec("dataset", {"kind": "nodes", "shape": shape})


def test_a_tuple_of_arrays_groups_inputs_and_does_not_become_rows():
    pair = ((np.zeros((2, 3)), np.zeros((2, 3))), np.array([0, 1]))
    made = examples_of(read_client(pair, "client 0"), "client 0")[""]
    assert isinstance(made.x, tuple)
    assert [tuple(leaf.shape) for leaf in made.x] == [(2, 3), (2, 3)]
    with pytest.raises(DataError, match=r"x\[1\]: x has shape"):
        examples_of({"": ((np.zeros((2, 3)), np.zeros((3, 3))), np.array([0, 1]))}, "client 0")
