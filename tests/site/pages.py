"""Code blocks of Markdown pages, and how each kind is run."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import typer

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^(<!-- long[^\n]*-->\n)?```(\w*)([^\n]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHOWN = ("text", "json", "diff")
"""What a page shows and nobody runs: output, and a change that a test of its own applies (tests/flower)."""


class Block(NamedTuple):
    """One code block; one with a title is a file that the reader saves. A comment that begins with ``long`` in front of
    it says that its commands take too long here: they are parsed and not run."""

    kind: str
    title: str | None
    code: str
    line: int
    long: bool = False


def blocks(text: str) -> Iterator[Block]:
    """Every fenced block of a page, in order."""
    for found in _BLOCK.finditer(text):
        title = re.search(r'title="([^"]+)"', found[3])
        line = text.count("\n", 0, found.start()) + 1
        yield Block(found[2], title[1] if title else None, found[4], line, long=bool(found[1]))


def commands(code: str) -> Iterator[list[str]]:
    """The command lines of a shell block, without comments."""
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def check_install(words: list[str]) -> None:
    """``pip install "fedalloy[a,b]"``: the extras exist."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [part for word in words for part in re.findall(r"fedalloy\[([\w,-]+)\]", word)]
    for extra in ",".join(named).split(",") if named else []:
        assert extra in known, f"there is no extra {extra}"


def check_target(words: list[str]) -> None:
    """``make TARGET``: the target exists."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[1] in targets, f"make has no target {words[1]}"


def check(words: list[str]) -> None:
    """A line that is not run."""
    known = {"make": check_target, "pip": check_install, "fedalloy": parses}
    assert words[0] in known, f"nobody knows what '{words[0]}' is"
    known[words[0]](words)


def parses(words: list[str]) -> None:
    """A ``fedalloy`` line that is not run must at least be one: known commands, known options, needed arguments."""
    from fedalloy.cli.app import app

    command: Any = typer.main.get_command(app)
    context, rest = command.make_context("fedalloy", list(words[1:]), resilient_parsing=False), words[1:]
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, list(rest), parent=context)
