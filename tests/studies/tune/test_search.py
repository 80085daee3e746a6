"""Searching for settings: equal budgets, validation parts, stopped trials, and what is left after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import fedalloy
from fedalloy.core import registry
from fedalloy.core.errors import CheckpointError, FedalloyError, SpecError
from fedalloy.core.search import Choice, Range, read_space
from fedalloy.experiment.recipe.reading import load, parse
from fedalloy.experiment.recipe.resolving import resolve, with_entry
from fedalloy.experiment.recipe.tables import Recipe
from fedalloy.experiment.records.reading import find_runs, read_run
from fedalloy.experiment.records.scalars import seconds_of
from fedalloy.report.page import write_page
from fedalloy.results.outcome import read_outcome
from fedalloy.studies.compare.calling import as_call
from fedalloy.studies.compare.comparing import job_of, with_entries
from fedalloy.studies.compare.jobs import Job, JobNews, work
from fedalloy.studies.compare.planning import plan
from fedalloy.studies.compare.tuned import Tried
from fedalloy.studies.tune.importance import importance, thirds
from fedalloy.studies.tune.searching import rungs
from fedalloy.studies.tune.spaces import present, space_of, with_own_ranges
from fedalloy.studies.tune.tuning import search_all, searches

pytest.importorskip("optuna")

RECIPE: dict[str, Any] = {
    "task": {"dataset": "digits", "model": {"kind": "logistic"}},
    "partition": {"kind": "dirichlet", "alpha": 0.3, "clients": 5},
    "run": {"rounds": 9, "seeds": [0, 1, 2], "tuning_seeds": [100, 101]},
    "engine": {"kind": "batched"},
}
TWO = {"fedavg": "fedavg", "fedprox": "fedprox"}


def test_every_method_has_a_space_that_it_accepts() -> None:
    for name in registry.names("algorithm"):
        space = space_of(parse({"algorithm": {"name": name}}))
        assert "algorithm.lr" in space, name
        for path, where in space.items():
            assert isinstance(where, Range)
            recipe = {"algorithm": {"name": name, path.split(".")[1]: where.value(where.high)}}
            space_of(parse(recipe))


@pytest.mark.parametrize(("name", "cohort"), [("aaggff_s", 20), ("aaggff_d", 2)])
def test_no_trial_is_refused_for_settings_that_depend_on_the_federation(name: str, cohort: int, tmp_path: Path) -> None:
    """AAggFF's C1 must be below its C2, which is the share of clients in a round."""
    recipe = {**RECIPE, "partition": {"kind": "iid", "clients": 20}, "sampling": {"cohort": cohort}}
    found = fedalloy.tune(recipe, {name: name}, tmp_path, trials=4, processes=1, rounds=1)
    assert [bool(one.rounds) and not one.state.startswith("failed") for one in found.tuned[0].tried] == [True] * 4


def test_arguments_are_searched_where_their_rule_says() -> None:
    space = space_of(parse({"algorithm": {"name": "fedprox"}}))
    assert space["algorithm.mu"] == registry.search_of("solver", "prox")["mu"]
    assert space["algorithm.server_lr"] == registry.search_of("server", "sgd")["lr"]
    parts = {"solver": {"kind": "prox"}, "weighting": {"kind": "qffl"}, "server": {"kind": "adam"}}
    assert {"solver.mu", "solver.lr", "weighting.q", "server.lr"} <= set(space_of(parse(parts)))
    mixed = space_of(parse({"algorithm": {"name": "fedprox"}, "server": {"kind": "adam"}}))
    assert "server.lr" in mixed
    assert "algorithm.server_lr" not in mixed


def test_adaptive_optimizers_have_smaller_steps() -> None:
    adam = space_of(parse({"algorithm": {"name": "fedavg", "optimizer": "adam"}}))["algorithm.lr"]
    sgd = space_of(parse({"algorithm": {"name": "fedavg"}}))["algorithm.lr"]
    assert isinstance(adam, Range)
    assert isinstance(sgd, Range)
    assert adam.high < sgd.high


