"""How processes are started: forks of a loaded one, or as Flower does it where Flower looks different."""

from __future__ import annotations

import ast
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import flwr
from flwr.app import ConfigRecord, RecordDict

import fedalloy
from fedalloy.flower import compatibility, prefork, programs
from fedalloy.flower.compatibility import PREFORK, differences
from fedalloy.flower.config import QUIET, NodeConfig
from fedalloy.flower.prefork.fallback import Fallback
from fedalloy.flower.prefork.forkserver import Prefork, Starter, entry
from fedalloy.flower.prefork.polling import Backoff

pytestmark = pytest.mark.flower
SOURCE = Path(flwr.__file__).parent
NODE = "supernode/start_client_internal.py"
EXECUTOR = "supercore/superexec/executor/subprocess_executor.py"
PULLING = "supercore/inflatable/inflatable_utils.py"


@pytest.fixture
def undecided(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody has said which way to take, and Flower was not looked at yet."""
    monkeypatch.delenv(prefork.SWITCH, raising=False)
    prefork._looks_different.cache_clear()
    yield
    prefork._looks_different.cache_clear()


class TestWhichFlower:
    def test_the_installed_one_is_built_as_we_think(self):
        """Where it is not, processes are started as Flower does it: right, but slow. Then this is where to look."""
        assert differences() == []
        for program in ("flower-superlink", "flower-supernode", "flower-superexec", "flwr-clientapp", "flwr-serverapp"):
            assert callable(entry(program))

    @pytest.mark.parametrize(
        ("file", "old", "new", "why"),
        [
            (NODE, "subprocess.Popen(command)", "kept = subprocess.Popen(command)", "keeps the processes it starts"),
            (NODE, "subprocess.Popen(command)", "subprocess.run(command)", "uses run of 'subprocess' instead of Popen"),
            (NODE, "import time\n", "from time import sleep\n", "uses nothing of 'time' instead of sleep"),
            (EXECUTOR, "import subprocess\n", "import subprocess as sp\n", "uses nothing of 'subprocess'"),
            (PULLING, "    initial_backoff: float =", "    first_backoff: float =", "uses nothing of 'pull_objects'"),
            (EXECUTOR, None, "", "there is no such module"),
        ],
    )
    def test_one_that_is_built_differently_is_noticed(self, file, old, new, why, tmp_path):
        for hook in PREFORK:
            name = "/".join(hook.module.split(".")[1:]) + ".py"
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(SOURCE / name, tmp_path / name)
        assert differences(tmp_path) == []
        text = (tmp_path / file).read_text()
        if old is None:
            (tmp_path / file).unlink()
        else:
            assert old in text
            (tmp_path / file).write_text(text.replace(old, new))
        assert why in "\n".join(differences(tmp_path))

    def test_it_is_used_and_one_that_differs_is_left_alone_with_one_warning(self, undecided, monkeypatch, caplog):
        assert isinstance(prefork.launcher(), Prefork)
        prefork._looks_different.cache_clear()
        monkeypatch.setattr(compatibility, "installed", lambda: "1.99.0")
        with caplog.at_level(logging.WARNING, "fedalloy"):
            assert isinstance(prefork.launcher(), Fallback)
            assert isinstance(prefork.launcher(), Fallback)
        (said,) = caplog.messages
        assert said == "processes are started in Flower's own, slower way: flwr 1.99.0 was not tested, 1.41 was"

    def test_the_variable_decides_without_a_word(self, undecided, monkeypatch, caplog):
        monkeypatch.setattr(compatibility, "differences", lambda: pytest.fail("it was decided"))
        for said, chosen in ((prefork.OFF, Fallback), (prefork.ON, Prefork)):
            monkeypatch.setenv(prefork.SWITCH, said)
            assert isinstance(prefork.launcher(), chosen)
        assert not caplog.messages

    def test_what_is_started_knows_which_way_was_chosen(self, tmp_path):
        for way, said in ((Fallback(), prefork.OFF), (Prefork(), prefork.ON)):
            assert way.environment(tmp_path)[prefork.SWITCH] == said
            assert way.command("flower-superlink")[-2:] == ["fedalloy.flower.prefork", "flower-superlink"]
            path = way.environment(tmp_path)["PATH"]
            assert shutil.which("flower-superexec", path=path) == str(tmp_path / "bin" / "flower-superexec")

    def test_where_every_order_is_a_process_orders_are_asked_for_less_often(self, tmp_path):
        asked = [
            programs.environment(way, tmp_path)["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] for way in (Fallback(), Prefork())
        ]
        assert asked == ["0.5", "0.1"]


REPLACED = """
import importlib, json
from fedalloy.flower.compatibility import PREFORK
from fedalloy.flower.prefork import forkserver

forkserver.forking = lambda run, place, program, starting=None: setattr(place, "subprocess", None) or run
places = [importlib.import_module(hook.module) for hook in PREFORK]

def everything():
    # A function by the place where it is defined, with the default that matters.
    found = {}
    for place in places:
        for name, value in vars(place).items():
            defaults = getattr(value, "__kwdefaults__", None) or {}
            key = (value.__module__, value.__name__) if "initial_backoff" in defaults else (place.__name__, name)
            found[key] = id(value), defaults.get("initial_backoff")
    return found

before = everything()
for program in ("flower-superlink", "flower-supernode", "flower-superexec", "flwr-clientapp", "flwr-serverapp"):
    forkserver.preforked(program, print)
after = everything()
print(json.dumps(sorted(key for key in before if before[key] != after[key])))
"""


def test_what_is_replaced_is_what_is_named_and_nothing_else():
    done = subprocess.run(
        [sys.executable, "-c", REPLACED], env=surroundings(), capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(done.stdout) == sorted([hook.module, hook.name] for hook in PREFORK)
    assert all(hook.reason for hook in PREFORK)


def surroundings() -> dict[str, str]:
    return {**os.environ, **QUIET, "PYTHONPATH": str(Path(fedalloy.__file__).parents[1])}


def test_nothing_of_ours_is_replaced_while_it_runs():
    """No module of ours assigns to a name of another one of ours."""
    ours = [path for path in Path(fedalloy.__file__).parent.rglob("*.py") if "flower" in str(path.relative_to(SRC))]
    assert ours
    assert [found for path in ours for found in assigned(path.read_text())] == []
    assert assigned("from fedalloy.flower import node\nnode.local_task = 1") == ["node.local_task"]
    assert assigned("import fedalloy.flower.node as n\nsetattr(n, 'x', 1)") == ["n"]


SRC = Path(fedalloy.__file__).parent


def assigned(code: str) -> list[str]:
    """Attributes of imported modules of ours to which a module assigns."""
    tree = ast.parse(code)
    imported = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).startswith("fedalloy")
    }  # fmt: skip
    targets = [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    set_here = [one for one in targets if isinstance(one, ast.Attribute)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr"]
    return [ast.unparse(one) for one in set_here if ast.unparse(one.value) in imported] + [
        ast.unparse(call.args[0]) for call in calls if ast.unparse(call.args[0]) in imported
    ]


def test_a_node_looks_often_after_work_and_seldom_without():
    now = [0.0]
    backoff = Backoff(0.3, 3.0, at_work=0.5, clock=lambda: now[0])
    assert backoff.delay(3) == 0.3
    now[0] = 10.0
    assert backoff.delay(3) == 1.0
    now[0] = 1000.0
    assert backoff.delay(3) == 3.0
    assert backoff.delay(0.5) == 0.1, "it waits for the end of an order"
    assert backoff.delay(3) == 0.3
    assert backoff.monotonic is time.monotonic, "else it is the module"


def test_an_order_goes_to_the_template_and_to_a_process_when_there_is_none(tmp_path):
    reading, writing = os.pipe()
    starter = Starter("flwr-clientapp", writing)
    assert starter(["flwr-clientapp", "--token", "x"], stdout=subprocess.DEVNULL) is None
    assert json.loads(os.read(reading, 1000)) == {"arguments": ["flwr-clientapp", "--token", "x"], "silent": True}
    os.close(reading)
    for program in ("touch", "other"):
        starter = Starter(program, writing)
        process = starter(["touch", str(tmp_path / program)])
        assert process is not None
        assert process.wait(60) == 0
        assert (tmp_path / program).exists()
    os.close(writing)


FORKS = """
import json, os, subprocess, sys, types
import numpy as np
from fedalloy.flower.prefork import forkserver

folder, changed = sys.argv[1:]
place = types.ModuleType("place")
place.subprocess = subprocess

def work():
    told = {"parent": os.getppid(), "draw": float(np.random.rand()), "words": sys.argv[1:]}
    with open(f"{folder}/{sys.argv[1]}.part", "w") as file:
        json.dump(told, file)
    os.rename(f"{folder}/{sys.argv[1]}.part", f"{folder}/{sys.argv[1]}.json")

forkserver.preforked = lambda program, run, loaded: run
forkserver.entry = lambda program: work
if changed:
    forkserver._versions = lambda packages: os.getpid()  # another one in every fork

def give_orders():
    for name in "ab":
        assert place.subprocess.Popen(["touch", f"{folder}/{name}" if changed else name]) is None

forkserver.forking(give_orders, place, "touch")()
"""


def wait_for_files(*files: Path) -> None:
    end = time.monotonic() + 300
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, f"{files} did not come"
        time.sleep(0.05)


def run_forks(folder: Path, changed: str) -> None:
    subprocess.run([sys.executable, "-c", FORKS, str(folder), changed], env=surroundings(), check=True, timeout=300)


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
    folder = prefork.write_stand_in(tmp_path / "with 'quotes'")
    script = folder / "flower-superexec"
    before = script.stat().st_mtime_ns
    assert prefork.write_stand_in(folder) == folder
    assert script.stat().st_mtime_ns == before
    done = subprocess.run([script, "--version"], env=surroundings(), capture_output=True, text=True, timeout=300)
    assert "Flower version" in done.stdout


def test_without_a_worker_the_answer_is_made_here_in_the_store_with_its_log(tmp_path, monkeypatch):
    """A node that is configured wrongly, which its log says too."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    store, before = tmp_path / "store", Path.cwd()
    content = Fallback().respond(
        store, {"fedalloy-clint": "0"}, RecordDict({"fedalloy": ConfigRecord({"header": "{}"})})
    )
    assert "not configured properly" in str(content.config_records["fedalloy"]["header"])
    assert "unknown key 'fedalloy-clint'" in (store / "node.log").read_text()
    right = NodeConfig("0", "recipe", store).to_keys()
    Fallback().respond(store, right, RecordDict({"fedalloy": ConfigRecord({"header": "{}"})}))
    assert json.loads((store / "audit.jsonl").read_text())["status"] == "refused"
    assert Path.cwd() == before
    for handler in logging.getLogger().handlers:
        handler.close()
