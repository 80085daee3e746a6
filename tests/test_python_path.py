"""One path from Python and from the command line: the same recipe, the same folders, the same records."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedalloy
from fedalloy.algorithms import fedavg, fedprox
from fedalloy.cli.app import app
from fedalloy.core.errors import CheckpointError, RegistryError, SpecError
from fedalloy.engines.loop import Loop
from fedalloy.experiment.records import toml
from fedalloy.experiment.records.reading import find_runs, read_run
from fedalloy.methods import Prox

TABLES: dict[str, Any] = {
    "task": {"dataset": "synthetic", "model": "logistic"}, "partition": {"clients": 4}, "sampling": {"cohort": 2},
    "run": {"rounds": 2, "seeds": [0, 1]},
    "compare": [
        {"name": "FedAvg", "set": {"algorithm.name": "fedavg", "algorithm.lr": 0.1}},
        {"name": "FedProx", "set": {"algorithm.name": "fedprox", "algorithm.mu": 0.1, "algorithm.lr": 0.1}},
    ],
}  # fmt: skip
ALGORITHMS = {"FedAvg": fedavg(lr=0.1), "FedProx": fedprox(mu=0.1, lr=0.1)}
EQUAL = ("rounds.jsonl", "clients.jsonl", "identity.json", "manifest.json")


def synthetic(seed: int = 0):
    return fedalloy.task("synthetic", "logistic", clients=4, seed=seed)


def own(seed: int = 0):
    """The same data, as arrays of one's own: no recipe can make them."""
    return replace(synthetic(seed), notices=())


def files(folder: Path, names=EQUAL) -> dict[str, bytes]:
    return {
        f"{run.relative_to(folder)}/{name}": (run / name).read_bytes()
        for run in find_runs(folder)
        for name in names
        if (run / name).exists()
    }


def fedalloy_command(*arguments: object) -> None:
    app([str(one) for one in arguments], standalone_mode=False)


@pytest.fixture(scope="module")
def by_command(tmp_path_factory):
    place = tmp_path_factory.mktemp("command")
    (place / "recipe.toml").write_text(toml.dumps(TABLES))
    fedalloy_command("compare", place / "recipe.toml", "-o", place / "runs", "-j", 1)
    return place / "runs"


@pytest.mark.parametrize(
    "arguments",
    [
        (synthetic, {"FedAvg": {"name": "fedavg", "lr": 0.1}, "FedProx": {"name": "fedprox", "mu": 0.1, "lr": 0.1}}),
        (synthetic, ALGORITHMS),
        (own, ALGORITHMS),
    ],
    ids=["tables", "values", "own data"],
)
def test_a_comparison_made_in_python_has_the_records_of_the_same_recipe(arguments, by_command, tmp_path):
    task, algorithms = arguments
    done = fedalloy.compare(task, algorithms, tmp_path, seeds=[0, 1], rounds=2, cohort=2, processes=1)
    assert [run.state for run in done.outcomes] == ["finished"] * 4
    there = files(by_command)
    assert len(there) >= 4 * 3
    assert files(tmp_path) == there


def test_the_whole_recipe_of_every_run_is_the_one_of_the_command_line(by_command, tmp_path):
    fedalloy.compare(TABLES, tmp_path, processes=1)
    assert files(tmp_path, (*EQUAL, "recipe.toml")) == files(by_command, (*EQUAL, "recipe.toml"))


def test_the_command_line_reads_resumes_and_reports_a_comparison_from_python(tmp_path, capsys):
    fedalloy.compare(synthetic, ALGORITHMS, tmp_path / "runs", seeds=[0], rounds=2, processes=1)
    fedalloy_command("report", tmp_path / "runs", "-o", tmp_path / "report.html")
    assert "FedProx" in (tmp_path / "report.html").read_text(encoding="utf-8")
    run = tmp_path / "runs" / "FedProx" / "seed-0"
    fedalloy_command("run", run, "--resume", "--set", "run.rounds=3")
    assert read_run(run).last_round == 3
    fedalloy_command("show", run)
    assert "FedProx" in capsys.readouterr().out


