"""A worker of a comparison makes the task of a seed once, and runs on it are those of a fresh one."""

import json

import pytest

from fedalloy.experiment.recipe import parse, resolve
from fedalloy.studies.compare.held import HeldTasks
from fedalloy.studies.compare.jobs import Job, run_jobs
from fedalloy.tasks.datasets.digits import Digits


def recipe(seed=0, algorithm="fedavg", **task):
    return {
        "task": {"dataset": "digits", "model": {"kind": "mlp", "hidden": [8]}, **task},
        "partition": {"kind": "iid", "clients": 3},
        "algorithm": {"name": algorithm},
        "run": {"rounds": 2, "seeds": [seed]},
        "engine": {"kind": "batched", "threads": 1},
    }


@pytest.fixture
def loads(monkeypatch):
    """One entry for every time that the data are read."""
    seen, load = [], Digits.load

    def counted(self, key):
        seen.append(1)
        return load(self, key)

    monkeypatch.setattr(Digits, "load", counted)
    return seen


def rows(folder):
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def test_a_comparison_reads_the_data_once_for_every_seed(tmp_path, loads):
    asked = [("fedavg", 0), ("ditto", 0), ("fedavg", 1), ("ditto", 1)]
    jobs = [Job(name, seed, recipe(seed, name), tmp_path / f"{name}-{seed}") for name, seed in asked]
    assert not run_jobs(jobs, 1, lambda news: None)
    assert len(loads) == 2
    for name, seed in asked:
        resolve(parse(recipe(seed, name))).run(tmp_path / f"alone-{name}-{seed}")
        assert rows(tmp_path / f"{name}-{seed}") == rows(tmp_path / f"alone-{name}-{seed}")


def made(held, given):
    return held.within(resolve(parse(given))).task()


@pytest.mark.parametrize(
    "other",
    [
        recipe(1),
        recipe(test_fraction=0.3),
        recipe() | {"partition": {"kind": "iid", "clients": 4}},
        recipe() | {"noise": {"kind": "pair", "ratio": 0.2}},
    ],
)
def test_what_the_task_depends_on_makes_another_one(other):
    held = HeldTasks()
    first = made(held, recipe())
    assert made(held, other) is not first
    assert made(held, recipe()) is first


def test_data_that_may_be_others_later_are_read_every_time(tmp_path):
    (tmp_path / "data.csv").write_text("client,x,y\n" + "\n".join(f"{k % 2},{k},{k % 2}" for k in range(20)))
    given = {**recipe(), "task": {"dataset": str(tmp_path)}, "partition": {}}
    held = HeldTasks()
    assert made(held, given) is not made(held, given)
    assert len(held) == 0


def test_tasks_are_kept_up_to_a_size(loads):
    size = HeldTasks(most_mb=1)  # digits take half a megabyte
    for seed in (0, 1, 2):
        made(size, recipe(seed))
    assert 1 <= len(size) < 3
    none = HeldTasks(most_mb=0.1)
    made(none, recipe())
    assert len(none) == 0
