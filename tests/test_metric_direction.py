"""Every metric says which way is better, and everything that looks for the better one asks there."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedalloy import algorithms
from fedalloy.cli.app import app
from fedalloy.core import registry
from fedalloy.core.errors import SpecError
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.fit import fit
from fedalloy.experiment.recipe import parse
from fedalloy.experiment.records import toml
from fedalloy.experiment.records.index import Index
from fedalloy.experiment.records.reading import read_run
from fedalloy.report.live import answers
from fedalloy.report.live.gathered import gathered
from fedalloy.report.live.runs import RunStore
from fedalloy.report.page import page
from fedalloy.results.export.latex import latex
from fedalloy.results.export.tables import rows as table_rows
from fedalloy.results.outcome import read_outcome
from fedalloy.results.served import client_values, completed, noted_direction
from fedalloy.results.statistics import Spread, moments
from fedalloy.results.summaries import gather
from fedalloy.results.table import summarise
from fedalloy.studies.compare.comparing import compare
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.metrics.averages import MeanLoss
from fedalloy.tasks.metrics.direction import higher_is_better
from fedalloy.tasks.metrics.metric import Metric, means
from fedalloy.testing import small_task

RECIPE: dict[str, Any] = {
    "task": {"model": "logistic"},
    "partition": {"kind": "dirichlet", "alpha": 0.3, "clients": 6},
    "algorithm": {"batch_size": 32},
    "run": {"rounds": 3, "seeds": [0, 1], "tuning_seeds": [9], "target_metric": "loss", "target": 2.1},
    "engine": {"kind": "loop"},
    "compare": [
        {"name": "tuned", "set": {"algorithm.name": "fedavg"}, "grid": {"algorithm.lr": [0.001, 0.1]}},
        {"name": "slow", "set": {"algorithm.name": "fedavg", "algorithm.lr": 0.001}},
    ],
}


def test_a_variance_is_shown_in_percent_of_shares_only(tmp_path):
    """That of errors in metres is in square metres."""
    kinds = {
        "mae": {"dataset": {"kind": "synthetic"}, "model": "logistic", "loss": "mse"},
        "accuracy": {"dataset": {"kind": "synthetic"}, "model": "logistic"},
    }
    for metric, table in kinds.items():
        recipe = {"task": table, "partition": {"clients": 4}, "algorithm": {"lr": 0.001}, "run": {"rounds": 1}}
        (tmp_path / f"{metric}.toml").write_text(toml.dumps(recipe))
        said = invoke("run", tmp_path / f"{metric}.toml", "-o", tmp_path / metric)
        values = torch.tensor(list(read_run(tmp_path / metric).clients())[-1][metric], dtype=torch.float64)
        unit = 100.0 if metric == "accuracy" else 1.0
        shown = f"{float((unit * values).var(correction=0)):.3f}"
        assert ("variance (%²)" in said) == (metric == "accuracy")
        assert shown in said
        text = page(gather([tmp_path / metric]))
        assert ("variance (%²)" in text) == (metric == "accuracy")
        assert f">{float(shown):.{1 if unit == 100 else 3}f}<" in text


def invoke(*arguments: object) -> str:
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Path:
    """A comparison by loss, made on the command line."""
    place = tmp_path_factory.mktemp("loss")
    (place / "recipe.toml").write_text(toml.dumps(RECIPE))
    invoke("compare", place / "recipe.toml", "-o", place / "runs", "-j", 1)
    return place / "runs"


def values(run: Path, metric: str = "loss") -> list[float]:
    return list(read_run(run).clients())[-1][metric]


def runs_of(compared: Path) -> list[Path]:
    return [compared / name / f"seed-{seed}" for name in ("tuned", "slow") for seed in (0, 1)]


def test_a_comparison_by_loss_chooses_the_smaller_loss_and_reaches_targets_from_above(compared):
    (tuned,) = json.loads((compared / "tuning.json").read_text())
    tried = {one["settings"]["algorithm.lr"]: one["score"] for one in tuned["tried"]}
    assert tried[0.1] < tried[0.001]
    assert tuned["best"] == {"algorithm.lr": 0.1}
    for run in runs_of(compared):
        losses = [row["evaluation"]["loss"]["mean"] for row in read_run(run).rounds()]
        wanted = next((round for round, loss in enumerate(losses, start=1) if loss <= 2.1), None)
        assert read_outcome(run).reached == wanted
        assert (wanted is None) == ("slow" in run.parts), losses
    told = json.loads(invoke("compare", compared.parent / "recipe.toml", "-o", compared, "--json"))
    assert [row["reached"] for row in told["table"]] == [2, 0]
    text = invoke("compare", compared.parent / "recipe.toml", "-o", compared)
    assert re.search(r"slow .*not reached", text)


def test_the_worst_served_by_a_loss_have_the_largest_everywhere(compared):
    run = compared / "tuned" / "seed-0"
    losses, accuracies = values(run), values(run, "accuracy")
    record = list(read_run(run).rounds())[-1]["evaluation"]
    assert record["loss"]["worst_served"] == max(losses) == record["loss"]["best"]
    assert record["loss"]["best_served"] == min(losses) == record["loss"]["worst"]
    assert record["accuracy"]["worst_served"] == min(accuracies) == record["accuracy"]["worst"]
    both = [max(values(compared / "tuned" / f"seed-{seed}")) for seed in (0, 1)]
    spread = Spread.of(both)
    assert spread is not None
    table = invoke("compare", compared.parent / "recipe.toml", "-o", compared)
    assert f"| {spread.text()} |" in table
    shown = invoke("show", run)
    assert re.search(rf"worst-served 10 %\s*\| *{max(losses):.4f}", shown)
    assert re.search(rf"lowest 10 %\s*\| *{min(losses):.4f}", shown)
    (story, *_) = [one for one in gather([compared]) if one.name == "tuned"]
    assert story.curve[-1][2] == max(losses)


def test_the_report_and_the_latex_table_agree(compared):
    stories = gather([compared])
    text = latex([story.outcome for story in stories])
    made = page(stories)
    results = made[made.index('<section id="results"') : made.index('<section id="curves"')]
    for row in summarise([story.outcome for story in stories]):
        assert row.mean is not None
        assert row.worst_served is not None
        assert row.best_served is not None
        mean, low, high = (one.text() for one in (row.mean, row.worst_served, row.best_served))
        assert f">{mean}<" in results
        assert f">{low}<" in results
        assert low.split(" ")[0] in text
        fair = made[made.index('<section id="fairness"') :]
        assert fair.index(f">{low}<") < fair.index(f">{high}<"), "worst before best"
    assert r"\mathbf" not in text, "two seeds decide nothing"
    worst = max((score, client) for client, score in enumerate(values(compared / "tuned" / "seed-0")))
    assert f"client {worst[1]}" in made[made.index("Worst served") : made.index('<section id="fairness"')]
    difference = results[results.index("slow") :]
    assert 'class="down"' not in difference, "two seeds decide nothing"
    assert 'class="up"' not in difference


def as_it_was(run: Path, place: Path) -> Path:
    """The same run as versions before wrote it: no tails by direction, no note of directions."""
    shutil.copytree(run, place)
    rows = [json.loads(line) for line in (place / "rounds.jsonl").read_text().splitlines()]
    for row in rows:
        for summary in row["evaluation"].values():
            del summary["worst_served"], summary["best_served"]
    (place / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = json.loads((place / "environment.json").read_text())
    assert environment.pop("higher_is_better") == {"accuracy": True, "loss": False}
    (place / "environment.json").write_text(json.dumps(environment))
    return place


def test_readers_of_an_old_folder_compute_the_tails_and_reinterpret_nothing(compared, tmp_path):
    new = compared / "tuned" / "seed-0"
    old = as_it_was(new, tmp_path / "runs" / "old")
    assert read_outcome(old).scores == pytest.approx(read_outcome(new).scores)
    assert read_outcome(old).scores["worst"] == min(values(old)), "as ever: the lowest"
    assert read_outcome(old).reached == read_outcome(new).reached
    before, after = (list(completed(read_run(run), read_run(run).rounds())) for run in (old, new))
    assert [row["evaluation"]["accuracy"] for row in before] == [
        pytest.approx(row["evaluation"]["accuracy"]) for row in after
    ]
    told, wanted = (gather([run])[0].curve for run in (old, new))
    assert [worst for *_, worst in told] == pytest.approx([worst for *_, worst in wanted])
    column = "evaluation/loss/worst_served"
    exported = [[row[column] for row in table_rows("rounds", [run])] for run in (old, new)]
    assert exported[0] == pytest.approx(exported[1])
    store = RunStore(tmp_path / "runs")
    store.scan()
    index = Index(old, gathered())
    try:
        line = answers.details(store, "old", index)["points"][column]
        assert line["y"] == [pytest.approx(value, rel=1e-4) for value in exported[1]]
        assert answers.details(store, "old", index)["clients"]["values"][0] == pytest.approx(max(values(old)), rel=1e-4)
        added = answers.additions(index, 2)
        assert added is not None
        assert added["points"][column]["x"] == [3]
    finally:
        index.close()


def test_patience_waits_for_a_smaller_loss_and_any_top_k_counts_upwards():
    waiting = RunConfig(target_metric="loss", patience=2, target=1.0)
    assert waiting.better(0.5, 0.6)
    assert not waiting.better(0.6, 0.5)
    assert not waiting.better(math.nan, 0.5)
    assert [waiting.met_by(score) for score in (1.1, 1.0, 0.9)] == [False, True, True]
    upwards = RunConfig(metrics=("top7",), target_metric="top7", target=0.5)
    assert [upwards.met_by(score) for score in (0.4, 0.5, 0.6, math.nan)] == [False, True, True, False]


@pytest.fixture
def own_metrics(monkeypatch):
    """Two metrics of a user's: an error, of which less is better, and a count, of which nothing is better."""
    registry.everything("metric")
    monkeypatch.setitem(registry._rules, "metric", dict(registry._rules["metric"]))
    monkeypatch.setattr(registry, "_directions", dict(registry._directions))

    @registry.register("metric", "my_error", higher_is_better=False)
    @dataclass(frozen=True)
    class MyError(Metric):
        def evidence(self, objective, outputs, y):
            return 1.0 - objective.hits(outputs, y)

        def score(self, evidence, owner, clients):
            return means(evidence, owner, clients)

    @registry.register("metric", "my_count", higher_is_better=None)
    @dataclass(frozen=True)
    class MyCount(MyError):
        pass