def test_a_recipe_replaces_ranges_and_is_refused_with_words() -> None:
    given = {"algorithm.lr": {"low": 0.01, "high": 0.1}, "algorithm.batch_size": [8, 32]}
    space = space_of(parse({"tune": {"space": given}}))
    assert space["algorithm.lr"] == Range(0.01, 0.1)
    assert space["algorithm.batch_size"] == Choice((8, 32))
    with pytest.raises(SpecError, match=r"write \{ low"):
        read_space("algorithm.lr", {"from": 1})
    with pytest.raises(SpecError, match="unknown argument 'lrr'"):
        space_of(parse({"tune": {"space": {"algorithm.lrr": [0.1, 0.2]}}}))
    with pytest.raises(SpecError, match="begins above 0"):
        read_space("algorithm.lr", {"low": 0.0, "high": 1.0, "log": True})


def test_the_recipes_own_settings_are_tried_first() -> None:
    recipe = parse({"algorithm": {"name": "fedprox", "mu": 0.5}})
    assert present(recipe, space_of(recipe)) == {
        "algorithm.mu": 0.5, "algorithm.server_lr": 1.0, "algorithm.lr": 0.1,
    }  # fmt: skip


def test_a_search_is_scored_on_validation_parts_and_spares_the_test_parts(tmp_path: Path) -> None:
    found = fedalloy.tune(RECIPE, TWO, tmp_path, trials=3, processes=1)
    runs = find_runs(tmp_path)
    assert len(runs) >= 6
    for run in runs:
        record = read_run(run)
        assert record.recipe["evaluate"]["part"] == "valid"
        assert record.recipe["task"]["valid_fraction"] == 0.2
        assert all(row["split"] == "valid" for row in record.clients())
        assert not any(row.get("global") for row in record.rounds())
    assert [len(one.tried) for one in found.tuned] == [3, 3]
    again = fedalloy.tune(RECIPE, TWO, tmp_path, trials=3, processes=1, watcher=_nothing_runs)
    compared = {**RECIPE, "compare": [{"name": name} for name in TWO]}
    assert fedalloy.tune(compared, str(tmp_path), trials=3, processes=1, watcher=_nothing_runs).best == again.best
    assert again.best == found.best
    assert load(found.file).tune is None


def _nothing_runs(news: JobNews) -> None:
    raise AssertionError(f"{news.job.folder} ran again")


def test_stopped_trials_are_charged_the_rounds_they_ran(tmp_path: Path) -> None:
    space = {"algorithm.lr": [0.5, 1e-6, 2e-6, 3e-6, 4e-6], "algorithm.server_lr": [1.0, 0.9]}
    table = {**RECIPE, "algorithm": {"lr": 0.5}, "tune": {"trials": 5, "space": space}}
    found = fedalloy.tune(table, {"fedavg": "fedavg"}, tmp_path, processes=1)
    by_state = {
        state: [one for one in found.tuned[0].tried if one.state == state] for state in ("finished", "stopped early")
    }
    assert len(by_state["finished"]) + len(by_state["stopped early"]) == 5
    assert by_state["stopped early"]
    for one in by_state["stopped early"]:
        assert one.rounds in rungs(9, 1)
        assert one.score is None
    assert all(one.rounds == 18 for one in by_state["finished"])


def test_a_budget_in_rounds_is_not_exceeded(tmp_path: Path) -> None:
    found = fedalloy.tune(RECIPE, TWO, tmp_path, budget_rounds=40, processes=1)
    for one in found.tuned:
        spent = sum(tried.rounds or 0 for tried in one.tried)
        assert 40 - 18 < spent <= 40


def test_a_setting_that_diverges_is_a_failed_trial_and_not_the_end(tmp_path: Path) -> None:
    table = {**RECIPE, "tune": {"trials": 4, "pruner": "none", "space": {"algorithm.lr": [0.1, 1e39]}}}
    found = fedalloy.tune(table, {"fedavg": "fedavg"}, tmp_path, processes=1)
    states = {one.settings["algorithm.lr"]: one.state for one in found.tuned[0].tried}
    assert states[0.1] == "finished"
    assert states.get(1e39, "failed").startswith("failed")
    assert found.best["fedavg"]["algorithm.lr"] == 0.1


