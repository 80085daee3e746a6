"""The GPU benchmark of EWWA-FL: its settings are those of the recipe, it stops in time, and it goes on from there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import s2_gpu
from fedalloy.core.keys import Key
from fedalloy.core.spec import algorithm_to_spec
from fedalloy.core.types import Examples
from fedalloy.experiment.recipe import load, resolve
from fedalloy.studies.reproduce.results import read_results
from fedalloy.tasks.datasets.base import Dataset

ROOT = Path(__file__).resolve().parents[3]


def small() -> Dataset:
    """Images small enough for a test, with a test set of their own."""
    x, y = Key.of(3).uniform(60, 1, 8, 8, dtype=torch.float32), torch.arange(60) % 10
    return Dataset(x, y, 10, test=Examples(x[:20], y[:20]))


@pytest.mark.parametrize("name", list(s2_gpu.methods()))
def test_the_settings_are_those_of_the_recipe(name):
    recipe = load(ROOT / "recipes" / "s2" / "mnist-lenet.toml")
    assert algorithm_to_spec(s2_gpu.methods()[name]) == algorithm_to_spec(resolve(recipe, entry=name).algorithm)
    assert recipe.partition.arguments == {"per_client": 2}


def test_methods_take_turns_and_the_same_command_goes_on(tmp_path):
    command = ["--out", str(tmp_path), "--device", "cpu", "--every", "1", "--turn", "1", "--rounds", "2"]
    command += ["--methods", "fedavg,fedcams"]
    assert s2_gpu.main([*command, "--minutes", "0"], small()) == {}
    curves = s2_gpu.main([*command, "--minutes", "60"], small())
    assert {name: told["rounds"] for name, told in curves.items()} == {
        "fedavg, seed 0": [1, 2],
        "fedcams, seed 0": [1, 2],
    }
    again = s2_gpu.main([*command, "--minutes", "60"], small())
    assert again == curves == json.loads((tmp_path / "curves.json").read_text())
    found = read_results(tmp_path / "s2-mnist.json")
    assert [(run.method, run.state, run.round) for run in found.runs] == [
        ("fedavg", "finished", 2),
        ("fedcams", "finished", 2),
    ]
    assert set(found.runs[0].scores) == {"best_global", "global"}


def test_it_needs_no_more_than_torch_numpy_and_safetensors():
    from tests.test_bare_install import bare

    done = bare("import sys\nsys.path.insert(0, '.')\nimport benchmarks.s2_gpu as s\nprint(sorted(s.methods()))")
    assert done.returncode == 0, done.stderr
    assert "ewwa_adam" in done.stdout
