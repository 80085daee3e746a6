"""What only Linux has is hidden, as on Windows: loop, batched, workers, what is kept on disk, records, comparison and
report still run, and no other code uses it without asking first."""

from __future__ import annotations

import ast
import errno
import mmap
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from scripts.portable import PORTABLE

ROOT = Path(__file__).resolve().parents[1]

# Read by every process at its start, also by those that fedalloy starts: the libraries may use what they find, and
# then it is gone. ``fcntl`` stays with filelock, which has another way on every system.
SITE = """
import sys
if "resource_tracker" not in str(sys.orig_argv):
    import filelock, multiprocessing.popen_spawn_posix, multiprocessing.spawn, multiprocessing.util, numpy, os, signal
    import socket, subprocess, tempfile
    import torch, torch.func, torch.multiprocessing
    import hiding
"""

HIDING = """
import mmap, os, signal, sys, warnings
MODULES = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty")
FUNCTIONS = (
    "fork", "forkpty", "register_at_fork", "sched_getaffinity", "sched_setaffinity", "sched_yield", "getloadavg",
    "pread", "preadv", "pwrite", "pwritev", "readv", "writev", "posix_fallocate", "posix_fadvise",
    "POSIX_FADV_WILLNEED", "copy_file_range", "sendfile", "memfd_create", "pipe2", "fdatasync", "sync", "lockf",
    "fchown", "chown", "lchown", "fchdir", "mkfifo", "mknod", "statvfs", "fstatvfs", "uname", "sysconf", "confstr",
    "getuid", "geteuid", "getgid", "getegid", "getpgid", "getsid", "setsid", "setpgid", "killpg", "nice",
    "getpriority", "setpriority", "wait3", "wait4", "WNOHANG", "getrandom", "getxattr", "setxattr",
    "O_NONBLOCK", "O_NOFOLLOW", "O_DIRECTORY", "O_SYNC", "O_DIRECT",
)
SIGNALS = ("SIGKILL", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGCHLD", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGCONT",
           "SIGBUS", "SIGWINCH", "setitimer", "alarm", "pthread_kill", "sigwait")
MAPS = ("MAP_SHARED", "MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_POPULATE", "PROT_READ", "PROT_WRITE", "MADV_DONTNEED",
        "MADV_SEQUENTIAL", "MADV_WILLNEED", "MADV_HUGEPAGE")
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
for name in MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hidden())
for holder, names in ((os, FUNCTIONS), (signal, SIGNALS), (mmap, MAPS)):
    for name in names:
        if hasattr(holder, name):
            delattr(holder, name)
# Elsewhere text files have another encoding unless one is given.
warnings.filterwarnings("error", category=EncodingWarning, module="fedalloy")
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

ON_DISK = """
import os
import sys
from pathlib import Path
assert not hasattr(os, "pread") and not hasattr(os, "posix_fallocate")
import numpy as np
import pytest
import torch
import fedalloy
from fedalloy.core.errors import SpecError
place = Path(sys.argv[1])

class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        made = np.random.default_rng(0)
        for number in range(90):
            x = made.normal(size=6).astype("float32")
            yield x, int(x.sum() > 0)

def models(task, algorithm, **settings):
    result = fedalloy.fit(algorithm, task, rounds=2, threads=2, **settings)
    assert result.status == "finished"
    return result