def test_a_comparison_tunes_first_and_reports_on_other_seeds(tmp_path: Path) -> None:
    done = fedalloy.compare({**RECIPE, "tune": {"trials": 2}}, TWO, tmp_path, processes=1)
    assert {one.name for one in done.tuned} == set(TWO)
    for outcome in done.outcomes:
        assert outcome.folder is not None
        assert outcome.seed in (0, 1, 2)
        record = read_run(outcome.folder)
        best = next(one.best for one in done.tuned if one.name == outcome.name)
        assert {
            f"algorithm.{name}": record.recipe["algorithm"][name] for name in ("lr", "server_lr")
        }.items() <= best.items()
        assert record.recipe.get("evaluate", {}).get("part", "test") == "test"
        assert record.recipe["task"].get("valid_fraction", 0.0) == 0.0
    assert "2 trials" in json.loads((tmp_path / "tuning.json").read_text())[0]["how"]


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="one budget"):
        fedalloy.tune(RECIPE, TWO, tmp_path, trials=3, seconds=1.0)
    with pytest.raises(SpecError, match="either a grid or a search"):
        fedalloy.compare({**RECIPE, "tune": {}}, TWO, tmp_path, grid={"algorithm.lr": [0.1, 0.2]})
    with pytest.raises(SpecError, match="both have 0"):
        fedalloy.tune(RECIPE, TWO, tmp_path, tuning_seeds=[0])
    with pytest.raises(SpecError, match=r"tune: algorithms must be .*, got 'fedavg': write \['fedavg'\]"):
        fedalloy.tune(RECIPE, "fedavg", tmp_path)
    with pytest.raises(SpecError, match=r"run\.seeds has 1000, on which the search runs"):
        fedalloy.tune({**RECIPE, "run": {"seeds": [0, 1000]}}, TWO, tmp_path, trials=1)
    with pytest.raises(SpecError, match="either a grid or a search"):
        fedalloy.tune({**RECIPE, "grid": {"algorithm.lr": [0.1, 0.2]}}, TWO, tmp_path, trials=1)
    with pytest.raises(SpecError, match="would share the folder"):
        fedalloy.tune(RECIPE, {"a b": "fedavg", "a_b": "fedprox"}, tmp_path, trials=1)
    with pytest.raises(SpecError, match="'ece' is not evaluated"):
        fedalloy.tune({**RECIPE, "evaluate": {"metrics": ["loss"]}}, TWO, tmp_path, trials=1, target_metric="ece")
    with pytest.raises(SpecError, match="the task has no validation parts"):
        fedalloy.tune(fedalloy.task("digits", clients=3), ["fedavg"], tmp_path / "task", trials=1, seeds=[5])
    fedalloy.tune(RECIPE, {"fedavg": "fedavg"}, tmp_path / "a", trials=1, processes=1)
    with pytest.raises(SpecError, match=r"another search \(its space differ"):
        fedalloy.tune(
            RECIPE, {"fedavg": "fedavg"}, tmp_path / "a", trials=1, processes=1, space={"algorithm.lr": [0.1, 0.2]}
        )


@pytest.mark.skipif(os.name == "nt", reason="sends a signal")
def test_a_killed_search_goes_on_with_the_same_trials(tmp_path: Path) -> None:
    whole = fedalloy.tune(RECIPE, {"fedavg": "fedavg"}, tmp_path / "whole", trials=5, processes=1)
    code = (
        f"import fedalloy; fedalloy.tune({RECIPE!r}, {{'fedavg': 'fedavg'}}, {str(tmp_path / 'cut')!r}, "
        "trials=5, processes=1)"
    )
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 60
    while len(find_runs(tmp_path / "cut")) < 2 and child.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    cut = fedalloy.tune(RECIPE, {"fedavg": "fedavg"}, tmp_path / "cut", trials=5, processes=1)
    found = [{repr(one.settings): (one.score, one.rounds) for one in each.tuned[0].tried} for each in (whole, cut)]
    assert len(found[0]) == 5
    assert found[0] == found[1]


def test_scores_of_another_recipe_are_not_taken_over(tmp_path: Path) -> None:
    one = {"fedavg": "fedavg"}
    fedalloy.tune(RECIPE, one, tmp_path, trials=1, processes=1)
    for changes in ({"rounds": 6}, {"tuning_seeds": [100, 102]}, {"pruner": "none"}, {"cohort": 3}):
        with pytest.raises(SpecError, match="another search"):
            fedalloy.tune(RECIPE, one, tmp_path, trials=2, processes=1, **changes)
    more = fedalloy.tune(RECIPE, one, tmp_path, trials=2, processes=1, seeds=[5, 6])
    assert len(more.tuned[0].tried) == 2


