"""One page's shell: blocks run one after another, as a reader's terminal would run them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import NamedTuple

from scripts.docs.blocks import ROOT

LIMIT = float(os.environ.get("DOCS_LIMIT", "900"))
"""Seconds that a block may take; the variable DOCS_LIMIT sets others on a busy machine."""
_COPIED = ("recipes", "tests/vectors")
"""What pages use of a clone. Copies, so that no block can change the repository."""
_SETTINGS = {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100", "PYTHONUTF8": "1"}


class Done(NamedTuple):
    """What a block left."""

    code: int
    out: str
    err: str


class Shell:
    """Runs blocks with bash in a folder; what one exports and where it ends is where the next begins."""

    def __init__(self, folder: Path, scratch: Path, env: dict[str, str]) -> None:
        self.folder, self.scratch, self.env, self.count = folder, scratch, {**env, **_SETTINGS}, 0
        self.scratch.mkdir(parents=True, exist_ok=True)
        (self.scratch / "where").write_text(str(folder))

    def bash(self, code: str) -> Done:
        """One block of commands; the first that fails ends it."""
        self.count += 1
        files = {name: self.scratch / f"{self.count}.{name}" for name in ("sh", "out", "err")}
        kept, where = self.scratch / "env.sh", self.scratch / "where"
        before = f'[ ! -f "{kept}" ] || . "{kept}"; cd "$(cat "{where}")"; set -e\n'
        files["sh"].write_text(f'{before}{code}\nexport -p > "{kept}"; pwd > "{where}"\n')
        with files["out"].open("w") as out, files["err"].open("w") as err:
            process = self._start(["bash", str(files["sh"])], out, err)
            try:
                code_ = process.wait(LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                code_ = process.wait()
                err.write(f"\nstopped after {LIMIT:.0f} seconds; DOCS_LIMIT=SECONDS allows more\n")
        return Done(code_, files["out"].read_text(), files["err"].read_text())

    def python(self, code: str) -> Done:
        """A block of Python, as a file beside the page's other files."""
        file = Path((self.scratch / "where").read_text().strip()) / f"block_{self.count}.py"
        file.write_text(code)
        try:
            return self.bash(f"python {file.name}")
        finally:
            file.unlink()

    def serve(self, command: str) -> Done:
        """Start a server, ask it once at the address that it prints, and press Ctrl-C."""
        out, kept = self.scratch / "server.out", self.scratch / "env.sh"
        line = f'[ ! -f "{kept}" ] || . "{kept}"; cd "{(self.scratch / "where").read_text().strip()}"; exec {command}'
        with out.open("w") as file:
            process = self._start(["bash", "-c", line], file, subprocess.STDOUT)
            try:
                answer = _asked(process, out)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
                code = _ended(process)
        return Done(0 if answer == 200 and code in (0, 130) else code or 1, out.read_text(), f"it answered {answer}")

    def _start(self, line: list[str], out: object, err: object) -> subprocess.Popen[bytes]:
        # A group of its own, with Ctrl-C as a terminal has it, whatever the shell around this process ignores.
        listens = lambda: signal.signal(signal.SIGINT, signal.default_int_handler)  # noqa: E731
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            line, env=self.env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, process_group=0, preexec_fn=listens
        )


def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code; a server that does not end by Ctrl-C is killed, and its code tells."""
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def _asked(process: subprocess.Popen[bytes], out: Path) -> int:
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        if found := re.search(r"http://127\.0\.0\.1:\d+[^\s)]*", out.read_text()):
            with urllib.request.urlopen(found[0], timeout=30) as answer:
                return int(answer.status)
        time.sleep(0.1)
    return 0


def page_shell(base: Path) -> Shell:
    """A shell in a fresh folder with this source and copies of what pages use of a clone."""
    folder = base / "page"
    folder.mkdir(parents=True)
    for name in _COPIED:
        shutil.copytree(ROOT / name, folder / name)
    found = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    return Shell(folder, base / "scratch", {**os.environ, **found})


def clone_shell(base: Path) -> Shell:
    """A shell in a fresh clone, with an empty home folder and no environment but where programs and packages are."""
    (base / "home").mkdir(parents=True)
    subprocess.run(["git", "clone", "-q", str(ROOT), str(base / "fedalloy")], check=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or name in ("LANG", "SSL_CERT_FILE")
    }
    path = os.pathsep.join(one for one in os.environ["PATH"].split(os.pathsep) if ".venv" not in one)
    return Shell(base / "fedalloy", base / "scratch", {**kept, "PATH": path, "HOME": str(base / "home")})
