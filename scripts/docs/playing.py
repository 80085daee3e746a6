"""Plays one page: saves its files, runs its blocks, compares shown output, and counts what became of every block."""

from __future__ import annotations

import tomllib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from scripts.docs.blocks import ROOT, SHOWN, Block, blocks, unused
from scripts.docs.named import check, commands
from scripts.docs.output import difference
from scripts.docs.shell import Done


class Runner(Protocol):
    """What runs blocks: :class:`scripts.docs.shell.Shell`, or the forked processes of the tests."""

    @property
    def folder(self) -> Path:
        """The page's folder."""

    def bash(self, code: str) -> Done:
        """A block of commands."""

    def python(self, code: str) -> Done:
        """A block of Python."""

    def serve(self, command: str) -> Done:
        """A server, asked once."""


@dataclass
class Played:
    """What became of the blocks of a page."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    last: Done | None = None


def play(page: Path, runner: Runner, skipped: tuple[str, ...] = ("install",)) -> Played:
    """All blocks of a page in order; those with a mark in ``skipped`` are named only. The first fault ends the page."""
    played, found = Played(), list(blocks(page.read_text(encoding="utf-8")))
    played.faults += unused(found)
    for block in found:
        try:
            kind = _play(block, runner, played, ("not run", *skipped), "results" in page.parts)
        except (AssertionError, ValueError, SyntaxError) as fault:
            played.faults.append(f"line {block.line}: {fault}")
            break
        played.counts[kind] += 1
    played.faults = [f"{page.relative_to(ROOT)}, {fault}" for fault in played.faults]
    return played


def _play(block: Block, runner: Runner, played: Played, skipped: tuple[str, ...], generated: bool) -> str:
    """What became of a block."""
    if block.is_output:
        return _compare(block, runner, played)
    if block.mark in skipped:
        played.last = None
        return _name(block)
    if block.title:
        (runner.folder / block.title).write_text(block.code, encoding="utf-8")
        return "saved"
    if block.kind == "toml":
        _parse(block.code)
        return "parsed"
    if block.kind in SHOWN or (generated and not block.kind):  # pages of results name the commands that made them
        return "shown"
    assert block.kind in ("bash", "python"), f"nobody knows how to run a block of kind '{block.kind}'"
    run = runner.python if block.kind == "python" else runner.serve if block.mark == "server" else runner.bash
    played.last = run(block.code)
    assert played.last.code == 0, f"it ended with {played.last.code}\n{played.last.out}\n{played.last.err}"
    return "run"


def _compare(block: Block, runner: Runner, played: Played) -> str:
    if played.last is None:
        return "output of a block that was not run"
    apart = difference(block.code, played.last.out, runner.folder)
    assert not apart, f"something else comes out (- shown, + printed):\n{apart}"
    return "compared"


def _name(block: Block) -> str:
    if block.kind == "python":
        compile(block.code, f"line {block.line}", "exec")
    for words in commands(block.code) if block.kind == "bash" else ():
        try:
            check(words)
        except Exception as fault:
            raise AssertionError(f"{' '.join(words)}: {fault}") from fault
    return "named"


def _parse(code: str) -> None:
    from fedalloy.core.errors import SpecError
    from fedalloy.experiment.recipe import parse

    try:
        parse(tomllib.loads(code))
    except SpecError as fault:
        raise AssertionError(fault) from fault