def test_two_processes_keep_the_budget(tmp_path: Path) -> None:
    found = fedalloy.tune(RECIPE, {"fedavg": "fedavg"}, tmp_path, trials=4, processes=2)
    assert len(found.tuned[0].tried) == 4
    assert set(found.sensitivity("fedavg")) == {"algorithm.lr", "algorithm.server_lr"}
    assert sum(count for _, count in found.sensitivity("fedavg")["algorithm.lr"].values()) == 4


def test_the_recipe_that_is_written_runs_what_was_found(tmp_path: Path) -> None:
    """An entry may give its settings as tables, which must not win over those that were found."""
    own = {"name": "mine", "set": {"algorithm": {"name": "fedprox", "mu": 0.1, "lr": 1e-5}}}
    space = {"algorithm.lr": [0.3, 0.4], "algorithm.mu": [0.2, 0.3], "algorithm.server_lr": [0.9, 0.8]}
    found = fedalloy.tune({**RECIPE, "compare": [own]}, None, tmp_path, trials=1, rounds=2, processes=1, space=space)
    made = resolve(with_entry(load(found.file), "mine"), 0).resolved["algorithm"]
    assert {f"algorithm.{name}": made[name] for name in ("lr", "mu", "server_lr")} == found.best["mine"]


def test_the_same_settings_drawn_twice_do_not_run_side_by_side(tmp_path: Path) -> None:
    space = {"algorithm.lr": [0.1, 0.2], "algorithm.server_lr": [1.0, 0.9]}
    one = searches(
        [("fedavg", parse({**RECIPE, "tune": {"trials": 9, "space": space}}))], tmp_path, _job, {}
    )[0]  # fmt: skip
    given = [job.folder for job in iter(one.next_job, None)]
    assert given
    assert len(given) == len(set(given))


def _job(recipe: Recipe, name: str, seed: int, folder: Path) -> Job:
    return Job(name, seed, {}, folder / f"seed-{seed}")


def test_trials_can_be_compared_by_the_worst_served(tmp_path: Path) -> None:
    table = {**RECIPE, "tune": {"trials": 2, "score": "worst_served", "pruner": "none"}}
    found = fedalloy.tune(table, {"fedavg": "fedavg"}, tmp_path, processes=1)
    for one in found.tuned[0].tried:
        named = f"algorithm.lr={one.settings['algorithm.lr']}"
        runs = [read_outcome(run) for run in find_runs(tmp_path) if named in str(run)]
        assert one.score == pytest.approx(sum(run.scores["worst_served"] for run in runs) / len(runs))


def test_the_report_shows_tries_budget_and_sensitivity(tmp_path: Path) -> None:
    table = {**RECIPE, "tune": {"trials": 2, "score": "worst_served", "pruner": "none"}}
    found = fedalloy.compare(table, {"fedavg": "fedavg"}, tmp_path, rounds=2, seeds=[0], processes=1).tuned[0]
    write_page([tmp_path], tmp_path / "page.html")
    shown = (tmp_path / "page.html").read_text()
    assert "fedavg: 2 trials (tpe; 8 rounds)." in shown
    assert "mean of the worst-served 10 %" in shown
    for path, parts in found.thirds.items():
        assert f'<td class="text">{path}</td>' in shown
        assert all(f"{score:.3f} ({count})" in shown for score, count in parts.values() if score is not None)
    assert all(f">{one.score:.3f}<" in shown for one in found.tried if one.score is not None)
    assert shown.count(">4</td>") == 2, "the rounds of every trial"


