"""What users import: the public names, every rule by its class, and old paths that go on for one version."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import warnings
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import get_type_hints

import pytest

import fedalloy
from fedalloy import methods
from fedalloy._moved import MOVED
from fedalloy.core import registry
from fedalloy.core.errors import SpecError
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.describing import PATHS
from fedalloy.experiment.settings import AdviceSettings, ComparisonSettings, FitSettings, SearchSettings
from fedalloy.methods.solvers.settings import LocalSettings
from fedalloy.methods.solvers.training import LocalTraining
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.settings import TaskSettings

SOURCE = Path(__file__).resolve().parents[1] / "src"
USERS_FILE = """
import numpy as np
import torch
import fedalloy
from fedalloy.methods import AaggffD, Momentum, Prox, Sgd

data = {"a": (np.zeros((4, 2)), np.zeros(4)), "b": (np.zeros((4, 2)), np.zeros(4))}
task = fedalloy.task(data, "logistic", test_fraction=0.5, kind="regression")
fair = fedalloy.Algorithm(Prox(0.01, lr=0.1), AaggffD(), Momentum())
result = fedalloy.fit(fair, task, rounds=2, cohort=0.5, metrics=["mae"], engine="loop")
outputs: torch.Tensor = result.predict(np.zeros((1, 2)))
comparison = fedalloy.compare(task, ["fedavg"], "runs", seeds=range(3), evaluate_every=2, rounds=3)
mean = comparison.rows[0].mean
head: torch.nn.Linear = fedalloy.load("saved").module(torch.nn.Linear(2, 1))
fedalloy.task(data, test_fracton=0.5)  # wrong
fedalloy.fit("fedavg", task, evaluate_evry=2)  # wrong
fedalloy.compare(task, ["fedavg"], engine=3)  # wrong
Sgd(lrr=0.1)  # wrong
fedalloy.algorithms.fedavg(lrr=0.1)  # wrong
fedalloy.fitt  # wrong
result.lst()  # wrong
mean.text()  # wrong
"""


@pytest.mark.parametrize("name", fedalloy.__all__)
def test_every_public_name_is_there(name):
    assert getattr(fedalloy, name) is not None
    assert name in dir(fedalloy)


@pytest.mark.parametrize("kind", ["solver", "weighting", "server", "wire"])
def test_every_rule_is_there_by_its_class_name(kind):
    rules = [rule for rule in registry.everything(kind).values() if isinstance(rule, type)]
    assert rules
    for rule in rules:
        assert getattr(methods, rule.__name__) is rule
        assert rule.__name__ in dir(methods)


def test_a_type_checker_knows_every_rule_by_its_class_name():
    """At run time the rules are found in the registry, which a type checker does not run."""
    text = (SOURCE / "fedalloy" / "methods" / "__init__.py").read_text(encoding="utf-8")
    (block,) = (one for one in ast.parse(text).body if isinstance(one, ast.If))
    known = {
        f"{one.module}:{name.asname}" for one in block.body if isinstance(one, ast.ImportFrom) for name in one.names
    }
    kinds = ("solver", "weighting", "server", "wire")
    rules = [rule for kind in kinds for rule in registry.everything(kind).values() if isinstance(rule, type)]
    assert known == {f"{rule.__module__}:{rule.__name__}" for rule in rules if rule.__module__.startswith("fedalloy.")}


def test_a_type_checker_knows_every_setting():
    """Further settings are typed beside the code that takes them; none is missing, and none is there too many."""
    run = {field.name for field in fields(RunConfig)} - {"rounds", "seed"}
    assert run == {*get_type_hints(FitSettings)}
    compared = {*PATHS, "sampling", "devices", "engine", "engine_options", "cohort"}
    assert {*get_type_hints(ComparisonSettings)} == compared - {"rounds"}
    assert {*get_type_hints(SearchSettings)} == compared | {"seeds"}
    assert {*get_type_hints(AdviceSettings)} == compared | {"seeds", "tuning_seeds"}
    assert {*get_type_hints(LocalSettings)} == {field.name for field in fields(LocalTraining)}
    wanted = get_type_hints(make_task)
    keyword_only = [
        one.name for one in inspect.signature(make_task).parameters.values() if one.kind is one.KEYWORD_ONLY
    ]
    assert get_type_hints(TaskSettings) == {name: wanted[name] for name in keyword_only}


def test_an_editor_is_told_what_a_users_file_gets_wrong(tmp_path):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "mine.py").write_text(USERS_FILE)
    # With the project's own settings, so that what it keeps of torch and the library is used: seconds, not a minute.
    kept = ["--config-file", str(SOURCE.parent / "pyproject.toml"), "--cache-dir", str(SOURCE.parent / ".mypy_cache")]
    told, _, code = api.run([*kept, str(tmp_path / "mine.py")])
    lines = USERS_FILE.splitlines()
    wrong = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
    found = {int(line.split(":")[1]) for line in told.splitlines() if ": error: " in line}
    assert (code, found) == (1, wrong), told


def test_a_misspelt_rule_is_told_what_there_is():
    with pytest.raises(AttributeError, match="did you mean 'Prox'"):
        methods.Proxx  # type: ignore[attr-defined]  # noqa: B018


OLD = {
    "fedalloy.solvers.prox": "fedalloy.methods.solvers.prox",
    "fedalloy.weightings.aaggff_d": "fedalloy.methods.weightings.aaggff_d",
    "fedalloy.servers.momentum": "fedalloy.methods.servers.momentum",
    "fedalloy.records.reading": "fedalloy.experiment.records.reading",
    "fedalloy.run.fit": "fedalloy.experiment.fit",
    "fedalloy.reproduce.judging": "fedalloy.studies.reproduce.judging",
    "fedalloy.engines.flower": "fedalloy.flower.engine",
    "fedalloy.track.tracker": "fedalloy.experiment.tracking",
    **MOVED,
}
CHECK = """
import sys, warnings
from importlib import import_module
for old, new in OLD.items():
    known = old in sys.modules  # as the parent of one before, with a warning then
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        exec(f"import {old}")
    found = sys.modules[old]
    assert import_module(new) is found, f"{new} was loaded twice"
    assert found.__name__ == found.__spec__.name == new, (old, found.__spec__)
    assert known or any(f"{old} is now {new}" in str(one.message) and one.filename == "<string>" for one in told)
