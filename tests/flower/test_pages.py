"""The pages about federations: every command in them is run by a test, here or with real processes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("flower.md", "flower-coordinator.md", "flower-site.md", "flower-developer.md", "how-to/federation.md")
BASH = re.compile(r"^(<!--[^\n]*-->\n)?```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
# How tests run a command: by a runner of command lines, or as a process of its own.
RUN = re.compile(r'"flower",\s*"([a-z-]+)"|\.command\(\s*"([a-z-]+)"|\.start\(\s*[\w"]+,\s*"([a-z-]+)"')


def commands(page: str) -> list[tuple[bool, str]]:
    """The commands of ``fedalloy flower`` on a page, and whether the tests of the pages run them."""
    found = []
    for mark, code in BASH.findall((ROOT / "docs" / page).read_text()):
        for line in code.splitlines():
            words = shlex.split(line, comments=True)
            if words[:2] == ["fedalloy", "flower"]:
                found.append((not mark, words[2]))
    return found


def run_by_tests() -> set[str]:
    """The commands that other tests run, as their source says."""
    texts = [file.read_text() for file in (ROOT / "tests" / "flower").glob("*.py") if file != Path(__file__)]
    return {next(filter(None, one)) for text in texts for one in RUN.findall(text)}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_on_the_page_is_run(page):
    here = commands(page)
    left = {name for alone, name in here if not alone} - {name for alone, name in here if alone}
    assert left - run_by_tests() == set()


def test_every_command_is_on_a_page():
    """What an operator can do is written down; 'up' has the page of all, the others one each."""
    from fedalloy.cli.flower import app

    names = {(one.name or one.callback.__name__).replace("_", "-") for one in app.registered_commands if one.callback}
    assert names - {name for page in PAGES for _, name in commands(page)} == set()


def test_a_command_that_no_test_runs_is_noticed():
    assert "nonsense" not in run_by_tests()
    assert {"server", "node", "run", "doctor", "up"} <= run_by_tests()


@pytest.mark.parametrize("page", PAGES[1:4])
def test_each_page_is_in_the_menu_and_on_the_first_page(page):
    assert page in (ROOT / "mkdocs.yml").read_text()
    assert f"({page}" in (ROOT / "docs" / "flower.md").read_text()


def test_old_links_still_lead_somewhere():
    text = (ROOT / "docs" / "flower.md").read_text()
    for anchor in ("on-several-machines", "operating-it", "the-site-decides", "when-something-breaks", "what-is-sent",
                   "who-may-do-what", "in-your-own-flower-app", "in-tests", "how-fast"):  # fmt: skip
        assert f'<a id="{anchor}"></a>' in text
    assert "## On one machine" in text