def test_importance_names_what_matters() -> None:
    space: dict[str, Range | Choice] = {
        "a": Range(1e-3, 1.0, log=True), "b": Range(0.0, 1.0), "c": Choice(("x", "y")),
    }  # fmt: skip
    places = [(i / 11, (7 * i % 12) / 11, "xy"[i % 2]) for i in range(12)]
    tried = [Tried({"a": 10 ** (-3 + 3 * a), "b": b, "c": c}, -((a - 0.6) ** 2)) for a, b, c in places]
    found = importance(tried, space)
    assert found["a"] == pytest.approx(1.0)
    assert max(found["b"], found["c"]) < 0.3
    by_choice = [Tried(one.settings, float(one.settings["c"] == "x")) for one in tried]
    assert importance(by_choice, space)["c"] == pytest.approx(1.0)
    assert importance(tried[:5], space) == {}
    early = [Tried(one.settings, None, early=one.settings["b"]) for one in tried]
    assert importance(early, space)["b"] == pytest.approx(1.0), "trials are compared where all of them were"
    where = space["b"]
    assert isinstance(where, Range)
    assert thirds(early, "b", where, higher=True)["high"] == (1.0, 4)
    assert thirds(early, "b", where, higher=False)["low"] == (0.0, 4)


def test_a_plan_names_the_search_and_writes_nothing(tmp_path: Path) -> None:
    made = parse({**RECIPE, "compare": [{"name": "fedavg"}, {"name": "fedprox"}], "tune": {"trials": 12}})
    said = plan(made, tmp_path / "none").lines()
    assert said[0].startswith("First a search on seeds 100, 101, for every algorithm 12 trials, at most 216 rounds.")
    assert "fedprox: algorithm.mu" in said[0]
    assert said[1].startswith("6 runs of 9 rounds")
    assert not (tmp_path / "none").exists()


def test_a_plan_says_where_no_trial_can_be_stopped_early(tmp_path: Path) -> None:
    said = {}
    for every in (1, 5):
        recipe = {**RECIPE, "evaluate": {"every": every}, "tune": {"trials": 5}, "compare": [{"name": "fedavg"}]}
        said[every] = plan(parse(recipe), tmp_path).search
    assert "No trial can be stopped early, because there are scores every 5 of 9 rounds" in said[5]
    assert "stopped early" not in said[1]


def test_when_it_is_late_all_searches_end_with_equally_many_trials(tmp_path: Path) -> None:
    table = {**RECIPE, "compare": [{"name": "fedavg"}, {"name": "fedprox"}], "tune": {"trials": 9, "pruner": "none"}}
    call = as_call(table, None, tmp_path, {"rounds": 2})
    found = searches(with_entries(call.recipe), tmp_path, partial(job_of, call=call), {})
    ended: list[JobNews] = []
    tuned, _ = search_all(found, 1, ended.append, lambda: sum(news.kind == "ended" for news in ended) >= 5)
    assert [len(one.tried) for one in tuned] == [2, 2]


def test_a_range_for_one_methods_argument_does_not_stop_the_others(tmp_path: Path) -> None:
    space = {"algorithm.mu": [0.2, 0.3], "algorithm.lr": [0.1, 0.4]}
    found = fedalloy.tune(RECIPE, TWO, tmp_path, trials=1, rounds=2, processes=1, space=space)
    assert "algorithm.mu" not in found.best["fedavg"]
    assert found.best["fedprox"]["algorithm.mu"] in (0.2, 0.3)
    made = parse({**RECIPE, "compare": [{"name": name} for name in TWO], "tune": {"space": space}})
    assert "fedprox: algorithm.mu" in plan(made, tmp_path / "none").lines()[0]
    with pytest.raises(SpecError, match="unknown argument 'muu'"):
        fedalloy.tune(RECIPE, TWO, tmp_path / "no", trials=1, processes=1, space={"algorithm.muu": [0.1, 0.2]})


def test_a_range_that_changes_nothing_is_refused() -> None:
    """A method that is given as a value has its steps in its parts."""
    given = {**RECIPE, "tune": {"space": {"algorithm.lr": [0.1, 0.2]}}}
    call = as_call(given, {"mine": fedalloy.algorithms.fedavg(lr=0.3), "fedavg": "fedavg"}, None, {})
    (_, mine), (_, other) = with_own_ranges(with_entries(call.recipe))
    assert space_of(other)["algorithm.lr"] == Choice((0.1, 0.2))
    with pytest.raises(SpecError, match=r"would change nothing.*write solver\.lr or server\.lr$"):
        space_of(mine)


@pytest.mark.parametrize("path", ["partition.alpha", "run.rounds", "run.tuning_seeds", "task.test_fraction"])
def test_what_makes_scores_incomparable_is_not_searched(tmp_path: Path, path: str) -> None:
    with pytest.raises(SpecError, match="only settings of the method can be searched"):
        fedalloy.tune(RECIPE, TWO, tmp_path, trials=1, processes=1, space={path: [0.1, 0.2]})


