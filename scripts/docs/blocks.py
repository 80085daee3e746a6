"""Fenced blocks of Markdown pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("text", "json", "diff")
_BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>not run|long|install|slow|server)(?:: (?P<reason>[^\n]+?))? -->\n)?"
    r"```(?P<kind>\w*)(?P<more>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_FENCE = re.compile(r"^[ \t>]*```", re.MULTILINE)


class Block(NamedTuple):
    """One fenced block: its language, the file that it is saved as, the comment before it, and its code."""

    kind: str
    title: str | None
    code: str
    line: int
    mark: str | None = None
    reason: str = ""

    @property
    def is_output(self) -> bool:
        """Whether it shows what the block before printed."""
        return self.kind in SHOWN and self.title == "output"

    @property
    def runs(self) -> bool:
        """Whether it is there to be run, somewhere."""
        return self.kind in ("bash", "python") and not self.title and self.mark != "not run"


def blocks(text: str) -> Iterator[Block]:
    """Every block of a page, in order; a fence that cannot be read, and a mark without its reason, are errors.

    >>> [(one.kind, one.title, one.line) for one in blocks('a\\n```toml title="b.toml"\\n```\\n')]
    [('toml', 'b.toml', 2)]
    """
    found = list(_BLOCK.finditer(text))
    if 2 * len(found) != len(_FENCE.findall(text)):
        raise ValueError("a fence is indented, not closed, or closed by a line with more than ```")
    for one in found:
        title = re.search(r'title="([^"]+)"', one["more"])
        mark = "not run" if one["mark"] == "long" else one["mark"]
        line = text.count("\n", 0, one.start()) + 1
        if mark not in (None, "server") and not one["reason"]:
            raise ValueError(f"line {line}: '{mark}' needs a reason: <!-- {mark}: REASON -->")
        yield Block(one["kind"], title[1] if title else None, one["code"], line, mark, one["reason"] or "")


def pages() -> list[Path]:
    """The README, CONTRIBUTING and all pages of the documentation that have a block."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if "```" in page.read_text(encoding="utf-8")]


def unused(page: list[Block]) -> list[str]:
    """Files that a page has its reader save and then never uses."""
    return [
        f"line {one.line}: no later block uses {one.title}"
        for number, one in enumerate(page)
        if one.title and not one.is_output and one.mark != "not run"
        and not any(Path(Path(one.title).parts[0]).stem in later.code for later in page[number + 1 :])
    ]  # fmt: skip
