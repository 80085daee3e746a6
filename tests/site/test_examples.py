"""Every code block of the documentation is run, in the order of its page, and shows what comes out."""

from __future__ import annotations

from collections import Counter

import click
import pytest

from scripts.docs.blocks import ROOT, blocks, pages
from scripts.docs.named import parses
from scripts.docs.running import run_page
from tests.site.forked import SKIPPED, Forked

PAGES = {str(page.relative_to(ROOT)): page for page in pages() if "results" not in page.parts}
UNRUN: dict[str, dict[str, int]] = {
    "CONTRIBUTING.md": {"not run": 3},
    "README.md": {"install": 2, "not run": 2, "server": 1, "slow": 3},
    "docs/coming-from/fedjax.md": {"not run": 1},
    "docs/coming-from/fedlab.md": {"not run": 1},
    "docs/coming-from/pfl-research.md": {"not run": 1},
    "docs/coming-from/pfllib.md": {"slow": 1},
    "docs/corrections.md": {"not run": 1},
    "docs/flower-coordinator.md": {"not run": 3},
    "docs/flower-developer.md": {"not run": 2},
    "docs/flower-site.md": {"not run": 3},
    "docs/flower.md": {"not run": 1},
    "docs/how-to/federation.md": {"install": 1, "slow": 1},
    "docs/how-to/gpu.md": {"not run": 1},
    "docs/how-to/own-data.md": {"not run": 2},
    "docs/how-to/tune.md": {"slow": 1},
    "docs/notebooks.md": {"install": 1},
    "docs/report.md": {"slow": 2},
    "docs/reproduce.md": {"not run": 1, "slow": 2},
    "docs/synthetic.md": {"slow": 1},
    "docs/scale.md": {"install": 1, "not run": 1, "slow": 1},
    "docs/tutorial.md": {"install": 1},
    "docs/unfolding.md": {"not run": 1},
}
"""Blocks with a mark, by page: a block that is new here needs its reason, and this line."""


@pytest.mark.parametrize("name", PAGES)
def test_the_page_does_what_it_says(name, cli, tmp_path):
    assert run_page(PAGES[name], Forked(tmp_path, cli), SKIPPED).faults == []


def test_nothing_is_left_out_that_is_not_known_here():
    marked = {
        name: Counter(one.mark for one in blocks(page.read_text()) if one.mark) for name, page in PAGES.items()
    }  # fmt: skip
    assert {name: dict(counts) for name, counts in marked.items() if counts} == UNRUN


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("```python\nimport fedalloy.nonsense\n```\n", "No module named"),
        ("```bash\nfedalloy run missing.toml\n```\n", "there is no recipe"),
        ("```bash\nmake nonsense\n```\n", "no target nonsense"),
        ('```bash\npip install ".[nonsense]"\n```\n', "no extra nonsense"),
        ('```bash\npip install "fedalloy[report]"\n```\n', "no package index has fedalloy"),
        ("```bash\nrm -rf everything\n```\n", "nobody knows what 'rm' is"),
        ("```toml\n[nonsense]\n```\n", "nonsense"),
        ("```cobol\nSTOP RUN.\n```\n", "kind 'cobol'"),
        ('```python title="far.py"\nimport nonsense\n```\n', "no later block uses far.py"),
        ('```python\nprint(1)\n```\n\n```text title="output"\n2\n```\n', "- 2"),
        ("<!-- not run: it is long -->\n```bash\nfedalloy rum x.toml\n```\n", "rum"),
        ("<!-- not run: it is long -->\n```python\n1 +\n```\n", "invalid syntax"),
    ],
)
def test_a_block_that_does_not_work_is_noticed(text, said, cli, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(text)
    monkeypatch.setattr("scripts.docs.running.ROOT", tmp_path)
    (tmp_path / "room").mkdir()
    (fault,) = run_page(page, Forked(tmp_path / "room", cli), SKIPPED).faults
    assert said in fault


@pytest.mark.parametrize(
    "text", ["- a list\n  ```bash\n  ls\n  ```\n", "```bash\nls\n", "<!-- slow -->\n```bash\nls\n```\n"]
)
def test_a_fence_that_would_be_passed_over_is_refused(text):
    with pytest.raises(ValueError, match=r"fence|reason"):
        list(blocks(text))


@pytest.mark.parametrize("line", ["fedalloy rum x.toml", "fedalloy run", "fedalloy run x.toml --sett a=b"])
def test_a_line_that_does_not_parse_is_noticed(line):
    with pytest.raises(click.exceptions.UsageError):
        parses(line.split())
