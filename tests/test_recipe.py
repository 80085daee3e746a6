"""Recipes: what they say is what runs, and what they cannot say is told with the field and the nearest spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.errors import FedalloyError, SpecError
from fedalloy.core.spec import from_spec
from fedalloy.experiment.recipe import assign, entry_names, literal, load, parse, quick, resolve, schema
from fedalloy.experiment.recipe.changes import leaves, merge
from fedalloy.experiment.recipe.tables import Recipe
from fedalloy.experiment.records import toml
from fedalloy.experiment.sampling import BySize, Listed, UniformSampling
from fedalloy.methods.solvers.prox import Prox
from fedalloy.methods.weightings.uniform import Uniform
from fedalloy.tasks.assembly import as_factory
from fedalloy.tasks.devices import EpochRange
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.noise import LabelNoise

RECIPES = Path(__file__).resolve().parents[1] / "recipes"


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"runn": {}}, "runn: unknown key; did you mean 'run'?"),
        ({"run": {"ronds": 3}}, "run.ronds: unknown key; did you mean 'rounds'?"),
        ({"task": {"clients": 3}}, "task.clients: unknown key; it belongs to [partition] or [evaluate]; allowed"),
        ({"rounds": 3}, "rounds: unknown key; it belongs to [run]"),
        ({"run": {"rounds": "ten"}}, "run.rounds: got 'ten'; should be a whole number"),
        ({"run": {"rounds": 2.5}}, "run.rounds: got 2.5"),
        ({"run": {"rounds": 0}}, "run.rounds: got 0; should be greater than or equal to 1"),
        ({"run": {"seeds": [1, "a"]}}, "run.seeds: got [1, 'a']; entry 1 should be a whole number"),
        ({"run": 3}, "run: got 3; should be a table"),
        ({"devices": {"epochs": {"low": 1}}}, "one number, one per client, or `{ low, high }`"),
        ({"devices": {"on_failure": "resent"}}, "did you mean 'resend'? allowed: drop, resend"),
        ({"devices": {"slow": {"fraction": 2, "factor": 2}}}, "devices.slow.fraction: got 2"),
        ({"sampling": {"kind": "bysize"}}, "did you mean 'by_size'?"),
        ({"sampling": {"kind": "list", "cohort": 3}}, "sampling.cohort"),
        ({"sampling": {"cohorts": [[1]]}}, "sampling.cohorts: only for kind = 'list'"),
        ({"compare": [{"nam": "a"}]}, "compare.0.nam: unknown key; did you mean 'name'?"),
        ({"solver": {"lr": 1}}, "solver.kind: the key 'kind' is missing"),
        ({"solver": {"kind": "sdg"}}, "solver.kind: unknown solver 'sdg': did you mean 'sgd'?"),
        ({"solver": {"kind": "sgd", "lrr": 1}}, "unknown argument 'lrr'; did you mean 'lr'?"),
        ({"algorithm": {"name": "fedavgg"}}, "algorithm.name: unknown algorithm 'fedavgg': did you mean 'fedavg'?"),
        ({"algorithm": {"lr": "fast"}}, "lr: expected a number, got 'fast'"),
        ({"engine": {"kind": "lop"}}, "engine.kind: unknown engine 'lop': did you mean 'loop'?"),
        ({"evaluate": {"metrics": ["acuracy"]}}, "did you mean 'accuracy'?"),
    ],
)
def test_a_wrong_recipe_names_the_field_and_the_nearest_spelling(data, said):
    with pytest.raises(FedalloyError) as caught:
        resolve(parse(data))
    assert said in str(caught.value)


def test_every_wrong_field_is_told_at_once():
    with pytest.raises(SpecError) as caught:
        parse({"run": {"rounds": 0, "sedes": [1]}, "task": {"test_fraction": 2.0}})
    assert all(field in str(caught.value) for field in ("run.rounds", "run.sedes", "task.test_fraction"))


def test_tables_become_the_values_they_describe():
    recipe = parse({
        "devices": {"epochs": {"low": 1, "high": 5}, "success": [1.0, 0.5]},
        "sampling": {"kind": "by_size", "cohort": 0.5},
        "algorithm": {"name": "fedprox", "mu": 0.3, "lr": 0.2, "on_failure": "resend"},
        "weighting": {"kind": "uniform"},
        "run": {"rounds": 7, "seeds": [5]},
        "evaluate": {"every": 2, "clients": 3, "metrics": ["accuracy", "top7"]},
    })  # fmt: skip
    made = resolve(recipe)
    solver = made.algorithm.solver
    assert isinstance(solver, Prox)
    assert (solver.mu, solver.lr) == (0.3, 0.2)
    assert made.algorithm.weighting == Uniform()
    assert made.algorithm.on_failure == "resend"
    assert made.config.devices.epochs == EpochRange(1, 5)
    assert made.config.sampling == BySize(0.5)
    assert (made.config.rounds, made.config.seed, made.config.evaluate_clients) == (7, 5, 3)
    assert resolve(parse({})).config.sampling == UniformSampling()
    assert resolve(parse({"sampling": {"kind": "list", "cohorts": [[0], [1, 2]]}})).config.sampling == Listed(
        ((0,), (1, 2))
    )


def test_a_resolved_recipe_resolves_to_itself_through_toml(tmp_path):
    recipe = load(RECIPES / "demo.toml")
    made = resolve(recipe, 2, "fedprox")
    (tmp_path / "recipe.toml").write_text(toml.dumps(made.resolved))
    again = resolve(load(tmp_path))
    assert again.resolved == made.resolved
    assert (again.algorithm, again.config) == (made.algorithm, made.config)
    assert made.resolved["run"]["seeds"] == [2]
    assert made.resolved["engine"]["threads"] >= 1
    assert not {"compare", "grid"} & made.resolved.keys()


@pytest.mark.parametrize(
    "path", sorted(set(RECIPES.rglob("*.toml")) - set(RECIPES.glob("claims/*"))), ids=lambda path: path.stem
)
def test_every_recipe_of_the_repository_resolves(path):
    recipe = load(path)
    for entry in [None, *entry_names(recipe)]:
        made = resolve(recipe, entry=entry)
        assert made.config.seed == recipe.run.seeds[0]
        assert made.config.target_metric in made.config.metrics
        assert resolve(parse(made.resolved, "resolved")).resolved == made.resolved


def test_data_say_how_they_are_scored_unless_the_recipe_does():
    defaults = resolve(parse({"task": {"dataset": {"kind": "heart", "variant": "flamby"}}, "run": {"target": 0.8}}))
    assert defaults.config.metrics == ("auroc", "accuracy", "loss")
    assert defaults.config.target_metric == defaults.resolved["run"]["target_metric"] == "auroc"
    assert defaults.resolved["evaluate"]["metrics"] == ["auroc", "accuracy", "loss"]
    said = resolve(parse({"task": {"dataset": "heart"}, "evaluate": {"metrics": ["loss", "accuracy"]}})).config
    assert (said.metrics, said.target_metric) == (("loss", "accuracy"), "loss")
    plain = resolve(parse({"run": {"target_metric": "loss"}})).config
    assert (plain.metrics, plain.target_metric) == (("accuracy", "loss"), "loss")
    assert resolve(parse({"evaluate": {"metrics": ["loss", "accuracy"]}})).config.target_metric == "accuracy"


def test_all_algorithms_of_a_comparison_see_the_same_federation():
    recipe = load(RECIPES / "demo.toml")
    digests = {_digest(recipe, 0, entry) for entry in ("fedavg", "scaffold")}
    assert len(digests) == 1
    assert _digest(recipe, 1, "fedavg") not in digests


def _digest(recipe: Recipe, seed: int, entry: str) -> str:
    task = resolve(recipe, seed, entry).task()
    assert isinstance(task, FederatedTask)
    return task.manifest.digest


def test_an_entry_named_like_a_method_is_that_method_unless_it_says_otherwise():
    recipe = parse({"compare": [{"name": "scaffold"}, {"name": "fedprox", "set": {"algorithm": {"name": "fedavg"}}}]})
    assert resolve(recipe, entry="scaffold").resolved["algorithm"]["name"] == "scaffold"
    assert resolve(recipe, entry="fedprox").resolved["algorithm"]["name"] == "fedavg"
    with pytest.raises(SpecError, match="comparison has no 'scafold': did you mean 'scaffold'"):
        resolve(recipe, entry="scafold")


def test_quick_shortens():
    recipe = parse({"run": {"rounds": 90, "seeds": [1, 2, 3, 4], "tuning_seeds": [7, 8]}})
    short = quick(recipe)
    assert (short.run.rounds, short.run.seeds, short.run.tuning_seeds) == (3, [1, 2], [7])
    assert short.evaluate.every == 3


def test_a_quick_run_is_marked_for_good():
    recipe = parse({"run": {"rounds": 9}})
    assert "quick" not in resolve(recipe).resolved["run"]
    marked = resolve(quick(recipe)).resolved
    assert marked["run"]["quick"] is True
    assert resolve(parse(marked)).resolved == marked


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.1", 0.1),
        ("true", True),
        ("fedprox", "fedprox"),
        ("[1, 2]", [1, 2]),
        ('"3"', "3"),
        ("{a = 1}", {"a": 1}),
    ],
)
def test_values_are_typed_as_in_toml_and_bare_words_are_text(text, value):
    assert literal(text) == value
    assert type(literal(text)) is type(value)


def test_assignments_reach_lists_and_short_forms():
    data = {"task": {"dataset": "mnist"}, "wire": [{"kind": "clip"}]}
    changed = assign(data, ["task.dataset.flat=false", "wire.0.kind=noise"])
    assert changed == {"task": {"dataset": {"kind": "mnist", "flat": False}}, "wire": [{"kind": "noise"}]}
    assert data["wire"] == [{"kind": "clip"}], "the given tables stay as they were"
    for wrong in ("wire.3.kind=noise", "run", "=3"):
        with pytest.raises(SpecError):
            assign(data, [wrong])
    with pytest.raises(SpecError, match="not a table"):
        assign({"run": 3}, ["run.rounds=4"])


words = st.text("abcdef", min_size=1, max_size=4)


@given(
    st.dictionaries(
        words, st.recursive(st.integers(), lambda inner: st.dictionaries(words, inner, min_size=1)), max_size=4
    )
)
def test_merging_a_tables_own_leaves_changes_nothing(table):
    assert merge(table, dict(leaves(table))) == table


def test_a_missing_file_names_its_neighbours_and_broken_toml_its_line(tmp_path):
    (tmp_path / "demo.toml").write_text("[run\n")
    with pytest.raises(SpecError, match=r"did you mean 'demo\.toml'"):
        load(tmp_path / "demmo.toml")
    with pytest.raises(SpecError, match="line 1"):
        load(tmp_path / "demo.toml")


def test_the_schema_is_json_and_knows_the_registered_names():
    made = json.loads(json.dumps(schema()))
    assert "fedavg" in made["$defs"]["AlgorithmTable"]["properties"]["name"]["examples"]
    assert made["$defs"]["RunTable"]["additionalProperties"] is False


class TestPersonalisationRecipes:
    """The recipes of SuPerFed: what cannot be seen without data is that data and model fit each other."""

    SHAPES: ClassVar[dict[str, tuple[tuple[int, ...], int]]] = {
        "mnist": ((784,), 10),
        "cifar10": ((3, 28, 28), 10),
        "femnist": ((1, 28, 28), 62),
        "tinyshakespeare": ((80,), 100),
    }
    COUNTS: ClassVar[dict[str, int]] = {
        "mnist": 238_800,
        "cifar10": 722_800,
        "femnist": 1_718_416,
        "tinyshakespeare": 821_024,
    }
    PATHS = sorted((RECIPES / "s4-ch2").glob("*.toml"))

    @pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
    def test_data_and_model_fit(self, path):
        table = load(path).task
        loader = from_spec("dataset", table.dataset, "dataset")
        name = table.dataset["kind"] if isinstance(table.dataset, dict) else table.dataset
        assert loader.files
        model = as_factory(table.model, *self.SHAPES[name])()
        assert sum(leaf.numel() for leaf in model.parameters()) == self.COUNTS[name]
        assert getattr(loader, "side", 28) == 28

    def test_every_method_of_the_table_with_its_start(self):
        starts = {50: (0.6, 0.8), 100: (0.4, 0.6), 500: (0.2, 0.4)}
        methods = set(entry_names(load(self.PATHS[0].with_name("table-2.3-mnist-50.toml"))))
        assert len(methods) == 12
        for data in ("mnist", "cifar10"):
            for clients, expected in starts.items():
                recipe = load(RECIPES / "s4-ch2" / f"table-2.3-{data}-{clients}.toml")
                assert recipe.partition.clients == clients
                assert set(entry_names(recipe)) == methods
                found = [resolve(recipe, entry=f"superfed_{kind}").algorithm.solver for kind in ("mm", "lm")]
                assert tuple(solver.start for solver in found) == expected  # type: ignore[attr-defined]
                assert [(solver.mu, solver.nu) for solver in found] == [(0.01, 1.0), (0.01, 2.0)]  # type: ignore[attr-defined]
                for entry in methods:
                    solver = resolve(recipe, entry=entry).algorithm.solver
                    local: Any = getattr(solver, "solver", solver)
                    said = (local.lr, local.momentum, local.weight_decay, local.epochs, local.batch_size, local.decay)
                    step = (0.1, 0.0) if entry == "scaffold" else (0.01, 0.9)  # control variates bear no momentum
                    assert said == (*step, 1e-4, 10, 10, 0.999), entry

    @pytest.mark.parametrize("changes", [[], ["noise.ratio=0.4"], ["noise.kind=symmetric", "noise.ratio=0.2"]])
    def test_the_columns_of_the_noise_table(self, changes):
        for data in ("mnist", "cifar10"):
            for protocol in ("paper", "public-code"):
                recipe = load(RECIPES / "s4-ch2" / f"table-2.6-{data}-{protocol}.toml", changes)
                assert recipe.noise is not None
                assert LabelNoise(**recipe.noise.model_dump()).first == (protocol == "public-code")
                assert resolve(recipe, entry="superfed_lm").resolved["noise"]["ratio"] == recipe.noise.ratio

    def test_every_cell_of_the_ablations(self):
        grid = load(RECIPES / "s4-ch2" / "mu-nu-grid.toml")
        cells = [resolve(grid, entry=name).algorithm.solver for name in entry_names(grid)]
        assert len({(cell.mixing, cell.mu, cell.nu) for cell in cells}) == 32  # type: ignore[attr-defined]
        starts = load(RECIPES / "s4-ch2" / "start-round.toml")
        begun = [resolve(starts, entry=name).algorithm.solver.start for name in entry_names(starts)]  # type: ignore[attr-defined]
        assert begun == [0.0, 0.2, 0.4, 0.6, 0.8] * 2


def test_modules_with_rules_of_ones_own_are_imported_or_named(tmp_path, monkeypatch):
    (tmp_path / "strange_rules.py").write_text("LOADED = True\n")
    with pytest.raises(
        SpecError, match=r"imports: 'strange_rules' cannot be imported .* run the command in its folder"
    ):
        parse({"imports": ["strange_rules"]})
    monkeypatch.syspath_prepend(tmp_path)
    recipe = parse({"imports": ["strange_rules"]})
    assert resolve(recipe).resolved["imports"] == ["strange_rules"]


def test_an_entry_that_replaces_a_table_by_a_number_is_told_so(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text('[[compare]]\nname = "a"\n[compare.set]\nalgorithm = -0.0\n')
    recipe = load(file)
    with pytest.raises(SpecError, match="algorithm"):
        resolve(recipe, entry="a")