def test_a_run_of_fit_is_resumed_by_the_command_line(tmp_path):
    fedalloy.fit(ALGORITHMS["FedProx"], synthetic(), rounds=1, cohort=2, folder=tmp_path / "a")
    fedalloy_command("run", tmp_path / "a", "--resume", "--set", "run.rounds=2")
    whole = fedalloy.fit(ALGORITHMS["FedProx"], synthetic(), rounds=2, cohort=2, folder=tmp_path / "b")
    assert whole.status == "finished"
    assert (tmp_path / "a" / "rounds.jsonl").read_bytes() == (tmp_path / "b" / "rounds.jsonl").read_bytes()


@pytest.mark.parametrize("change", [{"seed": 3}, {"sampling": None}])
def test_a_run_that_no_recipe_can_say_is_left_to_python(change, tmp_path, capsys):
    """A seed that is not the task's, and data that are arrays."""
    task = own() if "sampling" in change else synthetic()
    settings = {name: value for name, value in change.items() if value is not None}
    fedalloy.fit("fedavg", task, rounds=1, folder=tmp_path / "run", **settings)
    fedalloy_command("run", tmp_path / "run", "--resume")
    assert "begun in Python" in capsys.readouterr().err


def test_a_changed_copy_of_a_task_is_not_taken_for_the_original():
    assert synthetic().source is not None
    assert own().source is None


def test_the_same_call_continues_and_other_data_are_refused(tmp_path):
    fedalloy.compare(own(), {"FedAvg": "fedavg"}, tmp_path, seeds=[0, 1], rounds=1)
    again = fedalloy.compare(own(), {"FedAvg": "fedavg"}, tmp_path, seeds=[0, 1, 2], rounds=1)
    assert len(again.outcomes) == 3
    task = own()
    task = replace(task, train=replace(task.train, x=task.train.x + 1.0))
    with pytest.raises(CheckpointError, match="other data"):
        fedalloy.compare(task, {"FedAvg": "fedavg"}, tmp_path, seeds=[0, 1, 2, 3], rounds=1)


def test_a_comparison_of_one_task_grows_from_its_own_seed_to_more(tmp_path):
    fedalloy.compare(synthetic(), {"FedAvg": "fedavg"}, tmp_path, seeds=[0], rounds=1)  # as a recipe would have it
    before = files(tmp_path)
    grown = fedalloy.compare(synthetic(), {"FedAvg": "fedavg"}, tmp_path, seeds=[0, 1], rounds=1)
    assert len(grown.outcomes) == 2
    assert {name: files(tmp_path)[name] for name in before} == before
    fedalloy.compare(synthetic(), {"FedAvg": "fedavg"}, tmp_path, seeds=[0], rounds=1)
    model = fedalloy.task("synthetic", {"kind": "mlp", "hidden": [4]}, clients=4)
    for other in (synthetic(3), model):
        with pytest.raises(CheckpointError, match="another experiment"):
            fedalloy.compare(other, {"FedAvg": "fedavg"}, tmp_path, seeds=[0, 1], rounds=1)


def test_one_task_is_the_same_for_all_seeds_and_that_is_said(tmp_path):
    done = fedalloy.compare(synthetic(), ["fedavg", "fedprox"], tmp_path, seeds=[0, 1], rounds=1)
    manifests = {(run / "manifest.json").read_bytes() for run in find_runs(tmp_path)}
    assert len(manifests) == 1
    assert "A seed redraws the initial model and the order of batches." in done.notes


