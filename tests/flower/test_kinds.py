"""Several targets per example, losses with arguments, augmentation and local optimizers over a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from fedalloy.core.errors import DataError, SpecError
from fedalloy.experiment.recipe import load, parse, resolve
from fedalloy.experiment.recorder import MemoryRecorder
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.node.data import local_task
from fedalloy.flower.protocol.orders import TaskSpec
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.objective import ModuleObjective
from tests.flower.fake import federation, play, recipe_file

pytestmark = pytest.mark.flower
KINDS: dict[str, dict[str, Any]] = {
    "regression": {"loss": {"kind": "huber", "delta": 0.5}, "augment": {"noise": 0.1}},
    "multilabel": {"loss": "binary", "unit": "targets"},
}


def write(folder: Path, client: int, kind: str) -> None:
    draw = np.random.default_rng(client)
    x = draw.normal(size=(30 + 5 * client, 4)).astype(np.float32)
    y = (x @ np.random.default_rng(9).normal(size=(4, 3))).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{client}.npz", x=x, y=y if kind == "regression" else (y > 0).astype(np.float32))


def recipe_of(place: Path, kind: str) -> Path:
    dataset = {"kind": "nodes", "shape": [4], "classes": 0, "targets": [3], "real": True}
    task = {"dataset": dataset, "model": {"kind": "mlp", "hidden": [8]}, "kind": kind, **KINDS[kind]}
    how = {"optimizer": "adamw", "lr": 0.05, "batch_size": 8, "clip_norm": 0.5, "accumulate": 2,
           "schedule": {"kind": "cosine", "over": "steps"}}  # fmt: skip
    recipe = recipe_file(place, task=task, partition={"clients": 3}, algorithm=how)
    recipe.write_text(recipe.read_text().replace('kind = "dirichlet"\n', "").replace("alpha = 0.5\n", ""))
    return recipe


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_give_what_the_loop_gives(kind, tmp_path):
    recipe, grid = recipe_of(tmp_path, kind), federation(tmp_path)
    for client, node in enumerate(grid.nodes.values()):
        write(tmp_path / f"data-{client}", client, kind)
        write(tmp_path / "all", client, kind)
        node.config["fedalloy-data"] = str(tmp_path / f"data-{client}")
    ending = play(recipe, tmp_path / "run", grid)
    tables = load(recipe).model_dump(exclude_none=True) | {"engine": {"kind": "loop"}, "partition": {}}
    tables["task"]["dataset"] = {"kind": "folder", "path": str(tmp_path / "all")}
    expected, recorder = resolve(parse(tables)).run()
    for name, leaf in expected.state["shared"]["params"].items():
        assert torch.allclose(ending.state["shared"]["params"][name], leaf, atol=1e-6), name
    assert isinstance(recorder, MemoryRecorder)
    row, wanted = list(read_run(tmp_path / "run").rounds())[-1], list(recorder.streams["rounds"])[-1]
    assert row["num_steps"] == wanted["num_steps"]
    assert row["weights"] == pytest.approx(wanted["weights"])
    first = "mae" if kind == "regression" else "f1_macro"
    assert row["evaluation"][first]["mean"] == pytest.approx(wanted["evaluation"][first]["mean"], abs=1e-6)
    means = ("mae", "loss") if kind == "regression" else ("loss",)  # the others need all scores at one place
    assert row["global"] == pytest.approx({name: wanted["global"][name] for name in means}, abs=1e-6)


def test_a_score_of_all_examples_together_cannot_be_waited_for(tmp_path):
    recipe = recipe_file(tmp_path, run={"target_on": "global", "target": 0.9})
    with pytest.raises(SpecError, match="no global test set"):
        play(recipe, tmp_path / "run", federation(tmp_path))


@pytest.mark.parametrize(
    ("targets", "real", "said"),
    [([2], True, r"targets have shape \(3,\), the recipe's \(2,\)"), ([3], False, "labels are torch.float32")],
)
def test_targets_of_another_form_are_refused_by_their_node(targets, real, said, tmp_path):
    write(tmp_path, 0, "regression")
    spec = {"shape": [4], "classes": 0 if real else 5, "targets": targets, "real": real, "kind": "regression"}
    with pytest.raises(DataError, match=said):
        local_task(str(tmp_path), 0, TaskSpec.model_validate({**spec, "model": "mlp"}))


@pytest.mark.parametrize("loss", [None, "cross_entropy", {"kind": "cross_entropy", "label_smoothing": 0.1}])
def test_a_node_ignores_what_the_data_say_does_not_count(loss, tmp_path):
    """As the simulation does: with a class that does not count, nothing would fail if it counted after all."""
    x, y = np.zeros((6, 4), dtype=np.float32), np.arange(12).reshape(6, 2) % 3
    np.savez(tmp_path / "0.npz", x=x, y=y)
    given: dict[str, Any] = {} if loss is None else {"loss": loss}
    form = {"targets": [2], "kind": "tokens", "ignore_index": 0}
    spec = TaskSpec.model_validate({"shape": [4], "classes": 3, "model": "mlp", **form, **given})
    mine = local_task(str(tmp_path), 0, spec)
    assert isinstance(mine.objective, ModuleObjective)
    counts = mine.objective.counts(torch.tensor([[0, 1], [2, 1]]))
    assert counts is not None
    assert counts.tolist() == [1, 2]
    alike = make_task(
        Dataset(torch.zeros(6, 4), torch.from_numpy(y), 3, ignore_index=0), "mlp", None, 2, kind="tokens", **given
    )
    assert mine.objective.loss_rule == alike.objective.loss_rule


def test_a_node_that_hides_its_size_leaves_no_score_of_all(tmp_path):
    recipe, policy = recipe_of(tmp_path, "regression"), tmp_path / "policy.toml"
    policy.write_text('forbid = ["test_size"]\n')
    grid = federation(tmp_path)
    for client, node in enumerate(grid.nodes.values()):
        write(tmp_path / f"data-{client}", client, "regression")
        node.config["fedalloy-data"] = str(tmp_path / f"data-{client}")
    node.config["fedalloy-policy"] = str(policy)
    play(recipe, tmp_path / "run", grid)
    row = list(read_run(tmp_path / "run").rounds())[-1]
    assert row["global"] == {}
    assert row["evaluation"]["mae"]["skipped"] == 0