def train(folder: Path, **settings: Any) -> Path:
    settings = {"rounds": 2, "engine": "loop", "metrics": ("my_error", "my_count", "accuracy"), **settings}
    fit(algorithms.fedavg(lr=0.1), small_task(seed=3), folder=folder, **settings)
    return folder


@pytest.mark.usefixtures("own_metrics")
def test_a_metric_of_a_users_own_says_its_direction(tmp_path, monkeypatch):
    folder = train(tmp_path / "run", target_metric="my_error")
    last = list(read_run(folder).rounds())[-1]["evaluation"]
    assert last["my_error"]["worst_served"] == last["my_error"]["best"] == max(values(folder, "my_error"))
    assert "worst_served" not in last["my_count"]
    assert "best_served" not in last["my_count"]
    # Whoever reads the folder elsewhere does not have the metric: the run has noted its direction.
    monkeypatch.setattr(registry, "_directions", {})
    assert higher_is_better("my_error") is None
    assert read_outcome(folder).higher_is_better is False
    (story,) = gather([folder])
    assert story.higher_is_better is False
    assert "Worst served" in page([story])


@pytest.mark.usefixtures("own_metrics")
@pytest.mark.parametrize(
    ("watched", "done"), [({"target": 3.0}, "targeted"), ({"patience": 2}, "waited for"), ({"grid": True}, "tuned on")]
)
def test_a_metric_without_a_direction_is_not_looked_at_for_better_values(tmp_path, watched, done):
    said = rf"'my_count' has no direction .*cannot be {done}; evaluated metrics that can: my_error"
    metrics = ["my_count", "my_error"]
    if "grid" not in watched:
        with pytest.raises(SpecError, match=said):
            RunConfig(metrics=tuple(metrics), target_metric="my_count", **watched)
        return
    recipe = {
        "task": {"model": "logistic"}, "partition": {"kind": "iid", "clients": 4}, "evaluate": {"metrics": metrics},
        "run": {"rounds": 1, "tuning_seeds": [9], "target_metric": "my_count"}, "grid": {"algorithm.lr": [0.1, 0.2]},
    }  # fmt: skip
    with pytest.raises(SpecError, match=said):
        compare(parse(recipe), tmp_path / "runs", processes=1)
    assert not (tmp_path / "runs").exists(), "refused before anything ran"


