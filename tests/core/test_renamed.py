"""Rules that still use names of the last version: they are told, never ignored."""

from __future__ import annotations

import tomllib

import pytest
from torch import nn

import fedalloy
from fedalloy import read_run
from fedalloy.core import registry
from fedalloy.core.aspects import ASPECTS
from fedalloy.core.errors import RegistryError
from fedalloy.core.objective import Objective
from fedalloy.core.protocols import ServerOptimizer
from fedalloy.core.renamed import DATASET, MODEL, OBJECTIVE, SERVER, SOLVER, TASK
from fedalloy.core.solver import LocalSolver
from fedalloy.core.task import Task
from fedalloy.experiment.recipe import parse, resolve
from fedalloy.methods.weightings.nova import Nova
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.tasks.datasets.base import DatasetLoader, defaults_of
from fedalloy.tasks.objective import ModuleObjective

MEMBERS = {LocalSolver: SOLVER, ServerOptimizer: SERVER, DatasetLoader: DATASET, Objective: OBJECTIVE, Task: TASK}


@pytest.mark.parametrize(
    ("base", "old"), [(base, old) for base, names in MEMBERS.items() for old in names], ids=lambda one: str(one)
)
def test_an_old_member_is_refused(base, old):
    with pytest.raises(TypeError, match=f"Mine defines '{old}', which is called '{MEMBERS[base][old]}' now"):
        type("Mine", (base,), {old: None})


@pytest.mark.parametrize(("base", "new"), [(base, new) for base, names in MEMBERS.items() for new in names.values()])
def test_the_new_member_is_what_the_base_class_has(base, new):
    assert any(new in vars(kind) for kind in (*base.__mro__, *(ASPECTS if base is LocalSolver else ())))


@pytest.mark.parametrize(("base", "old"), [(base, old) for base, names in MEMBERS.items() for old in names])
@pytest.mark.parametrize("annotated", [False, True])
def test_an_old_member_that_is_inherited_or_only_annotated_is_refused(base, old, annotated):
    mixin = type("Mixin", (), {"__annotations__": {old: int}} if annotated else {old: None})
    with pytest.raises(TypeError, match=f"Mine defines '{old}'"):
        type("Mine", (mixin, base), {})


def test_an_old_attribute_of_an_object_is_refused():
    task = fedalloy.task("digits", clients=2)
    object.__setattr__(task, "facts", None)
    with pytest.raises(TypeError, match="FederatedTask defines 'facts'"):
        fedalloy.fit("fedavg", task, rounds=1)

    class Duck:
        usual = None

    with pytest.raises(TypeError, match="Duck defines 'usual'"):
        defaults_of(Duck())


class Old(nn.Linear):
    roles = frozenset({"classify"})


def test_a_model_with_an_old_member_is_refused():
    with pytest.raises(TypeError, match=f"Old defines 'roles', which is called '{MODEL['roles']}' now"):
        ModuleObjective(lambda: Old(2, 2))


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("fedalloy.core.types", "Facts", "DataSpec"),
        ("fedalloy.results.summaries", "Story", "RunSummary"),
        ("fedalloy.core.aspects", "FitsData", "BindsToData"),
        ("fedalloy.core.wrappers", "SolverAround", "SolverWrapper"),
        ("fedalloy.core.task", "TaskAround", "TaskWrapper"),
        ("fedalloy.tasks.datasets.base", "Usual", "DatasetDefaults"),
        ("fedalloy.tasks.models.capabilities", "Versatile", "CapabilityModule"),
        ("fedalloy.experiment.unseen", "evaluate_newcomers", "evaluate_unseen"),
    ],
)
def test_an_old_name_works_and_says_the_new_one(module, old, new):
    found = registry.load(module)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        assert getattr(found, old) is getattr(found, new)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        found.Nothing  # noqa: B018


ALIASES = {
    "drfedavg": "dr", "fedadp": "angles", "fedboosting": "boosting", "fedevg": "energies", "fedfa": "information",
    "fedlayerwise": "angles", "fednova": "nova",
}  # fmt: skip


@pytest.mark.parametrize("alias", ALIASES)
def test_an_alias_finds_the_rule_under_its_name(alias):
    name = ALIASES[alias]
    assert registry.find("weighting", alias) is registry.find("weighting", name)
    assert registry.canonical("weighting", alias) == name
    assert alias in registry.aliases_of("weighting", name)
    assert alias not in registry.names("weighting")
    assert registry.knows("weighting", alias)


@pytest.mark.parametrize(
    ("category", "aliases", "message"),
    [
        ("weighting", ("fednova",), "'fednova' is a name of 'nova' already"),
        ("weighting", ("mine",), "'mine' is a name of 'mine' already"),
        ("weighting", "abc", "aliases are a list of names"),
        ("metric", ("other",), "only rules of solver, weighting, server, wire"),
    ],
)
def test_an_alias_that_cannot_be_is_refused_and_leaves_nothing(category, aliases, message):
    registry.names("weighting")
    direction = {"higher_is_better": None} if category == "metric" else {}
    with pytest.raises(RegistryError, match=message):
        registry.register(category, "mine", aliases=aliases, **direction)
    assert not registry.knows(category, "mine")


def test_a_rule_goes_before_an_alias_of_its_name(monkeypatch):
    """A plug-in may have had the name before it became an alias."""
    registry.names("weighting")
    monkeypatch.setitem(registry._rules["weighting"], "fednova", Uniform)
    assert registry.find("weighting", "fednova") is Uniform
    assert registry.aliases_of("weighting", "nova") == []
    assert registry.find("weighting", "nova") is Nova


def test_a_misspelt_alias_is_recognised():
    with pytest.raises(RegistryError, match="did you mean 'fednova'"):
        registry.find("weighting", "fednov")


RECIPE = """
[partition]
kind = "iid"
clients = 3

[solver]
kind = "sgd"

[weighting]
kind = "KIND"

[server]
kind = "sgd"

[run]
rounds = ROUNDS
"""


def test_a_run_is_resumed_by_the_other_name_of_its_rule(tmp_path):
    """Recipes are compared by what they mean: a name and its alias are one."""

    def run(kind: str, rounds: int, folder: str, resume: bool = False) -> list[float]:
        recipe = parse(tomllib.loads(RECIPE.replace("KIND", kind).replace("ROUNDS", str(rounds))))
        resolve(recipe).run(tmp_path / folder, resume=resume)
        assert 'kind = "information"' in (tmp_path / folder / "recipe.toml").read_text()
        return [row["train_loss"] for row in read_run(tmp_path / folder).rounds()]

    run("information", 1, "resumed")
    assert run("fedfa", 2, "resumed", resume=True) == run("information", 2, "whole")
