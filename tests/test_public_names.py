"""What users import: the public names, every rule by its class, and old paths that go on for one version."""

from __future__ import annotations

import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest

import fedalloy
from fedalloy import methods
from fedalloy._moved import MOVED
from fedalloy.core import registry
from fedalloy.core.errors import SpecError

SOURCE = Path(__file__).resolve().parents[1] / "src"


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


def test_a_misspelt_rule_is_told_what_there_is():
    with pytest.raises(AttributeError, match="did you mean 'Prox'"):
        methods.Proxx  # noqa: B018


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
