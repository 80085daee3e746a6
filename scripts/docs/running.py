"""Runs one page: saves its files, runs its blocks, compares shown output, and counts what became of every block."""

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
class PageResult:
    """What became of the blocks of a page."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    last: Done | None = None


def run_page(page: Path, runner: Runner, skipped: tuple[str, ...] = ("install",)) -> PageResult:
    """All blocks of a page in order; those with a mark in ``skipped`` are named only. The first fault ends the page."""
    result, found = PageResult(), list(blocks(page.read_text(encoding="utf-8")))
    result.faults += unused(found)
    for block in found:
        try:
            kind = _run_block(block, runner, result, ("not run", *skipped), "results" in page.parts)
        except (AssertionError, ValueError, SyntaxError) as fault:
            result.faults.append(f"line {block.line}: {fault}")
            break
        result.counts[kind] += 1
    result.faults = [f"{page.relative_to(ROOT)}, {fault}" for fault in result.faults]
    return result


def _run_block(block: Block, runner: Runner, result: PageResult, skipped: tuple[str, ...], generated: bool) -> str:
    """What became of a block."""
    if block.is_output:
        return _compare(block, runner, result)
    if block.mark in skipped:
        result.last = None
        return _name(block, runner.folder)
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
    result.last = run(block.code)
    assert result.last.code == 0, f"it ended with {result.last.code}\n{result.last.out}\n{result.last.err}"
    return "run"


def _compare(block: Block, runner: Runner, result: PageResult) -> str:
    if result.last is None:
        return "output of a block that was not run"
    apart = difference(block.code, result.last.out, runner.folder)
    assert not apart, f"something else comes out (- shown, + printed):\n{apart}"
    return "compared"


def _name(block: Block, folder: Path) -> str:
    if block.kind == "python":
        compile(block.code, f"line {block.line}", "exec")
    for words in commands(block.code) if block.kind == "bash" else ():
        try:
            check(words, folder)
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
