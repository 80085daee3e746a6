"""The coverage figure of CONTRIBUTING: made from what was measured, with the command that measured it."""

from __future__ import annotations

import re

import pytest

from scripts import covered

FILES = {"core/keys.py": (1, 2), "core/parts/tree.py": (3, 4), "cli/run.py": (0, 3), "algorithms.py": (1, 1)}


def test_lines_are_summed_by_package_and_over_all():
    assert covered.by_package(FILES) == {"": (5, 10), "cli": (0, 3), "core": (4, 6)}


@pytest.mark.parametrize(
    ("tests", "command"),
    [
        ("tests src/fedalloy", "`make coverage`"),
        ("tests/core", '`make coverage COVERED="tests/core"`, a part of the tests'),
    ],
)
def test_the_sentence_names_the_tests_that_were_run(tests, command):
    said = covered.told(covered.by_package(FILES), tests, "2026-01-01")
    assert said == f"Measured on 2026-01-01 with\n{command}:\n50.0 % of 10 lines were run (cli 0 %, core 67 %)."


def test_the_figure_is_written_between_its_markers(tmp_path, monkeypatch):
    page = tmp_path / "CONTRIBUTING.md"
    page.write_text(f"before\n{covered.BEGIN}\nold\n{covered.END}\nafter\n")
    monkeypatch.setattr(covered, "PAGE", page)
    monkeypatch.setattr(covered, "measured", lambda: FILES)
    covered.main("tests/core")
    assert re.fullmatch(
        rf"before\n{covered.BEGIN}\nMeasured on .*\n.*:\n50\.0 % of 10 lines .*\n{covered.END}\nafter\n",
        page.read_text(),
    )
    page.write_text("without a place for it\n")
    with pytest.raises(SystemExit, match="must have one place"):
        covered.main("tests/core")


def test_contributing_has_a_figure():
    said = covered.PAGE.read_text().partition(covered.BEGIN)[2].partition(covered.END)[0]
    assert re.search(r"Measured on \d{4}-\d\d-\d\d with\n`make coverage.*:\n\d+\.\d % of [\d,]+ lines", said)