def test_a_grid_is_tuned_on_seeds_of_its_own(tmp_path):
    algorithms: dict[str, Any] = {"FedAvg": fedavg(lr=0.1), "FedProx": {"name": "fedprox", "mu": 0.1}}
    grid = {"FedAvg": {"solver.lr": [0.001, 0.2]}, "FedProx": {"algorithm.mu": [0.1]}}
    done = fedalloy.compare(own(), algorithms, tmp_path, seeds=[0], tuning_seeds=[9], rounds=2, grid=grid)
    assert {one.name: one.best for one in done.tuned}["FedAvg"] == {"solver.lr": 0.2}
    assert json.loads((tmp_path / "tuning.json").read_text())
    assert read_run(tmp_path / "FedAvg" / "seed-0").recipe["solver"]["lr"] == 0.2


def test_a_search_comes_first_where_trials_are_given(tmp_path):
    pytest.importorskip("optuna")
    task = fedalloy.task("digits", "logistic", clients=3, valid_fraction=0.2, seed=4)
    asked: dict[str, Any] = {"seeds": [0], "tuning_seeds": [9], "rounds": 2, "tune": 2}
    done = fedalloy.compare(task, ["fedavg"], tmp_path, **asked)
    (found,) = done.tuned
    assert len(found.tried) == 2
    reported = read_run(tmp_path / "fedavg" / "seed-0").recipe
    assert {f"algorithm.{name}": reported["algorithm"][name] for name in ("lr", "server_lr")} == found.best
    with pytest.raises(SpecError, match=r"tune\.trials"):
        fedalloy.compare(task, ["fedavg"], tmp_path, **{**asked, "tune": 0})


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        ((own(), {"A": 3}), {}, "'A' is a int: give fedavg"),
        ((own(), {"A": {"mu": 1}}), {}, "'A' has 'mu'"),
        ((own(), "fedavg"), {"algorithms": None}, "multiple values"),
        ((own(), ["fedavg"]), {"rouns": 3}, "did you mean 'rounds'"),
        ((own(), {"A": fedavg()}), {"grid": {"algorithm.lr": [1.0]}, "tuning_seeds": [5]}, "does not reach 'A'"),
        ((own(), {"A": "fedavg"}), {"grid": {"B": {"algorithm.lr": [1.0]}}}, "'B', which is not compared"),
        ((own(), {"A": "fedavg"}), {"grid": {"lr": [1.0]}}, "such as 'algorithm.lr'"),
        ((own(), {"A": "fedavg"}), {"grid": {"A": {"lr": [1.0]}}}, "such as 'algorithm.lr'"),
        ((own(), ["fedavg"]), {"resume": True}, "is resumed by itself"),
        (({**TABLES, "algorithm": {"lr": 0.5}}, {"A": fedavg()}), {}, r"\[algorithm\] would not reach 'A'"),
        ((torch.zeros(3), ["fedavg"]), {}, "the first argument"),
        ((own(), {}), {}, "there are no algorithms"),
        (({"A": "fedavg"}, own()), {}, "the second argument is a task; the order is compare"),
        ((lambda: own(), ["fedavg"]), {}, "it must take one argument, the seed"),
        ((own(), ["fedavg"]), {"seeds": 3}, r"seeds must be a list, such as \[0, 1, 2\] or range\(3\), got 3"),
        ((own(), ["fedavg"]), {"seeds": []}, "seeds is empty"),
        ((own(), ["fedavg"]), {"tuning_seeds": 3}, "tuning_seeds must be a list"),
        ((own(), ["fedavg"]), {"tuning_seeds": [3]}, "nothing is tuned: give grid or tune too"),
        ((own(), ["fedavg"]), {"grid": 3}, "grid must be a table, such as"),
        ((own(), ["fedavg"]), {"grid": {"algorithm.lr": 0.1}}, "'algorithm.lr' must be a list of values to try"),
        ((own(), ["fedavg"]), {"grid": {"fedavg": {"algorithm.lr": []}}}, "'algorithm.lr' must be a list of values"),
        ((own(), ["fedavg"]), {"track": "tensorboard"}, "track must be a list, such as"),
        ((own(), ["fedavg"]), {"track": ["tensorbord"]}, "did you mean 'tensorboard'"),
        ((own(), ["fedavg"]), {"track": [print]}, "trackers are given by name"),
        ((own(), ["fedavg"]), {"watcher": "print"}, "watcher must be a function"),
        ((own(), ["fedavg"]), {"engine": Loop()}, "engine must be a name, because a recipe holds it, got Loop"),
        ((own(), {"": "fedavg"}), {}, "'' is no name"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_words(arguments, settings, said, tmp_path):
    with pytest.raises((SpecError, RegistryError, TypeError), match=said):
        fedalloy.compare(arguments[0], arguments[1], folder=tmp_path, **{"seeds": [0], **settings})
    assert not list(tmp_path.iterdir())


def test_a_folder_of_a_comparison_that_is_no_path_is_refused():
    for folder in (3, ""):
        with pytest.raises(SpecError, match="folder must be the path of a folder"):
            fedalloy.compare(own(), ["fedavg"], folder, seeds=[0])  # type: ignore[arg-type]


def test_why_no_run_of_a_comparison_began_is_in_its_conclusion(tmp_path):
    done = fedalloy.compare(own(), ["fedavg", "fedprox"], tmp_path, seeds=[0], rounds=1, cohort=9, processes=1)
    assert "(cohort must be between 1 and the number of clients (4), got 9)" in done.conclusion


def test_a_folder_that_is_not_there_holds_no_runs_and_that_is_said(tmp_path):
    assert fedalloy.read_runs(tmp_path) == []
    with pytest.raises(CheckpointError, match="is not a folder"):
        fedalloy.read_runs(tmp_path / "mistyped")
    for read in (fedalloy.read_runs, fedalloy.read_run):
        with pytest.raises(SpecError, match=rf"{read.__name__} takes the path of one .*folder, got \['runs'\]"):
            read(["runs"])  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "name"),
    [
        (fedavg(lr=0.1), "fedavg"),
        (fedalloy.algorithms.ditto(lr=0.1), "ditto, samples, sgd"),
        ("scaffold", "scaffold"),
        ({"name": "fedprox", "mu": 0.5}, "fedprox"),
    ],
)
def test_a_result_has_the_name_of_its_method_with_and_without_a_folder(algorithm, name, folder, tmp_path):
    heard = []

    class Begun(fedalloy.Callback):
        def on_run_begin(self, start, /):
            heard.append(start.name)

    place = tmp_path / "run" if folder else None
    result = fedalloy.fit(algorithm, own(), rounds=1, engine="loop", folder=place, callbacks=[Begun()])
    assert repr(result).startswith(f"<{name}, seed 0: finished in round 1")
    assert heard == [name]
    assert repr(fedalloy.load(result.save(tmp_path / "saved"))).startswith(f"<saved {name}, seed 0")