def test_what_is_tuned_on_is_evaluated_and_said_once(tmp_path):
    recipe = {**RECIPE, "run": {**RECIPE["run"], "target_metric": "auroc", "target": None}}
    recipe["run"].pop("target")
    with pytest.raises(SpecError, match="target_metric 'auroc' is not evaluated"):
        compare(parse(recipe), tmp_path / "runs")
    twice = {**RECIPE, "grid": {"run.target_metric": ["loss", "accuracy"]}}
    with pytest.raises(SpecError, match=r"settings are compared by run\.target_metric"):
        compare(parse(twice), tmp_path / "runs")


@pytest.mark.usefixtures("own_metrics")
def test_nobody_leads_by_a_metric_without_a_direction(tmp_path):
    runs = [train(tmp_path / name, target_metric="my_count") for name in ("a", "b")]
    stories = gather(runs)
    made = page(stories)
    assert "Worst served" not in made
    text = latex([story.outcome for story in stories])
    assert [line.count("--") for line in text.splitlines() if line.endswith(r"\\")] == [0, 3, 2], "no tails"
    assert r"\mathbf" not in text


# ------------------------------------------------------------------------------------------- losses that overflow


def test_a_loss_that_is_no_number_is_worse_than_any():
    owner = torch.tensor([0, 0, 1, 1, 2])
    evidence = torch.tensor([1.0, 2.0, torch.nan, 1.0, torch.inf], dtype=torch.float64)
    found = MeanLoss().score(evidence, owner, 4)
    assert found[:3].tolist() == [1.5, math.inf, math.inf]
    assert bool(found[3].isnan()), "nobody scored it"


