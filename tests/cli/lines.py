"""Command lines in processes of their own, forked off one that has loaded everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Nursery:
    """Starts command lines; see nursery.py."""

    def __init__(self, source: Path, scratch: Path) -> None:
        env = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
        command = [sys.executable, str(Path(__file__).with_name("nursery.py"))]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.scratch, self.started = scratch, 0

    def _ask(self, order: dict) -> int:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return int(json.loads(self.process.stdout.readline()))

    def start(self, *argv: str, cwd: Path | None = None, code: str | None = None) -> tuple[int, int]:
        self.started += 1
        files = {name: str(self.scratch / f"{self.started}.{name}") for name in ("out", "err")}
        what = {"argv": list(map(str, argv))} if code is None else {"code": code}
        return self._ask({**what, **files, "cwd": str(cwd or self.scratch)}), self.started

    def wait(self, child: tuple[int, int]) -> Done:
        code = self._ask({"wait": child[0]})
        texts = [(self.scratch / f"{child[1]}.{name}").read_text() for name in ("out", "err")]
        return Done(code, *texts)

    def run(self, *argv: object, cwd: Path | None = None) -> Done:
        return self.wait(self.start(*map(str, argv), cwd=cwd))

    def python(self, code: str) -> Done:
        return self.wait(self.start(code=code))

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()
