"""The experiments and recipes that come with fedalloy: every one parses, resolves, and fits its data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fedalloy.core.errors import SpecError
from fedalloy.core.spec import from_spec
from fedalloy.experiment.recipe import Recipe, entry_names, load, resolve
from fedalloy.studies.reproduce.declaring import (
    Claim,
    claims_file,
    experiment_names,
    load_experiment,
    methods_of,
    recipe_of,
    recipes_folder,
)
from tests.tasks.real_data import use_real_data

ROOT = Path(__file__).resolve().parents[3]
RECIPES = sorted(
    path.relative_to(ROOT / "recipes").as_posix()
    for path in (ROOT / "recipes").rglob("*.toml")
    if path.parent.name != "claims"
)
FOLDERS = {"s1", "s2", "s3", "s4-ch2", "s4-ch3"}


def _entries(recipe: Recipe) -> list[str | None]:
    return list(entry_names(recipe)) or [None]


def test_every_paper_has_its_folder():
    assert {Path(path).parent.name for path in RECIPES} >= FOLDERS
    assert recipes_folder() == ROOT / "recipes"


@pytest.mark.parametrize("path", [path for path in RECIPES if Path(path).parent.name in FOLDERS - {"s4-ch2"}])
def test_data_partition_and_model_fit(path, monkeypatch):
    """Assembled once per recipe (all its entries share the task); needs the real data where it has some."""
    recipe = load(ROOT / "recipes" / path)
    table = recipe.task.dataset
    loader = from_spec("dataset", table, "dataset")
    if loader.files:
        use_real_data(type(loader), monkeypatch)
    task = resolve(recipe).task()
    assert task.population >= 3
    block = task.data("train", _first())
    params, buffers = task.objective.init(_key())
    assert len(task.objective.outputs(params, buffers, block.x[:2])) == 2


@pytest.mark.parametrize("name", experiment_names())
def test_claims_and_published_numbers_are_about_methods_that_are_run(name):
    experiment = load_experiment(name)
    known = {case.name: methods_of(recipe_of(experiment, case)) for case in experiment.cases}
    assert experiment.claims
    if not experiment.cases:
        assert experiment.command, "nobody would know how to measure it"
        return
    for claim in experiment.claims:
        for case in claim.cases:
            assert {claim.method, *claim.others, *claim.controls} <= set(known[case]), (claim.text, case)
    for case, rows in experiment.published.cases.items():
        assert set(rows) <= set(known[case]), case


@pytest.mark.parametrize("name", experiment_names())
def test_every_case_of_an_experiment_resolves(name):
    experiment = load_experiment(name)
    for case in experiment.cases:
        recipe = recipe_of(experiment, case)
        for entry in _entries(recipe):
            made = resolve(recipe, entry=entry)
            assert made.config.rounds == made.resolved["run"]["rounds"], (case.name, entry)
            assert made.config.target_metric in made.config.metrics, (case.name, entry)
        if recipe.partition.kind:
            made = from_spec(
                "partition", _plain({"kind": recipe.partition.kind, **recipe.partition.arguments}), "partition"
            )
            assert made is not None, case.name
        assert from_spec("dataset", recipe.task.dataset, "dataset") is not None, case.name


@pytest.mark.parametrize("name", experiment_names())
def test_every_claim_has_a_published_length_or_says_that_there_is_none(name):
    """Nothing is left to a default: whoever declares an experiment has looked at the paper."""
    experiment = load_experiment(name)
    assert experiment.paper
    for case in {case for claim in experiment.claims for case in claim.cases}:
        told = experiment.protocol.model_dump(exclude_none=True) | (
            experiment.protocol.cases[case].model_dump(exclude_none=True) if case in experiment.protocol.cases else {}
        )
        assert {"rounds", "clients", "cohort"} <= set(told), case


@pytest.mark.parametrize("name", experiment_names())
def test_comparators_are_rows_of_the_published_table_and_controls_are_not(name):
    """Where a table is published, a claim names methods of it alone, and one about the best of all names all others."""
    experiment = load_experiment(name)
    for claim in experiment.claims:
        for case in claim.cases:
            rows = set(experiment.published.cases.get(case, {}))
            if rows:
                assert set(claim.others) <= rows, (claim.text, case)
                assert not set(claim.controls) & rows, (claim.text, case)
            superlative = re.search(r"\b(most|highest|lowest|smallest|best)\b", claim.text)
            if rows and superlative and claim.others:
                own_code = {
                    row for row in rows if row.endswith("_code")
                }  # the same row of the table, in its code's form
                assert set(claim.others) == rows - own_code - {claim.method}, (claim.text, case)


def test_comparators_of_figures():
    """They have no rows, so the methods that the figures show are written down here."""
    shown = {
        "s0-mnist": {"fedavg", "drfedavg"},
        "s4-ch3-cdfs": {"weibull", "frechet", "gumbel", "exponential", "logistic"},
    }
    for name, methods in shown.items():
        found = [set(claim.others) for claim in load_experiment(name).claims if claim.others]
        assert found
        assert all(others == methods for others in found), name


@pytest.mark.parametrize("name", experiment_names())
def test_recipes_are_as_long_as_the_paper(name):
    experiment = load_experiment(name)
    for case in experiment.cases:
        stated, recipe = experiment.protocol.of(case.name), recipe_of(experiment, case)
        assert stated.rounds in ("not stated", recipe.run.rounds), case.name
        if isinstance(recipe.sampling.cohort, int):
            assert stated.cohort == recipe.sampling.cohort, case.name
        if "clients" in recipe.partition.arguments:
            assert stated.clients == recipe.partition.arguments["clients"], case.name


def test_the_stated_settings_of_the_papers():
    """A few that a typing error would change in silence."""
    one = load_experiment("s1-rounds-to-95")
    deals = {case.name: recipe_of(one, case).partition.arguments for case in one.cases}
    assert deals["5+5, 1 class"] == {"iid": 5, "non_iid": 5, "classes": 1, "samples": 600}
    assert deals["2+8, 2 classes"] == {"iid": 2, "non_iid": 8, "classes": 2, "samples": 600}
    steps = load(ROOT / "recipes" / "s3" / "steps.toml")
    found: list[Any] = [resolve(steps, entry=name).algorithm.solver for name in entry_names(steps)]
    assert [(solver.lr, solver.epochs) for solver in found] == [
        *((lr, 20) for lr in (0.01, 0.001, 0.0001)),
        *((lr, 5) for lr in (0.01, 0.001, 0.0001)),
        (0.0001, 20),
    ]
    berka: Any = resolve(load(ROOT / "recipes" / "s4-ch3" / "berka.toml"), entry="aaggff_s").algorithm
    local = berka.solver
    assert (local.lr, local.weight_decay, local.decay, local.decay_every, local.batch_size) == (1.0, 1e-3, 0.99, 10, 20)
    assert berka.weighting.cdf == "normal"


def test_nobody_finds_an_unknown_experiment():
    with pytest.raises(SpecError, match="did you mean 's3-synthetic'"):
        claims_file("s3-sinthetic")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"others": []}, "give one of 'others', 'than' or 'value'"),
        ({"value": 1.0}, "give one of 'others', 'than' or 'value'"),
        ({"cases": ["nowhere"]}, "has no case 'nowhere'"),
        ({"relation": "near", "others": [], "value": 3.0}, "'near' needs a margin"),
        ({"margin": 3.0}, "'near' needs a margin, and no other relation has one"),
        ({"relation": "bounded"}, "needs the score of the bound in 'than'"),
        ({"controls": ["b"]}, "b is on both sides"),
        ({"controls": ["m"]}, "m is on both sides"),
        ({"length_tolerance": 1.0}, "length_tolerance"),
        ({"relation": "fails"}, "about the method alone"),
        ({"relation": "over"}, "relation"),
    ],
)
def test_a_claim_that_nothing_could_decide_is_told(tmp_path, change, said):
    claim = {"text": "t", "cases": ["a"], "method": "m", "score": "mean", "relation": "above", "others": ["b"]} | change
    lines = "\n".join(f"{key} = {value!r}".replace("'", '"') for key, value in claim.items())
    file = tmp_path / "mine.toml"
    file.write_text(f'title = "t"\nsource = "s"\n[[cases]]\nname = "a"\nrecipe = "demo.toml"\n[[claims]]\n{lines}\n')
    with pytest.raises(SpecError, match=said):
        load_experiment(str(file))


def test_a_claim_knows_no_other_keys():
    with pytest.raises(ValueError, match="Extra inputs"):
        Claim.model_validate({"text": "t", "cases": ["a"], "method": "m", "score": "s", "relation": "fails", "q": 1})


def _plain(table: dict[str, Any]) -> dict[str, Any]:
    """Rules inside a rule as rules."""
    return {
        name: from_spec("partition", value, name) if isinstance(value, dict) else value for name, value in table.items()
    }


def _first() -> Any:
    import torch

    return torch.tensor([0])


def _key() -> Any:
    from fedalloy.core.keys import Key

    return Key.of(0)
