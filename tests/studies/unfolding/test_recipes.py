"""Tables in recipes and on the command line: learned where the recipe looks for them, then run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fedalloy.cli.app import app
from fedalloy.core.errors import AlgorithmError, SpecError
from fedalloy.experiment.recipe import load, resolve
from fedalloy.experiment.weight_files import load_table, save_table
from fedalloy.methods.weightings.weight_table import WeightTable
from fedalloy.report.plots import kinds
from fedalloy.report.plots.learned import variances
from fedalloy.studies.unfolding.recipes import jobs

RECIPE = """
[task]
model = "logistic"
[partition]
clients = 3
[devices]
success = 0.7
[algorithm]
lr = 0.1
batch_size = 64
[unfold]
iterations = 2
lr = 0.05
[run]
rounds = 2
seeds = [0]
[evaluate]
metrics = ["accuracy"]
[[compare]]
name = "fedavg"
[[compare]]
name = "duw_fedavg"
set = { "algorithm.table" = "tables/avg.json" }
[[compare]]
name = "by hand"
set = { "weighting.kind" = "unfolded", "weighting.table" = "tables/nova.json", "weighting.normalise" = true }
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(RECIPE)
    return path


def command(*words: object) -> int:
    """Run a command line in this process; its exit code."""
    try:
        code = app([str(word) for word in words], standalone_mode=False)
    except SystemExit as ended:
        return int(ended.code or 0)
    return int(code or 0)


def test_a_recipe_gets_every_table_that_it_names(recipe, capsys):
    for entry in ("duw_fedavg", "by hand"):
        with pytest.raises(AlgorithmError, match="no table 'tables"):
            resolve(load(recipe), entry=entry).run()
    assert command("unfold", recipe) == 0
    shown = capsys.readouterr().out
    assert "tables/avg.json" in shown
    assert "variance over rounds" in shown
    table = load_table("tables/nova.json")
    assert (table.normalise, table.weights.shape) == (True, (2, 3))
    for entry in ("duw_fedavg", "by hand"):
        made = resolve(load(recipe), entry=entry)
        assert made.resolved["algorithm" if entry == "duw_fedavg" else "weighting"]["sizes"] == list(table.sizes)
        assert made.run()[0].status == "finished"


def test_what_is_learned_is_not_learned_again_unless_asked(recipe, capsys):
    assert command("unfold", recipe, "--entry", "duw_fedavg") == 0
    before = Path("tables/avg.json").read_text()
    assert command("unfold", recipe, "--entry", "duw_fedavg", "--set", "unfold.iterations=3") == 0
    assert "learned already" in capsys.readouterr().err
    assert Path("tables/avg.json").read_text() == before
    assert command("unfold", recipe, "--entry", "duw_fedavg", "--again", "--set", "unfold.iterations=3") == 0
    assert len(load_table("tables/avg.json").losses) == 3


def test_several_seeds_are_averaged(recipe, capsys):
    assert command("unfold", recipe, "--entry", "duw_fedavg", "--seed", 4, "--seed", 5) == 0
    parts = [load_table(f"tables/avg-seed{seed}.json") for seed in (4, 5)]
    mean = load_table("tables/avg.json")
    assert mean.runs == 2
    torch.testing.assert_close(mean.weights, (parts[0].weights + parts[1].weights) / 2)
    assert command("unfold", "tables/avg-seed4.json", "tables/avg-seed5.json", "-o", "again.json", "--json") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["runs"] == 2
    torch.testing.assert_close(load_table("again.json").weights, mean.weights)


def test_every_seed_has_its_own_table_where_the_name_says_so(recipe, capsys):
    recipe.write_text(
        RECIPE.replace("tables/avg.json", "tables/avg-{seed}.json").replace("seeds = [0]", "seeds = [3, 4]")
    )
    assert command("unfold", recipe, "--entry", "duw_fedavg") == 0
    three, four = (load_table(f"tables/avg-{seed}.json") for seed in (3, 4))
    assert (three.runs, four.runs) == (1, 1)
    assert not torch.equal(three.weights, four.weights)
    used = [resolve(load(recipe), seed=seed, entry="duw_fedavg").resolved["algorithm"]["table"] for seed in (3, 4)]
    torch.testing.assert_close(torch.tensor(used), torch.stack([three.weights, four.weights]), check_dtype=False)
    with pytest.raises(AlgorithmError, match=r"no table 'tables/avg-5\.json"):
        resolve(load(recipe), seed=5, entry="duw_fedavg").run()
    assert command("unfold", recipe, "--entry", "duw_fedavg", "--seed", 5, "--seed", 6) == 0
    assert resolve(load(recipe), seed=5, entry="duw_fedavg").run()[0].status == "finished"


def test_a_recipe_without_a_table_gets_one_for_its_algorithm(recipe):
    recipe.write_text(RECIPE.split("[[compare]]")[0])
    assert command("unfold", recipe, "-o", "weights.json") == 0
    assert load_table("weights.json").clients == 3


def test_wrong_wishes_are_refused(recipe):
    with pytest.raises(SpecError, match="needs 2 tables"):
        jobs(load(recipe), output=Path("one.json"))
    with pytest.raises(SpecError, match=r"remove \[sampling\]"):
        jobs(load(recipe, ["sampling.cohort=2"]))
    save_table(WeightTable(torch.ones(2, 3) / 3, sizes=(1, 2, 3), normalise=True), "tables/avg.json")
    with pytest.raises(SpecError, match="learned for FedNova updates, the recipe runs plain ones"):
        resolve(load(recipe), entry="duw_fedavg")
    with pytest.raises(SpecError, match=r"unfold\.gradient"):
        load(recipe, ["unfold.gradient=second"])


def test_pictures_of_tables(tmp_path):
    pytest.importorskip("matplotlib")
    flat = WeightTable(torch.tensor([[0.2, 0.8], [0.4, 0.6]]))
    deep = WeightTable(torch.rand(4, 2, 2, generator=torch.Generator().manual_seed(0)), layers=("a", "b"))
    for name, table in (("flat", flat), ("deep", deep)):
        save_table(table, tmp_path / f"{name}.json")
    both = [tmp_path / "flat.json", tmp_path / "deep.json"]
    for kind in ("weights", "rows", "variance"):
        for runs in (both, both[:1]):
            kinds.draw(kind, runs, tmp_path / f"{kind}{len(runs)}.png")
            assert (tmp_path / f"{kind}{len(runs)}.png").stat().st_size > 5000
    assert [rounds for rounds, _ in variances(both)] == [2, 4]
    assert variances(both[:1])[0][1] == pytest.approx(0.01)
