"""A small experiment from its declaration to its page, and the committed pages against their results."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.core.errors import DataError, SpecError
from fedalloy.experiment.records.reading import read_run
from fedalloy.results.outcome import read_outcome
from fedalloy.studies.compare.jobs import JobNews, Watcher
from fedalloy.studies.reproduce.declaring import load_experiment, target_of
from fedalloy.studies.reproduce.index import pages, write_pages
from fedalloy.studies.reproduce.judging import judge
from fedalloy.studies.reproduce.measuring import Wish, measure
from fedalloy.studies.reproduce.page import write_page
from fedalloy.studies.reproduce.results import Measured, Results, merged, read_results, write_results
from fedalloy.studies.reproduce.scoring import over_clients, scores_of

ROOT = Path(__file__).resolve().parents[3]
RECIPE = """
description = "small"
[task]
model = "logistic"
[partition]
kind = "classes"
per_client = 2
clients = 6
[algorithm]
batch_size = 64
[run]
rounds = 4
seeds = [0, 1, 2]
target = 0.3
[[compare]]
name = "fedavg"
set = { "algorithm.lr" = 0.2 }
[[compare]]
name = "slow"
set = { "algorithm.name" = "fedavg", "algorithm.lr" = 1e-5 }
[[compare]]
name = "aaggff_s"
[[compare]]
name = "wild"
set = { "algorithm.name" = "fedavg", "algorithm.lr" = 1e39 }
"""
CLAIMS = """
title = "Small steps learn little"
source = "nobody"
also = [
  "gini", "weighted_mean", "rounds", "global", "best_global", "regret", "objective", "cumulative_loss",
  "logged_objective", "loss:mean",
]
[published]
scores = ["mean", "worst20"]
cases.digits.fedavg = [90.5, 40]
cases.digits.wild = ["failed", "failed"]
[[cases]]
name = "digits"
recipe = "small.toml"
seconds_per_round = 0.1
[[cases]]
name = "iid"
recipe = "small.toml"
set = { partition = { kind = "iid", clients = 4 } }
methods = ["fedavg"]
[[claims]]
text = "A sensible step is better"
cases = ["digits"]
method = "fedavg"
score = "mean"
relation = "above"
others = ["slow"]
[[claims]]
text = "A wild step fails"
cases = ["digits"]
method = "wild"
score = "mean"
relation = "fails"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiment")
    (folder / "small.toml").write_text(RECIPE)
    (folder / "mine.toml").write_text(CLAIMS)
    return folder


