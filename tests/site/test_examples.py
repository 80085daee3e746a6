"""Every code block of the documentation is run, in the order of its page."""

from __future__ import annotations

import tomllib
from pathlib import Path

import click
import pytest

from fedalloy.core.errors import SpecError
from fedalloy.experiment.recipe import parse
from tests.site.pages import ROOT, SHOWN, Block, blocks, check, commands, parses

GENERATED = {"reference.md", "corrections.md"}
PAGES = sorted(
    page
    for page in (ROOT / "docs").rglob("*.md")
    if page.name not in GENERATED and "results" not in page.parts and list(blocks(page.read_text()))
)
ONE_PROCESS = {True: ("-j", "1"), False: ()}
"""Comparisons start processes of their own, each of which would load torch."""
FOUND_FROM_HERE = "import sys; sys.path.insert(0, '')\n"


def play(block: Block, folder: Path, cli) -> None:
    """One block, in the folder of its page."""
    if block.title:
        (folder / block.title).write_text(block.code)
    elif block.kind == "python" and block.long:
        compile(block.code, f"line {block.line}", "exec")
    elif block.kind == "python":
        done = cli.wait(cli.start(code=FOUND_FROM_HERE + block.code, cwd=folder))
        assert done.code == 0, f"line {block.line}\n{done.err}"
    elif block.kind == "bash":
        for words in commands(block.code):
            check(words) if block.long else play_line(words, folder, cli)
    elif block.kind == "toml":
        parse(tomllib.loads(block.code))
    else:
        assert block.kind in SHOWN, f"nobody knows how to run a block of kind '{block.kind}'"


def play_line(words: list[str], folder: Path, cli) -> None:
    if words[0] == "fedalloy":
        done = cli.run(*words[1:], *ONE_PROCESS[words[1] == "compare"], cwd=folder)
        assert done.code == 0, f"{' '.join(words)}\n{done.out}\n{done.err}"
    else:
        check(words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_the_page_does_what_it_says(page, cli, tmp_path):
    for block in blocks(page.read_text()):
        play(block, tmp_path, cli)


def test_the_readme(cli, tmp_path):
    """Its commands are long: they are only parsed, as seen from the repository's folder."""
    for block in blocks((ROOT / "README.md").read_text()):
        if block.kind == "python":
            play(block, tmp_path, cli)
        for words in commands(block.code) if block.kind == "bash" else []:
            check(words)


@pytest.mark.parametrize(
    "text",
    [
        "```python\nimport fedalloy.nonsense\n```\n",
        "```bash\nfedalloy run missing.toml\n```\n",
        "```bash\nmake nonsense\n```\n",
        '```bash\npip install "fedalloy[nonsense]"\n```\n',
        "```bash\nrm -rf everything\n```\n",
        "```toml\n[nonsense]\n```\n",
        "```cobol\nSTOP RUN.\n```\n",
    ],
)
def test_a_block_that_does_not_work_is_noticed(text, cli, tmp_path):
    (block,) = blocks(text)
    with pytest.raises((AssertionError, SpecError)):
        play(block, tmp_path, cli)


@pytest.mark.parametrize("line", ["fedalloy rum x.toml", "fedalloy run", "fedalloy run x.toml --sett a=b"])
def test_a_line_that_does_not_parse_is_noticed(line):
    with pytest.raises(click.exceptions.UsageError):
        parses(line.split())
