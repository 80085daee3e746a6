"""The page: complete, self-contained, well formed, and with nothing that a name could smuggle in."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedalloy
from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.recipe import parse
from fedalloy.report.data import result_rows
from fedalloy.report.page import page, write_page
from fedalloy.results.summaries import gather
from fedalloy.results.table import summarise
from fedalloy.studies.compare.comparing import compare

VOID = {"meta", "link"}


class Checked(HTMLParser):
    """Every opened tag is closed in order; remembers what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    recipe = parse({
        "task": {"model": "logistic"},
        "partition": {"kind": "dirichlet", "alpha": 0.3, "clients": 5},
        "devices": {"success": 0.6},
        "algorithm": {"lr": 0.5, "batch_size": 128},
        "run": {"rounds": 3, "seeds": [0, 1], "target": 0.5},
        "compare": [{"name": "<b>zeta</b>", "set": {"algorithm.name": "fedavg"}},
                    {"name": "alpha", "set": {"algorithm.name": "fedavg", "algorithm.lr": 1e38}}],
    })  # fmt: skip
    compare(recipe, folder, processes=1)
    return folder


def test_the_page_is_well_formed_and_needs_no_network(runs, tmp_path):
    assert write_page([runs], tmp_path / "deep" / "page.html") == 4
    text = (tmp_path / "deep" / "page.html").read_text()
    checked = Checked()
    checked.feed(text)
    assert checked.open == []
    assert [link for link in checked.links if not link.startswith(("#", "data:"))] == []
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text
    assert len(text) < 3_000_000


def test_every_section_is_there_and_names_are_escaped(runs):
    text = page(gather([runs]))
    for heading in ("What was run", "Results", "Over time", "Scores by client", "Fairness", "Weights",
                    "What the rules computed", "Participation and failures", "Data", "Cost",
                    "How to reproduce"):  # fmt: skip
        assert f">{heading}</h2>" in text
    assert "&lt;b&gt;zeta&lt;/b&gt;" in text
    assert "<b>zeta</b>" not in text
    assert "failed in round" in text


def test_a_name_cannot_end_the_script_that_carries_it(runs):
    text = page(
        [replace(story, outcome=replace(story.outcome, name="</script><script>alert(1)")) for story in gather([runs])]
    )
    assert "<script>alert" not in text
    data = text.partition('id="fedalloy-data">')[2].partition("</script>")[0]
    assert "</script><script>alert(1)" in json.loads(data)["styles"]


def test_algorithms_keep_the_order_of_the_comparison(runs):
    assert [story.name for story in gather([runs])][::2] == ["<b>zeta</b>", "alpha"]


def test_what_the_page_tells_is_what_the_records_say(runs):
    story = gather([runs])[0]
    assert story.outcome.folder is not None
    rows = [json.loads(line) for line in (story.outcome.folder / "rounds.jsonl").read_text().splitlines()]
    last = json.loads((story.outcome.folder / "clients.jsonl").read_text().splitlines()[-1])
    assert story.running_sums.contributions == sum(len(row["ids"]) for row in rows)
    assert story.running_sums.absent == sum(len(row["absent"]) for row in rows)
    assert [client.score for client in story.clients] == last["accuracy"]
    worst = min(story.clients, key=lambda client: client.score)
    assert f'<td class="text">{worst.name}</td>' in page([story])


def test_the_page_and_the_command_line_round_alike(runs):
    stories = gather([runs])
    finished = [row for row in summarise([story.outcome for story in stories]) if row.mean]
    text = page(stories)
    assert finished
    for row in finished:
        assert row.mean is not None
        assert f">{row.mean.text()}<" in text
        assert result_rows(stories)[0]["mean"]["mean"] == row.mean.mean


def test_the_example_of_the_documentation_makes_a_page(runs, root):
    code = re.findall(r"```python\n(.*?)```", (root / "docs" / "report.md").read_text(), re.DOTALL)
    assert len(code) == 1
    inside: dict[str, Any] = {}
    exec(code[0], inside)
    checked = Checked()
    checked.feed(inside["own_page"](runs))
    assert checked.open == []
    assert checked.tags.count("script") == 2


def test_vendored_files_are_what_their_lists_say(root):
    for listed in (root / "src/fedalloy/report/assets/vendor", root / "tests/browser/assets"):
        for package in json.loads((listed / "vendor.json").read_text()):
            assert any(name.startswith("LICENSE") for name in package["files"])
            for name, of in package["files"].items():
                assert hashlib.sha256((listed / name).read_bytes()).hexdigest() == of["sha256"]


def test_tuning_runs_are_not_results(runs, tmp_path):
    shutil.copytree(runs, tmp_path / "all")
    assert len(gather([tmp_path / "all"])) == 4
    shutil.move(tmp_path / "all" / "alpha", tmp_path / "all" / "tuning" / "alpha")
    assert {story.name for story in gather([tmp_path / "all"])} == {"<b>zeta</b>"}
    with pytest.raises(CheckpointError, match="no run in"):
        gather([tmp_path / "nothing"])


def test_runs_with_data_from_python_are_not_said_to_have_a_recipe_that_runs(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 3))
    task = fedalloy.task({"north": (x, x[:, 0] > 0), "south": (x, x[:, 1] > 0)}, "logistic")
    result = fedalloy.fit("fedavg", task, rounds=2, folder=tmp_path / "run", engine="auto")
    text = result.report(tmp_path / "page.html").read_text()
    assert "on data given in Python</h1>" in text
    assert "Data: given in Python, spread over 2 clients" in text
    assert "fedalloy run recipe.toml" not in text
    assert "Make the same task again" in text
    assert "measured_seconds" not in text, "what auto chose is text, no dictionary"
    assert re.search(r"(loop|batched) \(\d+ threads?\)", text)