class WorkerReply:
    """Remembers what the runs said."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    @contextmanager
    def __call__(self, case: str, count: int) -> Iterator[Watcher]:
        def tell(news: JobNews) -> None:
            if news.kind != "round":
                self.kinds.append(news.kind)

        yield tell


def run(place: Path, wish: Wish | None = None) -> tuple[Results, WorkerReply]:
    told = WorkerReply()
    experiment = load_experiment(str(place / "mine.toml"))
    made = measure(experiment, wish or Wish(), place / "runs", told, processes=1, near=place)
    return made, told


@pytest.fixture(scope="module")
def measured(place: Path) -> Results:
    return run(place)[0]


def test_runs_are_made_once_and_failed_ones_are_kept(place, measured):
    assert len(measured.runs) == 4 * 3 + 3
    assert {run.state for run in measured.of("digits", "wild")} == {"failed"}
    again, told = run(place)
    assert set(told.kinds) == {"reused"}
    assert again == measured


def test_scores_are_those_of_the_records(place, measured):
    one = next(run for run in measured.of("digits", "fedavg") if run.seed == 1)
    folder = place / "runs" / "mine" / "digits" / "fedavg" / "seed-1"
    last = list(read_run(folder).clients())[-1]
    values = torch.tensor(last["accuracy"], dtype=torch.float64)
    assert one.scores["mean"] == pytest.approx(100 * float(values.mean()))
    assert one.scores["worst20"] == pytest.approx(100 * float(values.min()))  # a fifth of six clients is one
    assert one.scores["loss:mean"] == pytest.approx(sum(last["loss"]) / 6)
    assert one.scores["rounds"] == (read_outcome(folder).reached or math.inf)
    assert measured.of("digits", "slow")[0].scores["rounds"] == math.inf, "it never reached the target"
    assert (one.planned, one.clients, one.cohort, one.table) == (4, 6, 6, "")
    assert "regret" not in one.scores
    decided = measured.of("digits", "aaggff_s")[0].scores
    assert decided["regret"] >= 0
    assert decided["objective"] < 0
    assert decided["logged_objective"] < 0 < decided["cumulative_loss"]
    assert decided["cumulative_loss"] > -decided["logged_objective"]  # log(1 + x) is below x
    # Records also hold bytes of memory, which are no seconds.
    assert one.seconds is not None
    assert 0 < one.seconds < 3600


def test_statistics_over_clients():
    values, sizes = torch.tensor([0.2, 0.4, 0.6, 0.8]), torch.tensor([1.0, 1.0, 1.0, 5.0])
    told = {name: over_clients(name, values, sizes) for name in ("worst", "best", "gap", "worst50", "weighted_mean")}
    assert told == pytest.approx({"worst": 20, "best": 80, "gap": 60, "worst50": 30, "weighted_mean": 65})
    assert over_clients("weighted_mean", values, None) is None
    losses = {name: over_clients(name, values, sizes, 1.0, higher=False) for name in ("worst", "best", "gap", "best50")}
    assert losses == pytest.approx({"worst": 0.8, "best": 0.2, "gap": 0.6, "best50": 0.3})
    assert over_clients("worst", values, None, higher=None) is None, "nobody is served worst by a count"
    with pytest.raises(SpecError, match="unknown score 'wurst'"):
        over_clients("wurst", values, None)


def test_scores_of_a_loss_look_for_the_smallest(place, measured):
    folder = place / "runs" / "mine" / "digits" / "fedavg" / "seed-0"
    record = read_run(folder)
    told = [row["global"]["loss"] for row in record.rounds()]
    losses = list(record.clients())[-1]["loss"]
    found = scores_of(record, read_outcome(folder), ["loss:best_global", "loss:worst", "loss:best", "loss:worst20"])
    assert found["loss:best_global"] == min(told)
    assert (found["loss:worst"], found["loss:best"]) == (max(losses), min(losses))
    assert found["loss:worst20"] == max(losses), "a fifth of six clients is one"


def test_the_target_of_a_case_is_that_of_its_recipe(place):
    assert target_of(load_experiment(str(place / "mine.toml")), "digits") == "accuracy"


def test_best_and_last_value_on_the_global_test_set(place, measured):
    folder = place / "runs" / "mine" / "digits" / "fedavg" / "seed-0"
    told = [100 * row["global"]["accuracy"] for row in read_run(folder).rounds()]
    found = scores_of(read_run(folder), read_outcome(folder), ["global", "best_global"])
    assert found == pytest.approx({"global": told[-1], "best_global": max(told)})


def test_the_page_has_numbers_verdicts_failures_and_the_command(place, measured):
    page = write_page(load_experiment(str(place / "mine.toml")), measured)
    assert "| **holds** | A sensible step is better | digits |" in page
    assert page.count("**holds**") == 2
    assert "| fedavg | 90.5 |" in page
    assert "| wild | failed | failed | failed | failed |" in page
    assert "## Failed runs" in page
    assert "fedalloy reproduce mine" in page


def test_results_survive_their_file(place, measured, tmp_path):
    write_results(measured, tmp_path / "mine.json")
    found = read_results(tmp_path / "mine.json")
    assert [run.seed for run in found.runs] == [run.seed for run in measured.runs]
    assert found.runs[0].scores == pytest.approx(measured.runs[0].scores, rel=1e-5)
    slow = [run for run in found.runs if run.method == "slow"]
    assert [run.scores["rounds"] for run in slow] == [math.inf] * 3, "null in the file"
    assert len((tmp_path / "mine.json").read_text().splitlines()) > len(measured.runs)
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(DataError, match="does not hold the results"):
        read_results(tmp_path / "other.json")


def test_a_quick_look_is_marked_and_kept_apart(place, measured):
    wish = Wish(cases=("iid",), quick=True)
    made, told = run(place, wish)
    assert (made.quick, set(told.kinds)) == (True, {"ended"})
    assert {(run.round, run.seed) for run in made.runs} == {(3, 0), (3, 1)}
    folder = place / "runs" / "mine_quick" / "iid" / "fedavg" / "seed-0"
    assert read_run(folder).recipe["run"]["quick"] is True
    assert read_outcome(folder).quick
    assert "not results" in write_page(load_experiment(str(place / "mine.toml")), made)


def test_other_values_are_other_runs_and_the_command_says_them(place):
    wish = Wish(changes=("run.rounds=2",), cases=("digits",), methods=("fedavg",))
    made, _ = run(place, wish)
    assert made.settings == {"run.rounds": 2}
    assert {run.planned for run in made.runs} == {2}
    experiment = load_experiment(str(place / "mine.toml"))
    assert [one.verdict for one in judge(experiment, made)] == ["not run", "not run"], "there is no other side"
    assert {run.method for run in made.runs} == {"fedavg"}
    assert made.command == "fedalloy reproduce mine --set run.rounds=2 --case digits --methods fedavg"
    with pytest.raises(SpecError, match="has no method 'fedavgg': did you mean 'fedavg'"):
        run(place, Wish(methods=("fedavgg",)))


def test_a_run_that_cannot_begin_is_a_mistake_and_no_result(place, tmp_path):
    (tmp_path / "small.toml").write_text(RECIPE)
    (tmp_path / "mine.toml").write_text(CLAIMS.replace("clients = 4", "clients = 4, per_client = 2"))
    with pytest.raises(SpecError, match=r"case 'iid', fedavg, seed 0 could not begin: .*per_client"):
        run(tmp_path, Wish(cases=("iid",)))


def test_the_command_line_writes_page_and_results(place, measured, tmp_path):
    page = tmp_path / "mine.md"
    command = [
        "reproduce",
        str(place / "mine.toml"),
        "--runs",
        str(place / "runs"),
        "-o",
        str(page),
        "-j",
        "1",
        "--json",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert [one["verdict"] for one in told["claims"]] == ["holds", "holds"]
    assert page.read_text().startswith("<!-- Generated from mine.json")
    assert read_results(page.with_suffix(".json")).runs


def test_a_later_command_keeps_the_cells_that_it_did_not_run(place, measured, tmp_path):
    page = tmp_path / "mine.md"
    short = replace(measured, settings={"evaluate.every": 2}, command="before", machine="another")
    write_results(replace(short, runs=tuple(short.of("digits", "slow"))), page.with_suffix(".json"))
    command = ["reproduce", str(place / "mine.toml"), "--runs", str(place / "runs"), "-o", str(page), "-j", "1"]
    done = CliRunner().invoke(app, [*command, "--case", "digits", "--json"])
    assert done.exit_code == 0, done.output
    assert {run.changed for run in read_results(page.with_suffix(".json")).runs} == {""}, "it was run again"
    found = merged(short, replace(measured, runs=tuple(measured.of("digits", "fedavg"))))
    assert len(found.runs) == len(measured.runs)
    assert {run.changed for run in found.of("digits", "slow")} == {"evaluate.every = 2"}
    assert {run.changed for run in found.of("digits", "fedavg")} == {""}
    assert (found.command, found.machine) == (f"before\n{measured.command}", f"another; {measured.machine}")
    assert found.methods("digits") == measured.methods("digits"), "a method that is measured again keeps its place"
    told = judge(load_experiment(str(place / "mine.toml")), found)
    assert [(one.verdict, one.remarks[:1]) for one in told] == [("preliminary", ("evaluate.every = 2",))] * 2


@pytest.mark.parametrize(
    ("earlier", "later", "kept"),
    [("x --case a", "x --case b", "x --case a\nx --case b"), ("x --case a", "x", "x"), ("x", "x --case b", "x")],
)
def test_a_later_command_that_reads_the_runs_of_an_earlier_one_keeps_its_name(earlier, later, kept):
    """Runs lie in one folder, so the second command finds those of the first one and stores both."""
    first = Measured("a", "fedavg", 0, "finished", 3, {"mean": 1 / 3})
    second = replace(first, case="b", scores={})
    old, new = Results("x", earlier, (first,)), Results("x", later, (first, second))
    stored = replace(old, runs=(replace(first, scores={"mean": 0.333333}),))
    assert merged(stored, new).command == kept
    again = replace(new, runs=(replace(first, scores={"mean": 0.5}), second))
    assert merged(stored, again).command == later, "none of the earlier runs is left"


def test_runs_of_other_commands_are_gathered(place, measured, tmp_path):
    page, runs = tmp_path / "mine.md", tmp_path / "run.rounds=3"
    shutil.copytree(place / "runs" / "mine", runs)
    command = [
        "reproduce",
        str(place / "mine.toml"),
        "--gather",
        f"digits={runs / 'digits'}",
        "-o",
        str(page),
        "--json",
    ]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = read_results(page.with_suffix(".json"))
    assert sorted((run.method, run.seed) for run in found.runs) == sorted(
        (run.method, run.seed) for run in measured.runs if run.case == "digits"
    )
    assert page.read_text().count("**holds**") == 2
    nothing = CliRunner().invoke(app, ["reproduce", str(place / "mine.toml"), "--gather", f"a={tmp_path / 'empty'}"])
    assert nothing.exit_code == 2


def test_the_list_says_what_everything_costs_and_what_is_preliminary(monkeypatch):
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, ["reproduce", "--list", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert told["s4-ch2-noise"]["verdicts"]["preliminary"] > 0
    assert set(told["s2-cifar10"]["verdicts"]) == {"not run"}
    assert "s3-synthetic" in CliRunner().invoke(app, ["reproduce", "--list"]).stdout
    nothing = CliRunner().invoke(app, ["reproduce"])
    assert nothing.exit_code == 2


def test_shorter_runs_are_preliminary_on_the_command_line_and_their_page_stays_with_them(place, measured, tmp_path):
    runs = tmp_path / "runs"
    command = ["reproduce", str(place / "mine.toml"), "--runs", str(runs), "-j", "1", "--case", "digits", "--json"]
    done = CliRunner().invoke(app, [*command, "--set", "run.rounds=3", "--methods", "fedavg,slow"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout.splitlines()[-1])
    assert Path(told["page"]).is_relative_to(runs)
    first = told["claims"][0]
    assert (first["verdict"], first["seeds"]) == ("preliminary", 3)
    assert first["remarks"][0] == "3 of 4 rounds of the recipe (75 %)"
    full = judge(load_experiment(str(place / "mine.toml")), measured)
    assert [one.verdict for one in full] == ["holds", "holds"]


def test_runs_of_two_commands_keep_their_own_settings():
    """Neither command's changes are said of the other's runs."""

    def results(method: str, settings: dict[str, Any]) -> Results:
        return Results("x", method, (Measured("a", method, 0, "finished", 3, {}),), settings)

    plain, changed = (
        results("b", {"engine.device": "cuda"}),
        results("c", {"engine.device": "cuda", "partition.alpha": 1}),
    )
    for old, new in ((plain, changed), (changed, plain)):
        both = merged(old, new)
        assert {run.method: run.changed for run in both.runs} == {"b": "", "c": "partition.alpha = 1"}
        assert both.settings == {"engine.device": "cuda"}


def stale_pages(folder: Path) -> list[Path]:
    """The pages that are not what the result files make."""
    return [file for file, text in pages(folder).items() if not file.exists() or file.read_text() != text]


def test_pages_of_a_folder_are_a_function_of_its_results(tmp_path):
    scores = {"fedfa": [60.0, 61.0, 62.5], "fedfa_mo": [50.0, 51.5, 52.0]}
    runs = tuple(
        Measured("1-1", name, seed, "finished", 200, {"worst20": value}, planned=200, clients=30, cohort=10)
        for name, values in scores.items()
        for seed, value in enumerate(values)
    )
    write_results(Results("s3-synthetic", "by hand", runs), tmp_path / "s3-synthetic.json")
    assert {file.name for file in write_pages(tmp_path)} == {"s3-synthetic.md", "index.md"}
    assert stale_pages(tmp_path) == []
    index = (tmp_path / "index.md").read_text()
    assert "| holds 1, " in index
    assert "(s3-synthetic.md)" in index
    assert "200 rounds, 3 seeds" in index
    (tmp_path / "index.md").write_text(index.replace("holds 1", "holds 2"))
    assert [file.name for file in stale_pages(tmp_path)] == ["index.md"]


def test_pages_are_written_where_results_are_and_nowhere_else(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    nowhere = CliRunner().invoke(app, ["reproduce", "--pages"])
    assert nowhere.exit_code == 2
    assert "there is no folder docs/results here" in nowhere.output
    empty = CliRunner().invoke(app, ["reproduce", "--pages", str(tmp_path)])
    assert (empty.exit_code, list(tmp_path.iterdir())) == (2, [])
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    (tmp_path / "docs" / "results" / "index.md").unlink()
    done = CliRunner().invoke(app, ["reproduce", "--pages"])
    assert (done.exit_code, done.stdout.split()) == (0, ["docs/results/index.md"])
    assert CliRunner().invoke(app, ["reproduce", "--pages", "docs/results"]).stdout.startswith("all pages match")


def test_the_committed_pages_say_what_the_committed_results_say():
    folder = ROOT / "docs" / "results"
    assert not stale_pages(folder), "run: fedalloy reproduce --pages"
    assert len(pages(folder)) > 1