"""


def test_an_old_path_gives_the_module_of_the_new_one():
    """In a process of its own, where nothing has been imported by either name."""
    command = [sys.executable, "-c", f"OLD = {OLD!r}\n{CHECK}"]
    env = {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_module_that_never_was_is_not_found():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of its parent
        with pytest.raises(ModuleNotFoundError, match="nothing"):
            import_module("fedalloy.solvers.nothing")


def test_compare_takes_tables_and_files(tmp_path):
    tables = {"run": {"rounds": 1, "seeds": [0]}, "partition": {"clients": 2}, "compare": [{"name": "fedavg"}]}
    found = fedalloy.compare(tables, tmp_path / "runs", processes=1)
    assert [(row.name, row.seeds) for row in found.rows] == [("fedavg", (0,))]
    with pytest.raises(SpecError, match="there is no recipe"):
        fedalloy.compare(tmp_path / "nothing.toml", tmp_path / "other")


def test_old_programs_still_run():
    command = [sys.executable, "-W", "ignore", "-m", "fedalloy.docs", "--check"]
    env = {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, env=env, cwd=SOURCE.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_star_brings_the_rules_alone():
    names: dict[str, object] = {}
    exec("from fedalloy.methods import *", names)
    assert {"Prox", "AaggffD"} <= names.keys()
    assert "Any" not in names


SCRIPT = """
import fedalloy
tables = {"run": {"rounds": 1, "seeds": [0, 1]}, "partition": {"clients": 2}, "compare": [{"name": "fedavg"}]}
GUARDfedalloy.compare(tables, "runs", processes=2)
"""


@pytest.mark.parametrize("guarded", [True, False])
def test_a_script_without_a_guard_is_told_so(tmp_path, guarded):
    guard = 'if __name__ == "__main__": ' if guarded else ""
    (tmp_path / "script.py").write_text(SCRIPT.replace("GUARD", guard))
    env = {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == guarded, done.stderr
    assert ("put the call of fedalloy.compare under" in done.stderr) != guarded


@pytest.mark.parametrize("processes", ["2", 0, -3, 1.5, True])
def test_a_wrong_number_of_processes_is_refused(tmp_path, processes):
    with pytest.raises(SpecError, match="processes is"):
        fedalloy.compare({}, tmp_path, processes=processes)
