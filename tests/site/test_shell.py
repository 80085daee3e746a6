"""The shell that runs pages: state carries over, a failing line ends a block, servers are asked and ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scripts.docs.output import difference
from scripts.docs.shell import Shell


@pytest.fixture
def shell(tmp_path) -> Shell:
    (tmp_path / "page").mkdir()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return Shell(tmp_path / "page", tmp_path / "scratch", {"PATH": path})


def test_folder_and_variables_carry_over_to_the_next_block(shell):
    assert shell.bash("mkdir inner; cd inner; export WORD='a b'").code == 0
    assert shell.bash('echo "$WORD"; pwd').out == f"a b\n{shell.folder}/inner\n"
    assert shell.python("import os; print(os.path.basename(os.getcwd()))").out == "inner\n"
    assert [*(shell.folder / "inner").iterdir()] == [], "the block's file is gone"


def test_the_first_line_that_fails_ends_the_block(shell):
    done = shell.bash("echo one\nfalse\necho two")
    assert (done.code, done.out) == (1, "one\n")
    assert shell.python("import nonsense").code == 1


def test_a_server_is_asked_once_and_ended(shell):
    done = shell.serve("python -u -m http.server --bind 127.0.0.1 0")
    assert done.code == 0, done
    assert shell.serve("echo no address").code != 0


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("mean 0.91", "mean  0.91 \n", True),
        ("took 3 s", "took 12.5 s", True),
        ("took 3 s", "took 3 rounds", False),
        ("one\n...", "one\ntwo\nthree", True),
        ("one\n...", "zero\none", False),
        ("accuracy ...", "accuracy 0.9", True),
        ("one\ntwo", "one", False),
        ("(1)", "(1)", True),
    ],
)
def test_shown_output_is_compared_with_times_masked(shown, printed, same):
    assert (difference(shown, printed) == "") is same


def test_a_block_that_takes_too_long_says_how_it_gets_more_time(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.docs.shell.LIMIT", 0.5)
    done = Shell(tmp_path, tmp_path / "scratch", dict(os.environ)).bash("sleep 60")
    assert done.code != 0
    assert "stopped after 0 seconds; DOCS_LIMIT=SECONDS allows more" in done.err