def test_a_method_given_by_name_with_its_settings_has_them():
    result = fedalloy.fit({"name": "fedprox", "mu": 0.5, "lr": 0.2}, own(), rounds=1, engine="loop")
    solver = result.trained.fed.algorithm.solver
    assert isinstance(solver, Prox)
    assert (solver.mu, solver.lr) == (0.5, 0.2)


def test_the_step_size_of_a_client_is_not_taken_for_that_of_the_server():
    for method in (fedavg, fedalloy.algorithms.scaffold, fedalloy.algorithms.median):
        with pytest.raises(SpecError, match="1 arguments are given by place, allowed: none"):
            method(0.1)  # type: ignore[call-arg]
    with pytest.raises(SpecError, match=r"2 arguments are given by place, allowed: 1 \(mu\)"):
        fedprox(0.1, 0.05)  # type: ignore[call-arg]


def test_a_run_is_judged_by_a_metric_that_it_is_scored_by():
    result = fedalloy.fit("fedavg", own(), rounds=1, engine="loop", metrics=["loss"])
    assert result.metric == "loss"
    assert result.last()["mean"] > 0
    with pytest.raises(SpecError, match="target_metric 'ece' is not evaluated"):
        fedalloy.fit("fedavg", own(), rounds=1, target_metric="ece")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"callbacks": "tensorboard"}, "callbacks must be a list of objects"),
        ({"track": "tensorboard"}, "track must be a list, such as"),
        ({"watcher": "print"}, "watcher must be a function"),
    ],
)
def test_what_is_no_list_or_function_is_refused(settings, said):
    with pytest.raises(SpecError, match=said):
        fedalloy.fit("fedavg", own(), rounds=1, **settings)


