"""Runs the blocks of a page in processes that are forked off one that has loaded torch: most of `make docs`, fast."""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts.docs.blocks import ROOT
from scripts.docs.named import check, commands
from scripts.docs.shell import Done
from tests.cli.lines import Nursery

SKIPPED = ("install", "slow", "server")
"""Marks of blocks that `make docs` runs and these tests only parse."""
_FROM_HERE = "import sys; sys.path.insert(0, '')\n"


class Forked:
    """Runs ``fedalloy ...`` and ``python FILE``; other lines must at least name something that exists."""

    def __init__(self, folder: Path, cli: Nursery) -> None:
        self.folder, self.cli = folder, cli
        shutil.copytree(ROOT / "recipes", folder / "recipes")

    def bash(self, code: str) -> Done:
        out = ""
        for words in commands(code):
            done = self._line(words)
            out += done.out
            if done.code:
                return Done(done.code, out, f"{' '.join(words)}\n{done.err}")
        return Done(0, out, "")

    def python(self, code: str) -> Done:
        return Done(*self.cli.wait(self.cli.start(code=_FROM_HERE + code, cwd=self.folder)))

    def serve(self, command: str) -> Done:
        raise AssertionError("servers are left to make docs")

    def _line(self, words: list[str]) -> Done:
        if words[0] == "python" and words[1] != "-m":
            return self.python((self.folder / words[1]).read_text())
        if words[0] != "fedalloy":
            check(words)
            return Done(0, "", "")
        # Comparisons start processes of their own, each of which would load torch.
        alone = ("-j", "1") if words[1] == "compare" and "-j" not in words else ()
        return Done(*self.cli.run(*words[1:], *alone, cwd=self.folder))
