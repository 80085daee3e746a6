"""Adapters of a PEFT model over a federation: what is sent, what it gives, and another base is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")
pytest.importorskip("transformers", reason="needs the extra 'huggingface'")
pytest.importorskip("peft", reason="needs the extra 'huggingface'")

from examples.adapters import model
from fedalloy.core.errors import FedalloyError
from fedalloy.experiment.recipe import parse, resolve
from fedalloy.experiment.records import toml
from fedalloy.flower.node import data as node_data
from tests.flower.fake import FakeGrid, federation, play
from tests.flower.test_federation import assert_equal

pytestmark = [pytest.mark.flower, pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")]


def nodes_of(place: Path) -> FakeGrid:
    policy = place / "policy.toml"
    policy.write_text(f"models = {json.dumps([model.MODEL])}\n")
    grid = federation(place, ("0", "1"), **{"fedalloy-policy": str(policy)})
    for client, node in enumerate(grid.nodes.values()):
        model.write_share(place / f"data-{client}", client)
        node.config["fedalloy-data"] = str(place / f"data-{client}")
    return grid


def recipe_of(place: Path, method: str) -> Path:
    file = place / "recipe.toml"
    file.write_text(toml.dumps(model.on_nodes(method)))
    return file


@pytest.mark.parametrize("method", ["scaffold", "superfed_mm"])
def test_adapters_on_nodes_are_those_of_a_simulation_with_dropout(method, tmp_path):
    ending = play(recipe_of(tmp_path, method), tmp_path / "run", nodes_of(tmp_path))
    expected, _ = resolve(parse(model.simulated(method, tmp_path / "all"))).run()
    assert ending.status == "finished"
    assert all("lora_" in name or "modules_to_save" in name for name in ending.state["shared"]["params"])
    for part, leaves in expected.state["shared"].items():
        assert_equal(ending.state["shared"][part], leaves, 1e-6)


def test_a_node_with_another_base_is_refused_by_name(tmp_path, monkeypatch):
    make: Any = vars(node_data)["make_objective"]

    def other(*given: Any, **more: Any) -> Any:
        objective = make(*given, **more)
        name = next(iter(objective.frozen))
        objective._model.frozen[name] = objective.frozen[name] + torch.ones(())
        return objective

    monkeypatch.setattr(node_data, "make_objective", other)
    with pytest.raises(FedalloyError, match="the model of '0' has other frozen leaves than the server's"):
        play(recipe_of(tmp_path, "fedavg"), tmp_path / "run", nodes_of(tmp_path))