@pytest.mark.parametrize("least", [math.nan, -0.1, "0.1", True])
def test_a_least_improvement_that_is_none_is_refused(least):
    with pytest.raises(SpecError, match="least must be a number of 0 or more"):
        fedalloy.EarlyStopping(least=least)
    for made in (fedalloy.EarlyStopping, fedalloy.Checkpoints):
        with pytest.raises(SpecError, match="must be 1 or more"):
            made(True)


def test_clients_are_asked_for_by_number_and_rows_are_needed(tmp_path):
    result = fedalloy.fit(fedalloy.algorithms.ditto(lr=0.1), own(), rounds=1, engine="loop")
    rows = torch.zeros(2, 60)
    for client in ("a", 1.0, True):
        with pytest.raises(SpecError, match="by its number, 0 to 3"):
            result.predict(rows, client=client)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="clients must be a list of clients"):
        result.save(tmp_path / "a", clients=0)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="x has no rows"):
        result.predict(rows[:0])
    saved = fedalloy.load(result.save(tmp_path / "b"))
    with pytest.raises(SpecError, match=r"the order is predict\(module, x\)"):
        saved.predict(rows, result.module())  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"predict\(saved\.module\(\), x\) for a model that was given by name"):
        saved.predict(rows)  # type: ignore[arg-type]


def test_a_folder_for_contributions_may_be_a_path(tmp_path):
    kept: dict[str, Any] = {"contributions_mb": 0.0, "contributions_folder": tmp_path}
    assert fedalloy.fit("fedavg", own(), rounds=1, engine="loop", **kept).status == "finished"


def test_a_comparison_is_judged_by_a_metric_that_its_runs_have(tmp_path):
    quick: dict[str, Any] = {"seeds": [0], "rounds": 1, "processes": 1}
    for task in (synthetic, own):
        done = fedalloy.compare(task, ["fedavg"], tmp_path / task.__name__, metrics=["loss"], **quick)
        assert done.rows[0].mean is not None
        assert done.to_pandas()["metric"].tolist() == ["loss"]
        with pytest.raises(SpecError, match="target_metric 'ece' is not evaluated"):
            fedalloy.compare(task, ["fedavg"], tmp_path / "none", target_metric="ece", **quick)
    with pytest.raises(SpecError, match="target_metric 'ece' is not evaluated"):
        fedalloy.compare({**TABLES, "run": {**TABLES["run"], "target_metric": "ece"}}, tmp_path / "none", **quick)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("task", [own(), synthetic, TABLES], ids=["task", "function", "recipe"])
def test_one_method_given_as_a_text_is_not_taken_for_the_folder(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"list of published methods' names, got 'scaffold': write \['scaffold'\]"):
        fedalloy.compare(task, "scaffold", tmp_path / "runs", seeds=[0], rounds=1)
    if task is not TABLES:
        with pytest.raises(SpecError, match=r"write \['scaffold'\]"):
            fedalloy.compare(task, "scaffold", seeds=[0], rounds=1)
    with pytest.raises(SpecError, match="'fedavg' is named twice"):
        fedalloy.compare(task, ["fedavg", "fedavg"], "runs", seeds=[0], rounds=1)
    assert not list(tmp_path.iterdir())
