"""Flower's programs, loaded once: what forks do, what happens without them, and how often is looked for work."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import fedalloy
from fedalloy.flower import warm

pytestmark = pytest.mark.flower


def test_flower_is_built_as_we_think():
    """Where it is not, processes are started as Flower does it: right, but slow. Then this is where to look."""
    node, tasks = "flwr.supernode.start_client_internal", "flwr.supercore.superexec"
    for module, used in (
        (node, time), (node, subprocess),
        (f"{tasks}.run_superexec", time), (f"{tasks}.executor.subprocess_executor", subprocess),
    ):  # fmt: skip
        assert warm._using(module, used) is not None, f"{module} does not use {used.__name__}"
    place = importlib.import_module("flwr.supercore.inflatable.inflatable_utils")
    assert "initial_backoff" in place.pull_objects.__kwdefaults__
    for program in ("flower-superlink", "flower-supernode", "flower-superexec", "flwr-clientapp", "flwr-serverapp"):
        assert callable(warm.entry(program))


def test_a_node_looks_often_after_work_and_seldom_without():
    now = [0.0]
    gaps = warm.Gaps(0.3, 3.0, at_work=0.5, clock=lambda: now[0])
    assert gaps.gap(3) == 0.3
    now[0] = 10.0
    assert gaps.gap(3) == 1.0
    now[0] = 1000.0
    assert gaps.gap(3) == 3.0
    assert gaps.gap(0.5) == 0.1, "it waits for the end of an order"
    assert gaps.gap(3) == 0.3
    assert gaps.monotonic is time.monotonic, "else it is the module"


def test_an_order_goes_to_the_template_and_to_a_process_when_there_is_none(tmp_path):
    reading, writing = os.pipe()
    starter = warm.Starter("flwr-clientapp", writing)
    assert starter(["flwr-clientapp", "--token", "x"], stdout=subprocess.DEVNULL) is None
    assert json.loads(os.read(reading, 1000)) == {"arguments": ["flwr-clientapp", "--token", "x"], "silent": True}
    os.close(reading)
    for program in ("touch", "other"):
        starter = warm.Starter(program, writing)
        process = starter(["touch", str(tmp_path / program)])
        assert process is not None
        assert process.wait(60) == 0
        assert (tmp_path / program).exists()
    os.close(writing)


FORKS = """
import importlib, json, os, subprocess, sys, types
import numpy as np
from fedalloy.flower import warm

folder, changed = sys.argv[1:]
place = types.ModuleType("place")
place.subprocess = subprocess
sys.modules["place"] = place

def work():
    told = {"parent": os.getppid(), "draw": float(np.random.rand()), "words": sys.argv[1:]}
    with open(f"{folder}/{sys.argv[1]}.part", "w") as file:
        json.dump(told, file)
    os.rename(f"{folder}/{sys.argv[1]}.part", f"{folder}/{sys.argv[1]}.json")

warm.entry = lambda program: work
if changed:
    warm._versions = lambda packages: os.getpid()  # another one in every fork

def give_orders():
    for name in "ab":
        assert place.subprocess.Popen(["touch", f"{folder}/{name}" if changed else name]) is None

warm._forking(give_orders, "place", "touch")()
"""


def wait_for_files(*files: Path) -> None:
    end = time.monotonic() + 300
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, f"{files} did not come"
        time.sleep(0.05)


def run_forks(folder: Path, changed: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(fedalloy.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", FORKS, str(folder), changed], env=environment, check=True, timeout=300)


def test_forks_of_a_template_share_no_chance(tmp_path):
    run_forks(tmp_path, "")
    files = [tmp_path / f"{name}.json" for name in "ab"]
    wait_for_files(*files)
    one, other = (json.loads(file.read_text()) for file in files)
    assert (one["words"], other["words"]) == (["a"], ["b"])
    assert one["draw"] != other["draw"]


def test_what_was_replaced_on_disk_is_not_forked(tmp_path):
    """The program itself is started then: here it is ``touch``."""
    run_forks(tmp_path, "changed")
    wait_for_files(tmp_path / "a", tmp_path / "b")
    assert not list(tmp_path.glob("*.json"))


def test_flower_finds_our_way_of_starting_processes_first(tmp_path):
    folder = warm.write_stand_in(tmp_path / "with 'quotes'")
    script = folder / "flower-superexec"
    before = script.stat().st_mtime_ns
    assert warm.write_stand_in(folder) == folder
    assert script.stat().st_mtime_ns == before
    environment = {**os.environ, "PYTHONPATH": str(Path(fedalloy.__file__).parents[1])}
    done = subprocess.run([script, "--version"], env=environment, capture_output=True, text=True, timeout=300)
    assert "Flower version" in done.stdout
