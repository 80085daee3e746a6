"""The commands that look at a finished run: newcomers and plot."""

from __future__ import annotations

import json

import pytest


@pytest.fixture
def finished(cli, recipe, tmp_path):
    changes = ["partition.newcomers=2", "algorithm.name=superfed_mm", "run.rounds=2"]
    words = [word for change in changes for word in ("--set", change)]
    done = cli.run("run", recipe, "--json", "-o", tmp_path / "run", *words)
    assert done.code == 0, done.err
    return tmp_path / "run"


def test_newcomers_are_scored_and_pictures_drawn(cli, finished, tmp_path):
    found = cli.run("newcomers", finished, "--steps", "0,2", "--json")
    assert found.code == 0, found.err
    said = json.loads(found.out)
    assert [row["steps"] for row in said["rows"]] == [0, 2]
    assert [row["ids"] for row in said["rows"]] == [[4, 5]] * 2
    table = cli.run("newcomers", finished, "--steps", "0,2")
    assert "2 unseen clients after round 2" in table.out
    assert f"{said['summary']['2']['accuracy']['mean']:.3f}" in table.out
    other = cli.run("newcomers", finished, "--clients", "1", "--steps", "0", "--json")
    assert json.loads(other.out)["rows"][0]["ids"] == [1]
    drawn = cli.run("plot", "lambda", finished, "-o", tmp_path / "fig.pdf")
    assert drawn.code == 0, drawn.err
    assert (tmp_path / "fig.pdf").read_bytes().startswith(b"%PDF")


def test_wrong_questions_end_in_one_line(cli, finished, tmp_path):
    wrong = cli.run("newcomers", finished, "--steps", "a,b")
    assert wrong.code == 2
    assert "not a list of whole numbers" in wrong.err
    assert cli.run("plot", "lambda", finished, "-o", tmp_path / "fig.jpeg").code == 2
    missing = cli.run("plot", "curves", tmp_path / "nowhere")
    assert missing.code == 1
    assert "no run in" in missing.err