def overflowing(folder: Path, metrics: tuple[str, ...]) -> Path:
    """A run of which one client's loss overflows at the end: its examples are far out."""
    task = replace(make_task("digits", "logistic", "iid", 4), global_test=None)
    begin = int(task.test.start[1])
    task.test.x[begin : begin + int(task.test.size[1])] = 3e38
    settings: dict[str, Any] = {"rounds": 1, "engine": "loop", "metrics": metrics, "target_metric": "loss"}
    fit(algorithms.fedavg(lr=0.1, batch_size=128), task, folder=folder, **settings)
    return folder


@pytest.mark.parametrize("metrics", [("loss", "accuracy"), ("loss",)])
def test_a_client_whose_loss_overflows_is_served_worst(tmp_path, metrics):
    folder = overflowing(tmp_path / "run", metrics)
    row = list(read_run(folder).clients())[-1]
    assert [place for place, value in enumerate(row["loss"]) if value is None] == [1]
    outcome = read_outcome(folder)
    assert (outcome.scores["worst_served"], outcome.scores["mean"]) == (math.inf, math.inf)
    assert outcome.scores["best_served"] == min(value for value in row["loss"] if value is not None)
    (story,) = gather([folder])
    assert story.clients[1].score == math.inf
    made = page([story])
    named = made[made.index("Worst served") :]
    assert "not finite" in named
    assert re.findall(r">(client \d)<", named)[0] == "client 1"
    assert r"\infty" in latex([outcome])
    store = RunStore(tmp_path)
    store.scan()
    index = Index(folder)
    try:
        index.update_fully()
        strip = answers.clients(store, "run", index)
        assert strip is not None
        assert (strip["overflowed"], strip["of"]) == (1, len(row["ids"]) - 1)
    finally:
        index.close()


def test_a_mean_between_models_is_not_taken_over_the_others():
    assert moments([1.0, 3.0, math.nan]) == (2.0, 1.0)
    assert all(map(math.isnan, moments([1.0, 3.0, math.inf])))


def test_a_damaged_note_or_row_says_nothing():
    assert noted_direction({"higher_is_better": {"loss": "no"}}, "loss") is None
    assert noted_direction({"higher_is_better": [1]}, "loss") is False, "as registered"
    assert noted_direction([], "loss") is False  # type: ignore[arg-type]
    assert client_values({"ids": [0], "loss": 3}, "loss", False) == []
    assert math.isnan(client_values({"ids": [0], "loss": ["x"]}, "loss", False)[0])


def test_null_is_told_apart_from_nothing_to_score():
    row = {"ids": [0, 1], "round": 1, "loss": [None, 2.0]}
    assert client_values(row, "loss", False, {"skipped": 0.0}) == [math.inf, 2.0]
    assert math.isnan(client_values(row, "loss", False, {"skipped": 1.0})[0])
    assert math.isnan(client_values({**row, "accuracy": [None, 0.5]}, "loss", False)[0])
    assert math.isnan(client_values({"ids": [0], "auroc": [None], "accuracy": [0.5]}, "auroc", True)[0])
