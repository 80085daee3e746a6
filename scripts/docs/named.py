"""Lines that are named and not run: commands, options, extras and targets of make exist all the same."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from scripts.docs.blocks import ROOT


def commands(code: str) -> Iterator[list[str]]:
    """The command lines of a shell block, without comments.

    >>> list(commands("make demo  # two minutes\\n"))
    [['make', 'demo']]
    """
    for line in code.replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            yield words


def check(words: list[str], folder: Path = ROOT) -> None:
    """Refuse a line that names something that is not there; ``folder`` is that of the page."""
    known: dict[str, Callable[[list[str]], None]] = {
        "make": _target,
        "pip": _install,
        "python": partial(_python, folder=folder),
        "python3": partial(_python, folder=folder),
        "fedalloy": parses,
        ".": _activate,
    }
    assert words[0] in known, f"nobody knows what '{words[0]}' is"
    known[words[0]](words)


def parses(words: list[str]) -> None:
    """A ``fedalloy`` line that is not run must at least be one: known commands, known options, needed arguments."""
    import typer

    from fedalloy.cli.app import app

    command: Any = typer.main.get_command(app)
    context, rest = command.make_context("fedalloy", list(words[1:]), resilient_parsing=False), words[1:]
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, list(rest), parent=context)


def _install(words: list[str]) -> None:
    """``pip install ".[a,b]"``: the extras exist, and nothing is said to come from an index that does not have it."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for word in words:
        assert not word.startswith("fedalloy"), "no package index has fedalloy: install '.' or a wheel"
        for extra in re.findall(r"[\w-]+", found[1]) if (found := re.search(r"\[([\w,-]+)\]", word)) else []:
            assert extra in known, f"there is no extra {extra}"


def _target(words: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert words[1] in targets, f"make has no target {words[1]}"


def _python(words: list[str], folder: Path) -> None:
    """``python -m MODULE`` and ``python FILE``: they exist; ``python -m pip install`` is checked as pip's."""
    if words[1:3] == ["-m", "pip"]:
        _install(words[2:])
    elif words[1] == "-m":
        assert importlib.util.find_spec(words[2]), f"there is no module {words[2]}"
    else:
        assert (ROOT / words[1]).exists() or (folder / words[1]).exists(), f"there is no {words[1]}"


def _activate(words: list[str]) -> None:
    assert words[1:] == [".venv/bin/activate"], "only an environment is activated"