def test_a_method_that_cannot_run_does_not_search_for_ever(tmp_path: Path) -> None:
    """Its trials break before their first round, so a budget in rounds is never spent."""
    told: list[JobNews] = []

    def watch(news: JobNews) -> None:
        told.append(news)
        assert len(told) < 20, "the search does not end"

    with pytest.raises(FedalloyError, match="needs every client in every round"):
        fedalloy.tune(RECIPE, ["afl"], tmp_path, budget_rounds=40, cohort=2, processes=1, watcher=watch)


def test_a_budget_that_holds_no_trial_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="17 rounds is less than one trial takes, 18: 9 rounds with each of 2"):
        fedalloy.tune(RECIPE, TWO, tmp_path, budget_rounds=17, processes=1)


def test_a_smaller_budget_than_a_method_has_had_is_refused(tmp_path: Path) -> None:
    """The others would get less than it, and the table would say that all had the same."""
    recipe = {**RECIPE, "run": {**RECIPE["run"], "rounds": 2}, "tune": {"pruner": "none"}}
    fedalloy.tune(recipe, {"fedavg": "fedavg"}, tmp_path, trials=3, processes=1)
    with pytest.raises(SpecError, match="holds 3 trials, more than the budget of 2,"):
        fedalloy.tune(recipe, TWO, tmp_path, trials=2, processes=1)
    with pytest.raises(SpecError, match="holds trials of 12 rounds, more than the budget of 8 rounds,"):
        fedalloy.tune(recipe, TWO, tmp_path, budget_rounds=8, processes=1)
    with pytest.raises(SpecError, match="holds 3 trials, more than the budget of 1,"):
        fedalloy.compare(recipe, TWO, tmp_path, tune=1, processes=1)
    assert not (tmp_path / "tuning" / "fedprox" / "search.log").read_text().count("trial_id"), "nothing was tried"
    both = fedalloy.tune(recipe, TWO, tmp_path, trials=3, processes=1)
    assert [len(one.tried) for one in both.tuned] == [3, 3]


def test_a_search_does_not_change_which_method_it_is_for() -> None:
    with pytest.raises(SpecError, match="a search is for the settings of one method"):
        space_of(parse({"tune": {"space": {"algorithm.name": ["fedavg", "fedprox"]}}}))


def test_runs_that_were_not_tuned_are_refused_before_the_search(tmp_path: Path) -> None:
    one = {"fedavg": {"name": "fedavg", "lr": 1e-5}}
    fedalloy.compare(RECIPE, one, tmp_path, seeds=[0], rounds=2, processes=1)
    with pytest.raises(CheckpointError, match="holds runs that were not tuned"):
        fedalloy.compare({**RECIPE, "tune": {"trials": 2}}, one, tmp_path, seeds=[0], rounds=2, processes=1)
    assert not (tmp_path / "tuning").exists()


def test_a_run_that_breaks_is_charged_its_rounds(tmp_path: Path) -> None:
    call = as_call({**RECIPE, "tune": {"trials": 2, "pruner": "none"}}, ["fedavg"], tmp_path, {})
    one = searches(with_entries(call.recipe), tmp_path, partial(job_of, call=call), {})[0]
    job = one.next_job()
    assert job is not None
    work(replace(job, until=5), lambda news: None)
    one.ended(JobNews(job, "broken", text="an error in round 6", state="failed"))
    assert [(tried.rounds, tried.state) for tried in one.tried] == [(5, "failed: an error in round 6")]


def test_a_trial_that_is_resumed_keeps_the_seconds_it_took(tmp_path: Path) -> None:
    call = as_call({**RECIPE, "tune": {"seconds": 60.0, "pruner": "none"}}, ["fedavg"], tmp_path, {})
    make = partial(searches, with_entries(call.recipe), tmp_path, partial(job_of, call=call), {})
    job = make()[0].next_job()
    assert job is not None
    work(replace(job, until=5), lambda news: None)
    (trial,) = make()[0].waiting
    assert trial.seconds == pytest.approx(sum(map(seconds_of, read_run(job.folder).timings())))
    assert trial.seconds > 0
