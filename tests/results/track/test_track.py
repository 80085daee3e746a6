"""Trackers hear exactly what is recorded, and none of them can harm a run."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from fedalloy import algorithms
from fedalloy.core import registry
from fedalloy.core.errors import SpecError
from fedalloy.experiment.fit import fit
from fedalloy.experiment.records import snapshots
from fedalloy.experiment.records.reading import read_run
from fedalloy.experiment.records.scalars import scalars
from fedalloy.experiment.tracking import TrackedRun, make_trackers
from fedalloy.results.track.mlflow import MLflow
from fedalloy.results.track.wandb import WeightsAndBiases
from fedalloy.testing import small_task

TASK = small_task()


def train(folder, track, rounds=3, **more):
    chosen = algorithms.named("fedavg", lr=0.3, batch_size=4)
    return fit(chosen, TASK, rounds=rounds, engine="loop", folder=folder, track=track, **more)


def recorded(folder) -> dict[int, dict[str, float]]:
    """What the run's own records say, by round; seconds are the clock's."""
    return {row["round"]: scalars(row) for row in read_run(folder).rounds()}


class Listener:
    """Writes down what it is told."""

    def __init__(self, fails_in: int = 0) -> None:
        self.fails_in, self.told, self.ended = fails_in, list[TrackedRun](), list[tuple[str, str]]()
        self.heard: dict[int, dict[str, float]] = {}

    def begin(self, told):
        self.told.append(told)

    def log(self, round, values):
        if round == self.fails_in:
            raise ConnectionError("no network")
        self.heard.setdefault(round, {}).update(values)

    def end(self, state, reason):
        self.ended.append((state, reason))


def without_clock(heard):
    return {
        round: {name: value for name, value in values.items() if name != "seconds"} for round, values in heard.items()
    }


def test_a_tracker_hears_every_number_of_every_round(tmp_path):
    listener = Listener()
    result = train(tmp_path / "run", [listener])
    assert without_clock(listener.heard) == recorded(tmp_path / "run")
    assert all(values["seconds"] > 0 for values in listener.heard.values())
    assert listener.ended == [("finished", "")]
    assert [row["round"] for row in result.rounds()] == [1, 2, 3]
    for round, row in zip((1, 2, 3), result.clients(), strict=True):
        assert listener.heard[round]["evaluation/loss/worst_served"] == max(row["loss"])
        assert listener.heard[round]["evaluation/accuracy/worst_served"] == min(row["accuracy"])


def test_a_resumed_run_goes_on_where_it_counted(tmp_path):
    first, second = Listener(), Listener()

    def stop(event):
        if event.progress.round == 2:
            (tmp_path / "run" / "stop").touch()

    train(tmp_path / "run", [first], watcher=stop)
    assert first.ended == [("stopped", "stopped on request")]
    train(tmp_path / "run", [second], resume=True)
    assert second.told[0].round == 2
    assert {**without_clock(first.heard), **without_clock(second.heard)} == recorded(tmp_path / "run")


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(tmp_path):
    bad, good = Listener(fails_in=2), Listener()
    with pytest.warns(RuntimeWarning, match="Listener failed and is not called again: no network"):
        result = train(tmp_path / "run", [bad, good])
    assert result.status == "finished"
    assert (list(bad.heard), list(good.heard), bad.ended) == ([1], [1, 2, 3], [])
    train(tmp_path / "plain", [])
    same = [(tmp_path / name / "rounds.jsonl").read_bytes() for name in ("run", "plain")]
    assert same[0] == same[1], "tracking changes nothing"


def test_a_tracked_run_keeps_its_synthetic_samples(tmp_path):
    chosen, task = algorithms.named("fedcvae", lr=0.01, batch_size=4), small_task("cvae")
    for name, listeners in (("tracked", [Listener()]), ("plain", [])):
        fit(chosen, task, rounds=3, engine="loop", folder=tmp_path / name, track=listeners, snapshot_every=2)
        assert snapshots.rounds(tmp_path / name) == [2, 3]
    for round in (2, 3):
        (x, y), (plain_x, plain_y) = (snapshots.load(tmp_path / name, round) for name in ("tracked", "plain"))
        assert torch.equal(x, plain_x)
        assert torch.equal(y, plain_y)


def test_what_cannot_be_tracked_is_told_before_anything_is_made(tmp_path, monkeypatch):
    with pytest.raises(SpecError, match="did you mean 'tensorboard'"):
        train(tmp_path / "run", ["tensorbord"])
    with pytest.raises(SpecError, match="needs a folder"):
        train(None, [Listener()])
    for name in registry.names("tracker"):
        for module in ("torch.utils.tensorboard", "mlflow", "wandb"):
            monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(SpecError, match=r"pip install 'fedalloy\[track\]'"):
            make_trackers([name], tmp_path)
    assert not (tmp_path / "run").exists()


def test_trackers_are_registered_and_found_by_name(tmp_path, monkeypatch):
    assert registry.names("tracker") == ["mlflow", "tensorboard", "wandb"]
    monkeypatch.setattr(registry, "_rules", {category: dict(rules) for category, rules in registry._rules.items()})
    made: list[Listener] = []

    @registry.register("tracker", "listener")
    class Named(Listener):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    train(tmp_path / "run", ["listener", "listener"])
    assert [without_clock(one.heard) for one in made] == [recorded(tmp_path / "run")], "named twice, told once"


def test_tensorboard_files_hold_the_curves_also_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard (extra 'track')")
    code = """