def main():
    from fedalloy.methods import Ewwa, Scaffold, ServerSgd, Sgd
    stream = fedalloy.task(Rows(), "logistic", partition={"kind": "iid"}, clients=5, test_fraction=0.2)
    whole = [(x, y) for x, y in Rows()]
    rows = np.stack([x for x, _ in whole]), np.array([y for _, y in whole])
    memory = fedalloy.task(rows, "logistic", partition={"kind": "iid"}, clients=5, test_fraction=0.2)
    assert "temporary files" in str(stream.notices)
    made = {}
    for engine in ("loop", "batched"):
        for kept in ("disk", "memory"):
            away = {"contributions_mb": 0.0, "contributions_folder": place, "client_memory_mb": 0.0}
            settings = away if kept == "disk" else {}
            task = stream if kept == "disk" else memory
            made[engine, kept] = models(task, "scaffold", engine=engine, folder=place / f"{engine}-{kept}", **settings)
            for name, leaf in made["loop", "disk"].model.items():
                torch.testing.assert_close(made[engine, kept].model[name], leaf)
    again = models(stream, "scaffold", engine="loop", resume=True, folder=place / "loop-disk", contributions_mb=0.0,
                   contributions_folder=place, client_memory_mb=0.0)
    assert again.ending.progress.round == 2
    assert list((place / "loop-disk" / "clients").glob("*.states"))
    element = fedalloy.Algorithm(Sgd(lr=0.1), Ewwa(in_memory_mb=0, scratch=str(place)), ServerSgd())
    models(memory, element, engine="loop", contributions_mb=0.0, contributions_folder=place)
    with pytest.raises(SpecError, match="forked"):
        models(memory, "fedavg", engine="workers", contributions_mb=0.0, contributions_folder=place)
    saved = fedalloy.load(made["loop", "disk"].save(place / "saved"))
    x = rows[0][:4]
    assert torch.equal(saved.predict(made["loop", "disk"].module(), x), made["loop", "disk"].predict(x))
    tables = {"task": {"dataset": "synthetic"}, "partition": {"clients": 4}, "run": {"rounds": 1, "seeds": [0, 1]}}
    done = fedalloy.compare(tables, place / "two", processes=2)
    assert [run.state for run in done.outcomes] == ["finished"] * 2, done.outcomes

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


