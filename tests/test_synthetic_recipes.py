"""The recipes with synthetic data: every cell of the published table, with models of the published sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedalloy.experiment.recipe import entry_names, load, resolve
from fedalloy.tasks.assembly import as_factory

FOLDER = Path(__file__).resolve().parents[1] / "recipes" / "s4-ch4"
METHODS = ["fedevg", "fedcgan", "fedcvae"]
SIZES = {
    "mnist": ((1, 32, 32), (4_979_914, 2_931_083, 1_850_881)),
    "cifar10": ((3, 32, 32), (4_981_066, 2_935_179, 1_854_979)),
}


def size(model: Any, shape: tuple[int, ...]) -> int:
    return sum(leaf.numel() for leaf in as_factory(model, shape, 10, (0.0, 1.0))().parameters())


@pytest.mark.parametrize("data", SIZES)
@pytest.mark.parametrize("clients", [10, 100])
@pytest.mark.parametrize("alpha", ["0.01", "1.00"])
def test_every_cell_of_the_published_table(data, clients, alpha):
    recipe = load(FOLDER / f"{data}-k{clients}-a{alpha}.toml")
    assert entry_names(recipe) == METHODS
    assert (recipe.partition.clients, recipe.partition.arguments) == (clients, {"alpha": float(alpha)})
    assert (recipe.sampling.cohort or 1.0) * clients == 10 if clients == 100 else recipe.sampling.cohort is None
    assert recipe.task.classifier == "resnet10"
    for method in METHODS:
        found = resolve(recipe, entry=method)
        local: Any = found.algorithm.solver
        assert (local.lr, local.betas, local.weight_decay, local.batch_size) == (1e-3, (0.5, 0.999), 1e-4, 64)
        assert (local.optimizer, local.epochs, local.decay, local.decay_every) == ("adam", 1, 0.9, 50)
        assert found.config.rounds == 500
        assert found.config.classifier.per_class == 10
    shape, expected = SIZES[data]
    models = [resolve(recipe, entry=method).resolved["task"]["model"] for method in METHODS]
    assert tuple(size(model, shape) for model in models) == expected


@pytest.mark.parametrize("name", ["heart", "pneumoniamnist-k10-a1.00"])
def test_the_stand_ins_have_all_three_methods(name):
    recipe = load(FOLDER / f"{name}.toml")
    assert entry_names(recipe) == METHODS
    assert all(resolve(recipe, entry=method).config.classifier.epochs == 200 for method in METHODS)
