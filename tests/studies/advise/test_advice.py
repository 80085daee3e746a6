"""Advice on generated federations whose truth is known: nothing chosen on what is reported, and resumable."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from html import escape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedalloy
from benchmarks.advise import ask
from fedalloy.cli.app import app
from fedalloy.core.errors import CheckpointError, RunLocked, SpecError
from fedalloy.experiment.recipe.reading import load
from fedalloy.experiment.records.lock import locked
from fedalloy.experiment.records.reading import find_runs, read_run
from fedalloy.results.outcome import RunOutcome, read_outcome
from fedalloy.results.statistics import Spread
from fedalloy.studies.advise import pilot
from fedalloy.studies.advise.answer import Effect, chosen, cost_of, effects, first_line
from fedalloy.studies.compare import jobs
from fedalloy.studies.compare.held import HeldTasks
from fedalloy.studies.compare.jobs import Job, JobNews, Watcher, work

pytest.importorskip("optuna")

SHORT = 0.001
"""So short that the plan is the smallest one, whatever the machine: one trial of every method, four seeds."""
RECIPE: dict[str, Any] = {
    "task": {"dataset": "digits", "model": {"kind": "logistic"}},
    "partition": {"kind": "classes", "per_client": 2, "clients": 6},
    "algorithm": {"name": "fedprox", "mu": 0.5, "batch_size": 64},
    "run": {"rounds": 9, "seeds": [0], "target": 0.99, "stop_at_target": True},
    "evaluate": {"every": 3, "part": "valid"},
    "compare": [{"name": "fedavg", "set": {"algorithm.lr": 1e-9}}],
}


@pytest.mark.parametrize(("strength", "kind"), [(0.0, "fedavg"), (3.0, "ditto")])
def test_the_answer_follows_the_truth_about_personal_models(tmp_path: Path, strength: float, kind: str) -> None:
    found = ask("personal", strength, 5, tmp_path, minutes=SHORT, methods=["ditto"], rounds=9)
    assert found.method == kind
    assert found.first.startswith("Nothing beats FedAvg" if kind == "fedavg" else "Use ditto: it beats FedAvg")
    assert load(found.file).algorithm.name == kind


@pytest.mark.parametrize(("strength", "method"), [(0.0, "fedavg"), (1.0, "afl")])
def test_the_answer_follows_the_truth_about_the_worst_served(tmp_path: Path, strength: float, method: str) -> None:
    found = ask("fair", strength, 0, tmp_path, minutes=SHORT, methods=["afl"], rounds=12)
    assert found.method == method
    assert "in accuracy of the worst-served 10 %" in found.first
    (trial,) = found.record["tuned"]["afl"]["tried"]
    runs = [read_outcome(run) for run in find_runs(tmp_path / "tuning" / "afl")]
    assert trial["score"] == pytest.approx(sum(run.scores["worst_served"] for run in runs) / len(runs))


def test_nothing_is_chosen_on_what_is_reported(tmp_path: Path) -> None:
    found = fedalloy.advise(RECIPE, tmp_path, minutes=SHORT, methods=["ditto"], processes=1)
    pilot = [run for run in find_runs(tmp_path) if "tuning" in run.parts]
    reported = [run for run in find_runs(tmp_path) if "tuning" not in run.parts]
    seeds = [{read_run(run).recipe["run"]["seeds"][0] for run in some} for some in (pilot, reported)]
    assert not seeds[0] & seeds[1]
    for run in pilot:
        record = read_run(run)
        assert all(row["split"] == "valid" for row in record.clients())
        assert not any(row.get("global") for row in record.rounds())
    for run in reported:
        record = read_run(run)
        assert all(row["split"] == "test" for row in record.clients())
        assert record.last_round == 9, "the recipe's target ends no run"
        assert "mu" not in record.recipe["algorithm"], "an argument of the recipe's method reaches no other"
        assert record.recipe["algorithm"]["batch_size"] == 64, "settings of local training reach all methods"
        assert record.recipe["algorithm"]["lr"] > 1e-6, "entries of the recipe are not used"
    assert len(seeds[1]) >= 4, "one seed in the recipe is not enough for a verdict"
    trials = {name: len(one["tried"]) for name, one in found.record["tuned"].items()}
    assert len(set(trials.values())) == 1
    again = fedalloy.advise(RECIPE, tmp_path, minutes=SHORT, methods=["ditto"], processes=1, watcher=_nothing_runs)
    assert (again.first, again.lines) == (found.first, found.lines)
    with pytest.raises(CheckpointError, match="its recipe and its aim differ"):
        fedalloy.advise(RECIPE, tmp_path, minutes=SHORT, methods=["ditto"], aim="worst")
    with locked(tmp_path / "session.lock"), pytest.raises(RunLocked, match="another process continues"):
        fedalloy.advise(RECIPE, tmp_path, minutes=SHORT, methods=["ditto"])
    shown = CliRunner().invoke(app, ["show", str(tmp_path)])
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[0][:40] == found.first[:40]
    page = CliRunner().invoke(app, ["report", str(tmp_path), "-o", str(tmp_path / "page.html")])
    assert page.exit_code == 0
    text = (tmp_path / "page.html").read_text()
    assert f'<p class="lead verdict">{escape(found.first)}</p>' in text, "the page begins with the answer"
    assert all(escape(line) in text for line in found.lines)
    assert "others had more in favour" in text or "was not named" in text, "the reason why a method was not tried"


def _nothing_runs(news: JobNews) -> None:
    assert news.kind == "reused", f"{news.job.folder} ran again"


@pytest.mark.skipif(os.name == "nt", reason="sends a signal")
def test_a_killed_advice_goes_on(tmp_path: Path) -> None:
    asked = f"{RECIPE!r}, {str(tmp_path)!r}, minutes={SHORT}, methods=['ditto'], processes=1"
    code = f"import fedalloy; fedalloy.advise({asked})"
    child = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    limit = time.monotonic() + 60
    while len(find_runs(tmp_path)) < 4 and child.poll() is None and time.monotonic() < limit:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    before = json.loads((tmp_path / "advise.json").read_text())
    found = fedalloy.advise(RECIPE, tmp_path, minutes=SHORT, methods=["ditto"], processes=1)
    assert found.record["rounds"] == before["rounds"]
    assert found.record["candidates"] == before["candidates"]
    assert found.file.is_file()


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"the recipe has \[weighting\]"):
        fedalloy.advise({**RECIPE, "weighting": {"kind": "uniform"}}, tmp_path)
    with pytest.raises(SpecError, match="aim is 'best'"):
        fedalloy.advise(RECIPE, tmp_path, aim="best")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="minutes is 0"):
        fedalloy.advise(RECIPE, tmp_path, minutes=0)
    with pytest.raises(SpecError, match="unknown setting 'algoritm'"):
        fedalloy.advise(RECIPE, tmp_path, algoritm="fedavg")  # type: ignore[call-arg]


def _effects(metric: str, higher: bool, values: dict[str, list[float]]) -> list[Effect]:
    return effects(
        [
            RunOutcome(name, seed, "finished", metric=metric, higher_is_better=higher,
                       scores={"mean": one, "worst_served": -one})
            for name, scores in values.items() for seed, one in enumerate(scores)
        ],
        (),
    )  # fmt: skip


def test_the_direction_of_a_metric_decides_what_beats() -> None:
    lower = {"fedavg": [1.0, 1.1, 1.2, 1.3], "ditto": [0.5, 0.61, 0.7, 0.82]}
    as_loss, as_score = _effects("loss", False, lower), _effects("accuracy", True, lower)
    winner = chosen(as_loss, "mean", False)
    assert winner is not None
    assert winner.name == "ditto"
    said = first_line(as_loss, "mean", "loss", False)
    assert said.startswith("Use ditto: it beats FedAvg in loss by -0.4")
    assert said.endswith("4 seeds; lower is better)."), "a negative difference that is better needs a word"
    assert chosen(as_score, "mean", True) is None
    assert first_line(as_score, "mean", "accuracy", True).startswith("Nothing beats FedAvg in accuracy here")
    worst = chosen(as_score, "worst", True)
    assert worst is not None, "the worst-served tenth is its own score"
    spread = as_loss[0].scores["mean"]
    assert isinstance(spread, Spread)
    failed = [one for one in as_loss if one.name == "fedavg"]
    assert first_line(failed, "mean", "loss", False) == "No other method could be tried: FedAvg it is."


def test_the_first_round_of_a_run_is_not_what_a_round_costs(tmp_path: Path) -> None:
    """It has preparations too, which took a hundred times as long as a round on a busy machine."""
    recipe = {"partition": {"clients": 3}, "run": {"rounds": 5}}
    done = fedalloy.compare(recipe, ["fedavg"], tmp_path, processes=1)
    (run,) = done.outcomes
    assert run.folder is not None
    file = run.folder / "timings.jsonl"
    first, *rest = (json.loads(line) for line in file.read_text().splitlines())
    rows = [{**first, "clients": 1000.0}, *({**row, "clients": 0.5} for row in rest)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert 0.5 < cost_of([run]).seconds < 1.0


def test_what_cannot_work_is_said_before_the_pilot(tmp_path: Path) -> None:
    """Nothing is trained before it."""
    for changes, said in (
        ({"seeds": [0, 0]}, "names a seed twice"),
        ({"seeds": [3, 1001]}, "run.seeds has 1001, on which the search runs"),
        ({"minutes": float("inf")}, "minutes is inf"),
        ({"methods": ["ditto"], "one_model": True}, "gives every client a model of its own"),
        ({"without": ["hart"]}, "did you mean 'heart'"),
        ({"tune_space": {"algorithm.muu": [0.1, 0.2]}}, "no method has this argument"),
        ({"tune_space": {"partition.alpha": [0.1, 0.2]}}, "no method has this argument"),
    ):
        table = {**RECIPE, "tune": {"space": changes.pop("tune_space", {})}}
        with pytest.raises(SpecError, match=said):
            fedalloy.advise(table, tmp_path, **{"minutes": SHORT, **changes})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="the task has no validation parts"):
        fedalloy.advise(fedalloy.task("digits", clients=3), tmp_path, minutes=SHORT, seeds=[5])
    assert not tmp_path.exists() or not any(tmp_path.iterdir())


def test_a_range_for_one_methods_argument_reaches_that_method_alone(tmp_path: Path) -> None:
    table = {**RECIPE, "tune": {"space": {"algorithm.lam": [0.25, 0.75]}}}
    found = fedalloy.advise(table, tmp_path, minutes=SHORT, methods=["ditto"], processes=1)
    tuned = found.record["tuned"]
    assert tuned["ditto"]["best"]["algorithm.lam"] in (0.25, 0.75)
    assert "algorithm.lam" not in tuned["fedavg"]["best"]


def test_a_named_method_that_the_cohort_does_not_suit_is_not_tried(tmp_path: Path) -> None:
    found = fedalloy.advise(
        {**RECIPE, "sampling": {"cohort": 2}}, tmp_path, minutes=SHORT, methods=["afl"], processes=1
    )
    (afl,) = (one for one in found.candidates if one.name == "afl")
    assert "needs every client in every round" in afl.refused
    assert not (tmp_path / "tuning" / "afl").exists()
    assert any(line.startswith("Tried: fedavg (1 method with 1 trial).") for line in found.lines)


def test_no_answer_rests_on_runs_that_are_not_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is killed in the last stage leaves fewer seeds; the same command does the rest."""
    asked: dict[str, Any] = {"minutes": SHORT, "methods": ["ditto"], "processes": 1}

    def dying(job: Job, tell: Watcher, *held: HeldTasks | None) -> JobNews:
        broken = "tuning" not in job.folder.parts and job.seed == 3
        dead = JobNews(job, "broken", text="its process died", state="interrupted")
        return dead if broken else work(job, tell, *held)

    with monkeypatch.context() as patched:
        patched.setattr(jobs, "work", dying)
        with pytest.raises(CheckpointError, match=r"seed 3: its process died.*the same command continues"):
            fedalloy.advise(RECIPE, tmp_path, **asked)
    assert not (tmp_path / "advice.json").exists()
    assert all(one.evidence["mean"].pairs == 4 for one in fedalloy.advise(RECIPE, tmp_path, **asked).effects[1:])


