"""A recipe that would not run is refused when it is checked, with the reason; nothing that it names is imported."""

from __future__ import annotations

import sys

import pytest

from fedalloy.core.errors import FedalloyError
from fedalloy.experiment.recipe import load, without_imports
from fedalloy.experiment.recipe.checking import check

FINE = "[partition]\nclients = 4\n[sampling]\ncohort = 2\n[run]\nrounds = 1\n"
FAULTS = {
    "unknown model": ('[task]\nmodel = "logistc"\n', "did you mean 'logistic'"),
    "argument of a model": ('[task]\nmodel = { kind = "mlp", hiden = [3] }\n', "did you mean 'hidden'"),
    "missing folder": ('[task]\ndataset = { kind = "folder", path = "nowhere" }\n', "nowhere"),
    "missing function": ('[task]\ndataset = { kind = "callable", function = "nowhere" }\n', "package.module:function"),
    "cohort": ("[partition]\nclients = 4\n[sampling]\ncohort = 5\n", "number of clients (4), got 5"),
    "listed clients": ('[partition]\nclients = 4\n[sampling]\nkind = "list"\ncohorts = [[0, 4]]\n', "names client 4"),
    "everyone": (FINE + '[algorithm]\nname = "aaggff_s"\n', "needs every client"),
    "too few": (FINE + '[weighting]\nkind = "krum"\nbyzantine = 1\n', "Krum"),
    "devices": ("[partition]\nclients = 4\n[devices]\nepochs = [1, 2]\n", "one per client"),
    "metric": ('[evaluate]\nmetrics = ["acuracy"]\n', "accuracy"),
    "partition": ('[partition]\nkind = "dirichlett"\nclients = 2\n', "did you mean 'dirichlet'"),
    "validation": ('[partition]\nclients = 2\n[algorithm]\nname = "fedboosting"\n', "valid_fraction"),
    "roles": ('[partition]\nclients = 2\n[algorithm]\nname = "fedcvae"\n', "generative model"),
    "table": ('[partition]\nclients = 2\n[weighting]\nkind = "unfolded"\ntable = "nowhere.json"\n', "nowhere.json"),
    "samples": ('[task]\nsynthetic = "nowhere.npz"\n[partition]\nclients = 2\n', "nowhere.npz"),
    "engine": ('[engine]\nkind = "loop"\nspeed = 3\n', "speed"),
    "grid": ('[run]\ntuning_seeds = [9]\n[[compare]]\nname = "fedprox"\ngrid = { "algorithm.mu" = ["x"] }\n', "mu"),
    "nodes": ('[task]\nmodel = "cnn"\ndataset = { kind = "nodes", shape = [4], clients = ["a"] }\n', "at least 16"),
    "entry": ('[partition]\nclients = 4\n[[compare]]\nname = "a"\nset = { "sampling.cohort" = 9 }\n', "(4), got 9"),
}  # fmt: skip


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """What could not be checked of a recipe in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def checked(text: str) -> list[str]:
        (tmp_path / "r.toml").write_text(text)
        with without_imports():
            return check(load(tmp_path / "r.toml"))

    return checked


def test_a_recipe_that_is_fine_is_found_fine(checked):
    assert checked(FINE) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_recipe_that_would_not_run_is_refused(fault, checked):
    text, reason = FAULTS[fault]
    with pytest.raises(FedalloyError) as caught:
        checked(text)
    assert reason in str(caught.value)


def test_what_needs_the_recipes_own_code_is_said_to_be_unchecked(checked):
    found = checked(
        'imports = ["nowhere_at_all"]\n[task]\nmodel = "nowhere_at_all:net"\n[partition]\nclients = 2\n'
        '[weighting]\nkind = "of_my_own"\n'
    )
    assert len(found) == 3
    assert all("nowhere_at_all" in one or "of_my_own" in one for one in found)
    assert "nowhere_at_all" not in sys.modules


def test_what_does_not_need_it_is_checked_all_the_same(checked):
    with pytest.raises(FedalloyError, match="got 3"):
        checked('[task]\nmodel = "nowhere_at_all:net"\n[partition]\nclients = 2\n[sampling]\ncohort = 3\n')
    with pytest.raises(FedalloyError, match="got 3"):
        checked(
            '[task]\ndataset = { kind = "callable", function = "nowhere_at_all:data" }\n'
            "[partition]\nclients = 2\n[sampling]\ncohort = 3\n"
        )
