"""What every rule must say about itself, so that the generated reference can say it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedalloy.cli import docs
from fedalloy.cli.docs import CITED, cites, describe, page
from fedalloy.core import registry

ROOT = Path(__file__).resolve().parents[1]
# Rules that are nobody's in particular.
UNSIGNED = {("weighting", "uniform"), ("server", "sgd")}
ADVICE = re.compile(r"When to use it: \S+(\s+\S+){3,}")
FORMULA = re.compile(r"``[^`]*[=<(^*][^`]*``")
RULES = [(category, name) for category in CITED for name in registry.names(category)]


def missing(text: str, signed: bool = True) -> list[str]:
    """What a rule's text leaves the reader to guess."""
    told = {
        "when to use it": ADVICE.search(text) is not None,
        "a formula": FORMULA.search(text) is not None,
        "a source": cites(text) or not signed,
    }
    return [what for what, there in told.items() if not there]


@pytest.mark.parametrize(("category", "name"), RULES)
def test_every_rule_has_a_formula_a_source_and_says_when_to_use_it(category, name):
    assert missing(describe(category, name).text, signed=(category, name) not in UNSIGNED) == []


@pytest.mark.parametrize(
    ("lacking", "text"),
    [
        ("when to use it", "``w = 1`` (Li et al. 2020)."),
        ("when to use it", "``w = 1`` (Li et al. 2020).\nWhen to use it: ..."),
        ("a formula", "Weights (arXiv:1602.05629).\nWhen to use it: clients that differ a lot."),
        ("a source", "``w = 1``.\nWhen to use it: clients that differ a lot, since 2020."),
    ],
)
def test_a_text_that_leaves_something_out_is_noticed(lacking, text):
    assert missing(text) == [lacking]


def test_the_page_has_the_advice_and_the_idea_of_a_rule():
    written = " ".join(page().split())
    assert "#### `samples` Weights by data size: FedAvg (McMahan et al. 2017, arXiv:1602.05629)." in written
    assert written.count("When to use it:") >= len(RULES)


def test_the_page_in_the_repository_is_the_one_that_the_code_makes():
    """In a process of its own: other tests register rules."""
    line = [sys.executable, "-W", "ignore", "-m", "fedalloy.cli.docs", "--check"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_page_that_is_out_of_date_is_noticed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(docs, "page", lambda: "made\n")
    assert docs.main([]) == 0
    assert docs.main(["--check"]) == 0
    (tmp_path / docs.PAGE).write_text("typed\n")
    assert docs.main(["--check"]) == 1
    assert "out of date: run 'python -m fedalloy.cli.docs'" in capsys.readouterr().err
