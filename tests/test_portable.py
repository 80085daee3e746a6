"""What only Linux has is hidden, as on Windows: loop, batched, workers, records, comparison and report still run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.portable import PORTABLE

ROOT = Path(__file__).resolve().parents[1]

# Read by every process at its start, also by those that fedalloy starts: the libraries may use what they find, and
# then it is gone. ``fcntl`` stays with filelock, which has another way on every system.
SITE = """
import sys
if "resource_tracker" not in str(sys.orig_argv):
    import filelock, multiprocessing.spawn, multiprocessing.util, numpy, os, signal, socket, subprocess, tempfile
    import torch, torch.func, torch.multiprocessing
    import hiding
"""

HIDING = """
import os, signal, sys
MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty")
FUNCTIONS = ("fork", "forkpty", "register_at_fork", "pread", "pwrite", "sched_getaffinity", "fchmod", "fchown",
             "getuid", "geteuid", "getpgid", "killpg", "setsid", "statvfs", "uname", "O_NONBLOCK", "O_NOFOLLOW",
             "O_DIRECTORY", "mkfifo", "getloadavg", "nice")
SIGNALS = ("SIGKILL", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGCHLD")
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
for name in MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hidden())
for holder, names in ((os, FUNCTIONS), (signal, SIGNALS)):
    for name in names:
        if hasattr(holder, name):
            delattr(holder, name)
"""

RUNS = """
import os
import sys
from contextlib import suppress
from pathlib import Path
assert not hasattr(os, "fork")
with suppress(ImportError):
    import fcntl
    raise AssertionError("fcntl is not hidden")
import torch
import fedalloy
from fedalloy.experiment.records.lock import holder
from fedalloy.experiment.records.reading import read_run
place = Path(sys.argv[1])

def main():
    task = fedalloy.task("synthetic", clients=4)
    made = {
        engine: fedalloy.fit("fedavg", task, rounds=2, engine=engine, folder=place / engine, threads=2)
        for engine in ("loop", "batched", "workers", "auto")
    }
    for engine, result in made.items():
        assert result.status == "finished", engine
        for name, leaf in made["loop"].model.items():
            torch.testing.assert_close(result.model[name], leaf, msg=engine)
        assert holder(place / engine / "lock") is None
        assert read_run(place / engine).last_round == 2
    more = fedalloy.fit("fedavg", task, rounds=3, engine="loop", folder=place / "loop", resume=True, threads=2)
    assert more.ending.progress.round == 3
    tables = {
        "task": {"dataset": "synthetic"}, "partition": {"clients": 4}, "run": {"rounds": 2, "seeds": [0, 1]},
        "compare": [{"name": "fedavg"}, {"name": "fedprox"}],
    }
    done = fedalloy.compare(tables, place / "compared", processes=1)
    assert [run.state for run in done.outcomes] == ["finished"] * 4, done.outcomes
    from fedalloy.cli.app import app
    app(["report", str(place / "compared"), "-o", str(place / "report.html")], standalone_mode=False)
    assert "fedprox" in (place / "report.html").read_text(encoding="utf-8")

if __name__ == "__main__":
    main()
    print("all of it")
"""


@pytest.fixture
def elsewhere(tmp_path):
    """Runs a program on a system without what Linux has."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    (tmp_path / "site" / "hiding.py").write_text(HIDING)

    def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "script.py"
        script.write_text(program)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), str(ROOT / "src")])}
        return subprocess.run(
            [sys.executable, str(script), *arguments], env=env, capture_output=True, text=True, check=False, timeout=300
        )

    return run


def test_everything_that_trains_and_records_runs_without_what_only_linux_has(elsewhere, tmp_path):
    done = elsewhere(RUNS, str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all of it" in done.stdout


def test_the_public_workflow_runs_tests_that_exist():
    assert [one for one in PORTABLE if not (ROOT / one).exists()] == []
    flow = (ROOT / ".github" / "workflows" / "portable.yml").read_text(encoding="utf-8")
    for needed in ("ubuntu", "macos", "windows", '"3.11", "3.12", "3.13"', "scripts/portable.py"):
        assert needed in flow