def test_a_later_session_does_not_change_what_an_earlier_stage_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The searches of a later stage have more trials; the stage before keeps its number."""
    monkeypatch.setattr(pilot, "kept_after", lambda stage: 0.0)
    asked: dict[str, Any] = {"minutes": SHORT, "methods": ["fedprox"], "rounds": 2, "processes": 1}
    fedalloy.advise(RECIPE, tmp_path, **asked)
    record = json.loads((tmp_path / "advise.json").read_text())
    before = record["stages"][0]["trials"]
    record["stages"] = [record["stages"][0], {"methods": ["fedavg", "fedprox"], "trials": before + 1}]
    (tmp_path / "advise.json").write_text(json.dumps(record))
    for name in ("fedavg", "fedprox"):
        shutil.rmtree(tmp_path / name)
    for _ in range(2):
        found = fedalloy.advise(RECIPE, tmp_path, **asked)
        assert [one["trials"] for one in found.record["stages"]] == [before, before + 1]


def test_an_answer_says_that_nothing_was_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one trial FedAvg has the recipe's steps, and a method that takes longer ones may beat it by that alone."""
    asked: dict[str, Any] = {"minutes": SHORT, "methods": ["fedprox"], "rounds": 2, "processes": 1}
    alone = fedalloy.advise(RECIPE, tmp_path / "one", **asked)
    assert sum(line.startswith("No method was tuned") for line in alone.lines) == 1
    monkeypatch.setattr(pilot, "kept_after", lambda stage: 0.0)
    more = fedalloy.advise(RECIPE, tmp_path / "more", **asked)
    assert len(more.record["tuned"]["fedavg"]["tried"]) > 1
    assert not any(line.startswith("No method was tuned") for line in more.lines)


def test_an_advice_about_a_task_in_python_is_an_algorithm_to_run(tmp_path: Path) -> None:
    task = fedalloy.task("digits", "logistic", clients=3, valid_fraction=0.2)
    found = fedalloy.advise(task, tmp_path, minutes=SHORT, methods=["fedprox"], rounds=2, processes=1)
    assert fedalloy.fit(found.algorithm, task, rounds=1).last("accuracy")["mean"] > 0
