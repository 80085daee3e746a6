"""The site builds strictly: every page is in its menu, links and anchors lead somewhere, nothing comes from outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest

from scripts.docs.blocks import ROOT


def build(config, folder) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(folder)]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(line, env=env, capture_output=True, text=True, timeout=120, check=False)


def test_it_builds_and_loads_nothing_from_elsewhere(tmp_path):
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    loaded = re.compile(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:)?//')
    foreign = [page.name for page in (tmp_path / "site").rglob("*.html") if loaded.search(page.read_text())]
    assert foreign == []


@pytest.mark.parametrize("text", ["[gone](missing.md)", "[gone](#nowhere)"])
def test_a_link_that_leads_nowhere_is_noticed(tmp_path, text):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\n{text}\n")
    settings = (ROOT / "mkdocs.yml").read_text().partition("nav:")[0]
    (tmp_path / "mkdocs.yml").write_text(settings)
    assert build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode != 0


def test_the_first_page_leads_to_every_page_about_a_task():
    first = (ROOT / "docs" / "index.md").read_text()
    assert [page.name for page in (ROOT / "docs" / "how-to").glob("*.md") if f"(how-to/{page.name})" not in first] == []


def test_the_readme_names_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys() - {"dev"}
    told = (ROOT / "README.md").read_text().partition("Each extra adds")[2].partition("## ")[0]
    assert {extra for extra in extras if f"`{extra}`" not in told} == set()