import json, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from tests.results.track.test_track import train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
folder = Path(sys.argv[1])
def stop(event):
    if event.progress.round == 2:
        (folder / "stop").touch()
train(folder, ["tensorboard"], watcher=stop)
train(folder, ["tensorboard"], resume=True)
events = EventAccumulator(str(folder / "tensorboard"))
events.Reload()
read = {name: [[one.step, one.value] for one in events.Scalars(name)] for name in events.Tags()["scalars"]}
print(json.dumps(read))
"""
    read = json.loads(in_a_process(code, tmp_path / "run"))
    expected = recorded(tmp_path / "run")
    assert read.pop("seconds")
    assert set(read) == {name for values in expected.values() for name in values}
    for name, points in read.items():
        assert [step for step, _ in points] == [1, 2, 3]
        assert [value for _, value in points] == pytest.approx([expected[n][name] for n in (1, 2, 3)], rel=1e-6)


def in_a_process(code: str, folder: Path, **env: str) -> str:
    """These libraries change warnings, signals and more for the whole process: they get one of their own."""
    root = Path(__file__).resolve().parents[3]
    where = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", **env}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=folder.parent,
        env=where,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("mlflow", "sqlalchemy", "alembic"))),
    reason="needs the extra 'track' (MLflow)",
)
def test_mlflow_keeps_one_run_with_parameters_and_curves(tmp_path):
    code = """
import json, sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
from tests.results.track.test_track import train
folder = Path(sys.argv[1])
def stop(event):
    if event.progress.round == 2:
        (folder / "stop").touch()
train(folder, ["mlflow"], watcher=stop)
train(folder, ["mlflow"], resume=True)
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{folder.parent / 'mlflow.db'}")
(experiment,) = [one for one in client.search_experiments() if one.name == folder.parent.name]
(run,) = client.search_runs([experiment.experiment_id])
history = client.get_metric_history(run.info.run_id, "train_loss")
points = sorted((one.step, one.value) for one in history)
print(json.dumps([run.info.status, run.data.params["run.rounds"], points, sorted(run.data.metrics)]))
"""
    status, rounds, points, names = json.loads(in_a_process(code, tmp_path / "run", MLFLOW_TRACKING_URI=""))
    expected = recorded(tmp_path / "run")
    assert (status, rounds) == ("FINISHED", "3")
    assert points == [[n, pytest.approx(expected[n]["train_loss"])] for n in (1, 2, 3)]
    assert "evaluation/accuracy/mean" in names
    assert not (tmp_path / "mlruns").exists()


@pytest.mark.skipif(not importlib.util.find_spec("wandb"), reason="needs the extra 'track' (Weights & Biases)")
def test_wandb_writes_an_offline_run_without_a_key_or_a_network(tmp_path):
    code = """
import sys
from pathlib import Path
from tests.results.track.test_track import train
train(Path(sys.argv[1]), ["wandb"])
print("trained")
"""
    assert in_a_process(code, tmp_path / "run", WANDB_MODE="offline") == "trained"
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")  # complete once the process has ended
    assert file.read_bytes().count(b"train_loss") >= 3


# The two libraries are large: where they are not installed, stand-ins show what they would be told.


class Calls:
    """Remembers calls, whatever their name."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls, self.id, self.summary = calls, "abc", dict[str, Any]()
        self.info = types.SimpleNamespace(run_id="abc")
        self.experiment_id = "1"

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            self.calls.append((name, args, more))
            return None if name == "get_experiment_by_name" else self

        return call


def test_mlflow_is_told_in_batches(tmp_path, monkeypatch):
    calls: list[Any] = []
    entities = types.SimpleNamespace(Metric=lambda *values: values, Param=lambda *values: values)
    fake = types.SimpleNamespace(MlflowClient=lambda tracking_uri: Calls(calls), entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    train(tmp_path / "run", ["mlflow"])
    sent = [one for name, _, more in calls if name == "log_batch" for one in more.get("metrics", [])]
    heard: dict[int, dict[str, float]] = {}
    for name, value, _, round in sent:
        heard.setdefault(round, {})[name] = value
    assert without_clock(heard) == recorded(tmp_path / "run")
    assert [args[1] for name, args, _ in calls if name == "set_terminated"] == ["FINISHED"]
    assert json.loads((tmp_path / "run" / "track.json").read_text()) == {"mlflow": "abc"}
    calls.clear()
    again = MLflow()
    again.begin(TrackedRun(tmp_path / "run", "x", {}, 3))
    assert [name for name, _, _ in calls] == ["update_run"], "a resumed run is the same run"


def test_wandb_gets_a_round_at_once_and_stays_offline_without_a_key(tmp_path, monkeypatch):
    calls: list[Any] = []
    began: list[dict[str, Any]] = []

    def init(**more):
        began.append(more)
        return Calls(calls)

    fake = types.SimpleNamespace(init=init, Settings=lambda **more: more)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    train(tmp_path / "run", ["wandb"])
    assert (began[0]["mode"], began[0]["id"], began[0]["project"]) == ("offline", None, "fedalloy")
    heard = {more["step"]: args[0] for name, args, more in calls if name == "log"}
    assert without_clock(heard) == recorded(tmp_path / "run")
    assert [more for name, _, more in calls if name == "finish"] == [{"exit_code": 0}]
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    WeightsAndBiases().begin(TrackedRun(tmp_path / "run", "x", {}, 3))
    assert (began[1]["mode"], began[1]["id"], began[1]["resume"]) == ("online", "abc", "allow")
