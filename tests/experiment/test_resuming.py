"""One folder, one experiment: what a run may be resumed with, runs that are made longer, and resumes that fail."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedalloy
from fedalloy import algorithms
from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.core.fingerprint import portrait
from fedalloy.core.keys import Key
from fedalloy.core.types import Context
from fedalloy.engines.auto import Auto
from fedalloy.engines.batched import Batched
from fedalloy.engines.ray import Ray
from fedalloy.engines.workers import Workers
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.driver import run
from fedalloy.experiment.fit import RunResult, fit
from fedalloy.experiment.identity import _engine
from fedalloy.experiment.lengthening import tidy_snapshots
from fedalloy.experiment.recipe import load
from fedalloy.experiment.records import snapshots
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.sampling import BySize, Listed, UniformSampling
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.tasks.federation import FederatedTask
from fedalloy.testing import small_task

TASK = small_task()
RECORDS = ("rounds.jsonl", "clients.jsonl", "recipe.toml", "identity.json", "status.json")


def train(folder: Path | None, algorithm: Any = "fedavg", task: Any = TASK, **settings: Any) -> RunResult:
    chosen = algorithms.named(algorithm, lr=0.3, batch_size=4) if isinstance(algorithm, str) else algorithm
    return fit(chosen, task, folder=folder, **{"rounds": 3, "engine": "loop", **settings})


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---------------------------------------------------------------------------------------------- the same experiment


OTHER_DATA = small_task(sizes=(3, 5, 4, 2, 6))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"algorithm": "fedprox"}, "algorithm.solver"),
        ({"algorithm": algorithms.fedavg(lr=0.2, batch_size=4)}, "algorithm.solver.lr is 0.3 there, 0.2 here"),
        ({"seed": 1}, "run.seed is 0 there, 1 here"),
        ({"cohort": 2}, "sampling.size"),
        ({"sampling": BySize(3)}, "sampling"),
        ({"devices": DeviceProfile(success=0.5)}, "devices.success is 1.0 there, 0.5 here"),
        ({"task": OTHER_DATA}, "task.train"),
        ({"initial": {"output.bias": torch.ones(3, dtype=torch.float64)}}, "the values of initial differ"),
        ({"metrics": ("loss",), "target_metric": "loss"}, "run.metrics"),
        ({"evaluate_every": 2}, "run.evaluate_every is 1 there, 2 here"),
        ({"max_norm": 9.0}, "run.max_norm"),
        ({"engine": "batched"}, "engine"),
    ],
)
def test_another_experiment_is_refused_by_the_names_of_what_differs(tmp_path, changed, named):
    train(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="holds another experiment") as refused:
        train(tmp_path, resume=True, **changed)
    assert named in str(refused.value)
    after = contents(tmp_path)
    assert {**after, "lock": b""} == {**before, "lock": b""}


def test_the_driver_itself_refuses_whoever_calls_it(tmp_path):
    one, other = (algorithms.fedavg(lr=lr, batch_size=4) for lr in (0.3, 0.1))
    config = RunConfig(rounds=2, engine="loop")
    run(one, TASK, config, folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"algorithm\.solver\.lr is 0\.3 there, 0\.1 here"):
        run(other, TASK, config, folder=tmp_path, resume=True)


def test_one_number_in_the_data_makes_another_experiment(tmp_path):
    task = make_task("digits", "logistic", {"kind": "iid"}, 4, seed=0)
    fit("fedavg", task, rounds=1, folder=tmp_path, engine="loop")
    features = task.train.x.clone()
    features[7, 3] += 1e-6
    touched = replace(task, train=replace(task.train, x=features))
    with pytest.raises(CheckpointError, match=r"the values of task\.train\.x differ"):
        fit("fedavg", touched, rounds=1, folder=tmp_path, resume=True, engine="loop")
    dealt = make_task("digits", "logistic", {"kind": "dirichlet", "alpha": 0.1}, 4, seed=0)
    with pytest.raises(CheckpointError, match=r"task\.sizes"):
        fit("fedavg", dealt, rounds=1, folder=tmp_path, resume=True, engine="loop")
    deeper = make_task("digits", "mlp", {"kind": "iid"}, 4, seed=0)
    with pytest.raises(CheckpointError, match=r"task\.model\.structure"):
        fit("fedavg", deeper, rounds=1, folder=tmp_path, resume=True, engine="loop")
    again = make_task("digits", "logistic", {"kind": "iid"}, 4, seed=0)
    assert fit("fedavg", again, rounds=1, folder=tmp_path, resume=True, engine="loop").status == "finished"


@pytest.mark.parametrize(
    "free", [{"threads": 2}, {"checkpoint_every": 0.0}, {"client_memory_mb": 99.0}, {"profile": True}, {"cohort": 1.0}]
)
def test_what_changes_nothing_may_differ(tmp_path, free):
    train(tmp_path)
    assert train(tmp_path, resume=True, **free).status == "finished"


def test_defaults_and_names_are_resolved_before_anything_is_compared(tmp_path):
    fit("fedavg", TASK, rounds=2, folder=tmp_path, engine="loop", cohort=3)
    spelled = {"solver": {"kind": "sgd", "lr": 0.1, "epochs": 1}, "weighting": "samples", "server": "sgd"}
    assert fit(spelled, TASK, rounds=2, folder=tmp_path, resume=True, engine="loop", cohort=0.6).status == "finished"


def test_another_engine_is_allowed_by_a_flag_and_told(tmp_path):
    train(tmp_path, rounds=2)
    with pytest.raises(CheckpointError, match="--allow-engine-change"):
        train(tmp_path, rounds=4, resume=True, engine="batched")
    train(tmp_path, rounds=4, resume=True, engine="batched", allow_engine_change=True)
    told = json.loads((tmp_path / "identity.json").read_text())
    assert told["engine"]["kind"] == "batched"
    (change,) = told["engine_changes"]
    assert (change["after_round"], change["from"]["kind"], change["to"]["kind"]) == (2, "loop", "batched")
    assert train(tmp_path, rounds=4, resume=True, engine="batched").status == "finished"
    other = algorithms.fedavg(lr=0.1, batch_size=4)
    with pytest.raises(CheckpointError, match=r"algorithm\.solver\.lr"):
        train(tmp_path, other, rounds=4, resume=True, engine="loop", allow_engine_change=True)


def test_the_options_of_an_engine_object_are_those_of_its_name(tmp_path):
    train(tmp_path, rounds=2, engine=Batched(block=2, kernel="mapped"))
    for other in (Batched(block=3, kernel="mapped"), Batched(block=2), "batched"):
        with pytest.raises(CheckpointError, match=r"engine\.options\."):
            train(tmp_path, rounds=4, resume=True, engine=other)
    named = {"block": 2, "kernel": "mapped"}
    train(tmp_path, rounds=3, resume=True, engine="batched", engine_options=named)
    assert train(tmp_path, rounds=4, resume=True, engine=Batched(block=2, kernel="mapped")).status == "finished"


@pytest.mark.parametrize("used", [Auto(), Workers(), Ray(workers=2, address="auto")])
def test_what_an_engine_object_found_or_may_change_is_no_part_of_a_run(used):
    used.limit_threads(3)
    if isinstance(used, Auto):
        used.choice["engine"] = "loop"
    assert _engine(RunConfig(engine=used))["options"] == {}


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_the_flag_for_another_engine_lets_no_other_data_or_model_in(tmp_path, engine):
    task = fedalloy.task("digits", clients=2)
    assert isinstance(task, FederatedTask)
    train(tmp_path, task=task, rounds=2)
    moved = replace(task, train=replace(task.train, x=task.train.x + 1e-3))
    changed: list[dict[str, Any]] = [{"task": moved}, {"task": task, "initial": {"output.bias": torch.ones(10)}}]
    for one in changed:
        with pytest.raises(
            CheckpointError,
            match=r"the values of .* differ.*original settings \('fedalloy run .* --resume'\), or choose another",
        ):
            train(tmp_path, rounds=2, resume=True, engine=engine, allow_engine_change=True, **one)


def test_records_that_were_cut_are_told_before_anything_is_changed(tmp_path):
    train(tmp_path)
    (tmp_path / "rounds.jsonl").write_bytes(b"{}\n")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="changed from outside"):
        train(tmp_path, rounds=6, resume=True)
    assert {**contents(tmp_path), "lock": before["lock"]} == before


@pytest.mark.parametrize("folder", ["", 3, "a\0b"])
def test_a_folder_that_is_no_path_is_refused(folder):
    with pytest.raises((SpecError, CheckpointError), match=r"folder"):
        train(folder)


def test_a_run_begun_in_python_is_not_taken_up_by_its_folder_alone(tmp_path):
    train(tmp_path)
    with pytest.raises(SpecError, match=r"begun in Python.*fedalloy\.fit"):
        load(tmp_path)


def test_a_folder_of_an_earlier_version_is_compared_in_what_it_has(tmp_path):
    train(tmp_path)
    (tmp_path / "identity.json").unlink()
    with pytest.raises(CheckpointError, match=r"seeds is \[0\] there, \[1\] here"):
        train(tmp_path, resume=True, seed=1)
    assert train(tmp_path, resume=True).status == "finished"
    assert (tmp_path / "identity.json").exists(), "known from now on"
    with pytest.raises(CheckpointError, match=r"task\.train"):
        train(tmp_path, task=OTHER_DATA, resume=True)


def test_a_setting_that_is_new_since_then_counts_only_where_it_is_used(tmp_path):
    train(tmp_path)
    told = json.loads((tmp_path / "identity.json").read_text())
    del told["run"]["max_norm"], told["devices"]["deadline"]
    (tmp_path / "identity.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match=r"run\.max_norm is None there, 5\.0 here"):
        train(tmp_path, resume=True, max_norm=5.0)
    assert train(tmp_path, resume=True).status == "finished"


def test_fingerprints_are_stable_and_tell_things_apart():
    assert portrait(Listed(((0, 1),))) == {"kind": "Listed", "cohorts": [[0, 1]]}
    assert portrait(UniformSampling(3)) == {"kind": "Uniform", "cohort": 3}, "as folders of earlier versions say"
    assert portrait(UniformSampling(3)) != portrait(BySize(3))
    assert portrait({"a": torch.ones(2)}) != portrait({"a": torch.zeros(2)})
    assert portrait(tuple(range(1000))) != portrait((*range(999), 0))
    json.dumps(portrait([float("nan"), {"x": {1, 2}}, torch.tensor([1]), len, Sgd()]))


# ---------------------------------------------------------------------------------------------- longer runs

LONGER: dict[str, dict[str, Any]] = {
    "an evaluation at the end": {"evaluate_every": 5},
    "on the schedule": {"evaluate_every": 3},
    "patience": {"evaluate_every": 2, "patience": 1, "rounds": 30},
    "a target": {"evaluate_every": 4, "target": 0.4, "stop_at_target": True},
    "mixtures": {"algorithm": algorithms.named("superfed_mm", lr=0.3, batch_size=4, start=2), "mix_every": 4},
    "mixtures and a rare evaluation": {
        "algorithm": algorithms.named("superfed_mm", lr=0.3, batch_size=4, start=2), "evaluate_every": 5,
    },
    "files of scores": {"evaluate_every": 5, "parquet_from": 1},
    "files of scores of mixtures": {
        "algorithm": algorithms.named("superfed_mm", lr=0.3, batch_size=4, start=2), "evaluate_every": 2,
        "mix_every": 4, "parquet_from": 1,
    },
    "states on disk": {"algorithm": "scaffold", "cohort": 3, "evaluate_every": 5, "client_memory_mb": 0.0},
}  # fmt: skip


def files_of_scores(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "evaluations").glob("*")}


@pytest.mark.parametrize("case", LONGER)
def test_a_run_that_is_made_longer_is_the_one_that_was_asked_for_it_from_the_start(tmp_path, case):
    settings = dict(LONGER[case])
    long = settings.pop("rounds", 6)
    whole = train(tmp_path / "whole", rounds=long, **settings)
    for rounds in (3, 4, long):
        longer = train(tmp_path / "longer", rounds=rounds, resume=rounds > 3, **settings)
    for name in RECORDS:
        assert (tmp_path / "longer" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert files_of_scores(tmp_path / "longer") == files_of_scores(tmp_path / "whole")
    assert bool(files_of_scores(tmp_path / "whole")) == ("parquet_from" in settings)
    assert longer.ending.progress == whole.ending.progress
    assert longer.ending.reason == whole.ending.reason
    last = f"checkpoints/round-{whole.ending.progress.round:06d}.safetensors"
    assert (tmp_path / "longer" / last).read_bytes() == (tmp_path / "whole" / last).read_bytes()


def test_samples_kept_only_because_a_round_was_the_last_go_again(tmp_path):
    folder = RunFolder.create(tmp_path / "run", {}, {})
    for round in (4, 6, 8, 9):
        snapshots.save(folder.path, round, torch.zeros(1), torch.zeros(1))
    tidy_snapshots(folder, RunConfig(rounds=6, snapshot_every=4), after=8)
    assert snapshots.rounds(folder.path) == [4, 6, 8], "what comes after the checkpoint is made again"
    tidy_snapshots(folder, RunConfig(rounds=9, snapshot_every=4), after=8)
    assert snapshots.rounds(folder.path) == [4, 8]


@pytest.mark.parametrize("stage", ["identity", "records"])
def test_a_kill_while_a_run_is_made_longer_loses_nothing(tmp_path, monkeypatch, stage):
    train(tmp_path / "whole", rounds=6, evaluate_every=5)
    train(tmp_path / "run", rounds=3, evaluate_every=5)

    class Killed(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise Killed

    place = (
        "fedalloy.experiment.driver.reopen_last"
        if stage == "identity"
        else "fedalloy.experiment.records.folder.RunFolder.checkpoint"
    )
    monkeypatch.setattr(place, kill)
    with pytest.raises(Killed):
        train(tmp_path / "run", rounds=6, evaluate_every=5, resume=True)
    monkeypatch.undo()
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] != "finished"
    train(tmp_path / "run", rounds=6, evaluate_every=5, resume=True)
    for name in RECORDS:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_shorter_run_is_refused(tmp_path):
    train(tmp_path, rounds=4)
    with pytest.raises(CheckpointError, match=r"a run of 4 rounds, and 3 are requested: .* longer but not shorter"):
        train(tmp_path, rounds=3, resume=True)


@dataclass(frozen=True)
class Secretive(Sgd):
    def lr_at(self, round: int, rounds: int | None = None) -> float:
        return self.lr / (rounds or 1)


@pytest.mark.parametrize(
    ("algorithm", "why"),
    [
        (algorithms.fedavg(lr=0.3, batch_size=4, milestones=(0.5,)), "milestones are shares of the run"),
        (algorithms.named("superfed_mm", lr=0.3, batch_size=4, start=0.5), "start = 0.5 is the share of the run"),
        (replace(algorithms.fedavg(), solver=Secretive()), "the local step size depends on the number of rounds"),
    ],
)
def test_where_the_length_enters_a_longer_run_is_refused_with_the_reason(tmp_path, monkeypatch, algorithm, why):
    monkeypatch.setitem(registry._rules["solver"], "secretive", Secretive)
    train(tmp_path, algorithm)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=why):
        train(tmp_path, algorithm, rounds=4, resume=True)
    assert {**contents(tmp_path), "lock": b""} == {**before, "lock": b""}


def published() -> Iterator[Algorithm]:
    for name in registry.names("algorithm"):
        yield algorithms.named(name)
    yield algorithms.fedavg(milestones=(0.5, 0.75))
    yield algorithms.named("superfed_mm", start=1)
    yield algorithms.named("fedper", milestones=(0.5,))


def test_every_method_that_looks_at_the_length_says_so():
    """Rules are asked for the same early round of a short and of a long run."""
    for algorithm in published():
        seen = [_early(algorithm, rounds) for rounds in (4, 40)]
        assert (seen[0] != seen[1]) <= bool(algorithm.uses_length), algorithm


def _early(algorithm: Algorithm, rounds: int) -> list[Any]:
    solver, server = algorithm.solver, algorithm.server
    contexts = [Context(round, 3, Key.of(0), solver.lr_at(round, rounds), rounds) for round in (2, 3)]
    schedule = [server.step_at(ctx.round, ctx.rounds) for ctx in contexts] if hasattr(server, "step_at") else []
    begun = [solver.started(ctx) for ctx in contexts] if hasattr(solver, "started") else []
    return [[ctx.local_lr for ctx in contexts], schedule, begun]


# ---------------------------------------------------------------------------------------------- resumes that fail


def test_a_resume_that_fails_destroys_nothing(tmp_path):
    """Twenty rounds with clients/ briefly elsewhere became one row and no checkpoint."""
    settings: dict[str, Any] = {"rounds": 5, "client_memory_mb": 0.0, "checkpoint_every": 0.0}
    train(tmp_path / "run", "scaffold", **settings)
    shutil.move(tmp_path / "run" / "clients", tmp_path / "elsewhere")
    before = contents(tmp_path / "run")
    with pytest.raises(CheckpointError, match="none of the 2 checkpoints") as refused:
        train(tmp_path / "run", "scaffold", resume=True, **settings)
    assert "--start-over" in str(refused.value)
    assert str(refused.value).count("are missing in") == 2
    assert {**contents(tmp_path / "run"), "lock": b""} == {**before, "lock": b""}
    shutil.move(tmp_path / "elsewhere", tmp_path / "run" / "clients")
    assert train(tmp_path / "run", "scaffold", resume=True, **settings).status == "finished"


@pytest.mark.parametrize("gone", ["emptied", "away"])
def test_checkpoints_that_must_have_been_there_are_missed(tmp_path, gone):
    train(tmp_path)
    shutil.rmtree(tmp_path / "checkpoints")
    if gone == "emptied":
        (tmp_path / "checkpoints").mkdir()
    with pytest.raises(CheckpointError, match="although the run reached round 3"):
        train(tmp_path, resume=True)
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 3
    again = train(tmp_path, resume=True, start_over=True)
    assert again.status == "finished"
    assert RunFolder.open(tmp_path).latest() is not None


def test_starting_over_gives_the_run_again(tmp_path):
    train(tmp_path / "whole")
    train(tmp_path / "run")
    for file in (tmp_path / "run" / "checkpoints").iterdir():
        file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be used"):
        train(tmp_path / "run", resume=True)
    train(tmp_path / "run", resume=True, start_over=True)
    for name in RECORDS:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize("name", ["start_over", "allow_engine_change"])
def test_what_is_about_resuming_is_refused_without_it(tmp_path, name):
    with pytest.raises(SpecError, match=f"{name} .*is about a run that is resumed: give resume=True"):
        train(tmp_path / "run", **{name: True})
    assert not (tmp_path / "run").exists()


def test_client_states_that_lie_elsewhere_are_told_before_anything_is_cut(tmp_path):
    settings: dict[str, Any] = {"rounds": 3, "checkpoint_every": 0.0}
    train(tmp_path, "scaffold", **settings)
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match="client_memory_mb it began with"):
        train(tmp_path, "scaffold", resume=True, client_memory_mb=0.0, **settings)
    assert {**contents(tmp_path), "lock": b""} == {**before, "lock": b""}


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"run": 3, "engine": {}}'])
def test_a_damaged_identity_is_told(tmp_path, text):
    train(tmp_path)
    (tmp_path / "identity.json").write_text(text)
    with pytest.raises(CheckpointError, match="is damaged"):
        train(tmp_path, resume=True)
    (tmp_path / "recipe.toml").write_text("= broken")
    with pytest.raises(CheckpointError, match=r"recipe\.toml is damaged"):
        train(tmp_path, resume=True)