def test_what_is_kept_on_disk_runs_without_what_only_linux_has(elsewhere, tmp_path):
    done = elsewhere(ON_DISK, str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "all of it" in done.stdout


# Names that modules have here and not on Windows (flags of sockets and the like aside, which only federations use).
HERE_ONLY = {
    "os": (
        *("fork", "forkpty", "register_at_fork", "getloadavg", "pread", "preadv", "pwrite", "pwritev", "readv"),
        *("writev", "copy_file_range", "sendfile", "splice", "memfd_create", "eventfd", "pipe2", "fdatasync", "sync"),
        *("lockf", "fchown", "chown", "lchown", "chroot", "fchdir", "mkfifo", "mknod", "statvfs", "fstatvfs", "uname"),
        *("sysconf", "confstr", "pathconf", "nice", "killpg", "openpty", "ttyname", "ctermid", "fwalk", "environb"),
        *("wait", "wait3", "wait4", "waitid", "pidfd_open", "getrandom"),
    ),
    "signal": ("alarm", "pause", "setitimer", "getitimer", "siginterrupt", "pidfd_send_signal"),
    "select": ("poll", "epoll"),
    "mmap": (),
    "errno": ("EUCLEAN", "ENOMEDIUM", "EREMOTEIO", "ERESTART"),
}
FAMILIES = {
    "os": ("sched_", "posix_", "POSIX_", "SCHED_", "MFD_", "RWF_", "PRIO_", "EX_", "W", "P_", "getpg", "setpg", "getre",
           "setre", "getp", "setp", "getg", "setg", "gete", "sete", "getsid", "setsid", "getuid", "setuid", "getxattr",
           "setxattr", "listxattr", "tc", "O_SYNC", "O_DIRECT", "O_NO", "O_TMPFILE", "O_CLOEXEC", "O_PATH"),
    "signal": ("SIG_BLOCK", "SIG_SETMASK", "SIG_UNBLOCK", "pthread_", "sigwait", "sigtimed", "sigpending", "SIGUSR",
               "SIGKILL", "SIGALRM", "SIGHUP", "SIGCHLD", "SIGPIPE", "SIGQUIT", "SIGSTOP", "SIGCONT", "SIGBUS",
               "SIGTSTP", "SIGTT", "SIGWINCH", "SIGXCPU", "ITIMER_"),
    "select": ("EPOLL", "POLL"),
    "mmap": ("MAP_", "PROT_", "MADV_"),
    "errno": (),
}  # fmt: skip
PORTABLE_NAMES = {"os": {"getpid", "getppid", "WindowsError"}}
MODULES_HERE = ("fcntl", "grp", "pwd", "resource", "termios", "tty", "pty")


def here_only(module: str, name: str) -> bool:
    if name in PORTABLE_NAMES.get(module, ()):
        return False
    return name in HERE_ONLY[module] or name.startswith(FAMILIES[module])


def unguarded(source: str) -> list[str]:
    """Names that Windows lacks, and that the file uses without ``hasattr``, ``getattr`` or a caught ImportError."""
    tree = ast.parse(source)
    asked = {
        (ast.unparse(node.args[0]), node.args[1].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("hasattr", "getattr") and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
    }  # fmt: skip
    tried = {
        id(inner) for node in ast.walk(tree)
        if isinstance(node, ast.Try) and any("ImportError" in ast.unparse(one) for one in node.handlers)
        for inner in node.body
    }  # fmt: skip
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in HERE_ONLY:
            module = ast.unparse(node.value)
            known = (module, node.attr) in asked or (
                node.attr.startswith("POSIX_") and (module, "posix_fadvise") in asked
            )
            found += [f"{module}.{node.attr}"] if here_only(module, node.attr) and not known else []
        if isinstance(node, ast.Import | ast.ImportFrom) and id(node) not in tried:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names]
            found += [name for name in names if name.split(".")[0] in MODULES_HERE]
            if isinstance(node, ast.ImportFrom) and node.module in HERE_ONLY:
                found += [f"{node.module}.{one.name}" for one in node.names if here_only(node.module, one.name)]
    return found


def test_nothing_but_federations_uses_what_only_linux_has_without_asking():
    package = ROOT / "src" / "fedalloy"
    files = [one for one in package.rglob("*.py") if not one.is_relative_to(package / "flower")]
    assert len(files) > 300
    found = {str(one.relative_to(package)): unguarded(one.read_text(encoding="utf-8")) for one in files}
    assert {name: uses for name, uses in found.items() if uses} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.pread(1, 2, 3)",
        "import resource",
        "from fcntl import flock",
        "def f():\n    import pwd",
        "import mmap\nmmap.mmap(-1, 1, flags=mmap.MAP_SHARED)",
        "import signal\nsignal.signal(signal.SIGUSR1, f)",
        "from os import sched_getaffinity",
        "import os\nhasattr(os, 'pwrite') and os.pread(1, 2, 3)",
    ],
)
def test_a_use_without_asking_is_found(source):
    assert unguarded(source)


@pytest.mark.parametrize(
    "source",
    [
        "import os\nif hasattr(os, 'pread'):\n    os.pread(1, 2, 3)",
        "try:\n    import resource\nexcept ImportError:\n    pass",
        "import os\nos.getppid(), os.replace, os.O_RDONLY, os.fsync",
    ],
)
def test_a_use_that_asks_first_is_not(source):
    assert unguarded(source) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the names are those of Linux")
@pytest.mark.parametrize("module", [os, signal, select, mmap, errno], ids=lambda module: str(module.__name__))
def test_the_names_are_those_of_the_modules(module: ModuleType):
    assert [name for name in HERE_ONLY[module.__name__] if not hasattr(module, name)] == []


def test_the_public_workflow_runs_tests_that_exist():
    assert [one for one in PORTABLE if not (ROOT / one).exists()] == []
    flow = (ROOT / ".github" / "workflows" / "portable.yml").read_text(encoding="utf-8")
    for needed in ("ubuntu", "macos", "windows", '"3.11", "3.12", "3.13"', "scripts/portable.py"):
        assert needed in flow
