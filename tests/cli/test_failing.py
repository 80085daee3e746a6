"""No traceback for what a user can cause: one clear line, the right exit code."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from fedalloy import fit
from fedalloy.algorithms import fedavg
from fedalloy.cli.app import app
from fedalloy.cli.failing import sentence
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.lock import locked
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.computing import check_device

RECIPE = '[task]\ndataset = "digits"\n[partition]\nkind = "iid"\nclients = 3\n[run]\nrounds = 1\n'
MINE = """def inner():
    return [1][3]


def clients():
    return inner()


def missing():
    with open("not-there.csv") as file:
        return file.read()


def model():
    return inner()
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a recipe, a module of the user's, a file, an empty folder and things that look like runs."""
    (tmp_path / "good.toml").write_text(RECIPE)
    (tmp_path / "mine_here.py").write_text(MINE)
    (tmp_path / "fails_here.py").write_text("raise ValueError('at import')\n")
    (tmp_path / "wrong_here.py").write_text("def broken(:\n")
    (tmp_path / "afile").write_text("hello\n")
    (tmp_path / "empty").mkdir()
    for name, content in {"junk": b"\xff\xfe\x00\x93", "odd": b"[1, 2]"}.items():
        (tmp_path / name).mkdir()
        for file in ("recipe.toml", "environment.json", "status.json"):
            (tmp_path / name / file).write_bytes(content)
    (tmp_path / "noise.toml").write_bytes(bytes(range(256)))
    (tmp_path / "deep.toml").write_text("x = " + "[" * 20_000 + "]" * 20_000)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for module in ("mine_here", "fails_here", "wrong_here"):
        sys.modules.pop(module, None)


def call(words: str) -> Result:
    return CliRunner().invoke(app, shlex.split(words))


def complaint(words: str, code: int) -> str:
    """What a command complains about, after it was seen that this is all it does."""
    done = call(words)
    assert done.exception is None or isinstance(done.exception, SystemExit), (words, done.exception)
    assert (done.exit_code, "Traceback" in done.output) == (code, False), (words, done.output)
    found = done.output[done.output.index("error: ") :]
    return found.strip()


LONG = "x" * 300


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("run good.toml -o afile", 1, "the run folder afile cannot be made: Not a directory; choose another"),
        ("run good.toml -o afile/sub", 1, "Not a directory"),
        (f"run good.toml -o {LONG}", 1, "File name too long"),
        ("run good.toml -o /proc/nothing/here", 1, "No such file or directory"),
        ("run good.toml -o r --set engine.device=tpu", 2, "device 'tpu' is none that models are computed on"),
        ("run good.toml -o r --set engine.device=meta", 2, "allowed: cpu, cuda, cuda:N, mps"),
        ("run deep.toml", 2, "nested too deeply"),
        ("run noise.toml", 2, "is not TOML"),
        ("compare good.toml -j 1 -o afile", 1, "a file is where a folder is needed"),
        ("show empty", 1, "empty holds no run"),
        ("show afile", 1, "afile is a file, not a run"),
        (f"show {LONG}", 2, "no run folder and no rule"),
        ("show junk", 1, "recipe.toml is damaged"),
        ("show odd", 1, "recipe.toml is damaged"),
        ("report junk", 1, "recipe.toml is damaged"),
        ("export junk -o x.csv", 1, "recipe.toml is damaged"),
        ("plot curves junk", 1, "recipe.toml is damaged"),
        ("newcomers junk", 2, "is not TOML"),
        ("recipe check empty", 2, "holds no .toml file"),
        (
            "run good.toml -o r --set 'imports=[\"fails_here\"]'",
            2,
            "fails_here.py, line 1, in <module>: raise ValueError",
        ),
        ("run good.toml -o r --set 'imports=[\"wrong_here\"]'", 2, "wrong_here.py, line 1: def broken(:"),
        ("run good.toml -o r --set 'imports=[\"..x\"]'", 2, "write its full name"),
        ("run good.toml -o r --set task.model=mine_here:model", 2, "line 2, in inner: return [1][3]"),
        ("run good.toml -o r --set task.model=mine_here:modle", 2, "did you mean 'model'"),
    ],
)
def test_one_line_instead_of_a_traceback(place, words, code, said):
    assert said in complaint(words, code)


def test_an_error_in_the_users_data_function_is_shown_with_their_lines_only(place):
    text = complaint('run good.toml -o r --set \'task.dataset={kind="callable",function="mine_here:clients"}\'', 1)
    lines = text.splitlines()
    assert lines[0] == "error: mine_here:clients raised IndexError: list index out of range"
    assert [line.split("mine_here.py, ")[-1] for line in lines[1:]] == [
        "line 6, in clients: return inner()",
        "line 2, in inner: return [1][3]",
    ]
    text = complaint('run good.toml -o r --set \'task.dataset={kind="callable",function="mine_here:missing"}\'', 1)
    assert "FileNotFoundError" in text
    assert 'line 10, in missing: with open("not-there.csv") as file:' in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_where_there_is_none(place):
    assert "device 'cuda' cannot be used here" in complaint("run good.toml -o r --set engine.device=cuda", 2)
    assert not (place / "r").exists()
    compared = call("compare good.toml -j 1 -o c --set engine.device=cuda:1")
    assert (compared.exit_code, "Traceback" in compared.output) == (1, False)
    assert "device 'cuda:1' cannot be used here" in compared.output
    with pytest.raises(SpecError, match="device 'cuda' cannot be used here"):
        fit(fedavg(), make_task("digits", clients=2), rounds=1, device="cuda")


def test_a_cuda_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda:1")
    with pytest.raises(SpecError, match="there are 2 CUDA devices, numbered from 0"):
        check_device("cuda:2")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written(place):
    (place / "empty").chmod(0o500)
    assert "Permission denied" in complaint("run good.toml -o empty/r", 1)


def test_a_folder_in_which_nothing_may_be_written_by_anybody(place, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "empty/r")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert "the run folder r cannot be made: Permission denied" in complaint("run good.toml -o r", 1)


def test_a_disk_that_is_full_is_told_in_one_line(place, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "r/rounds.jsonl")

    monkeypatch.setattr(RunFolder, "append", full)
    text = complaint("run good.toml -o r", 1)
    assert text.splitlines()[0].startswith("error: r/rounds.jsonl: No space left on device; the disk is full; free")


def test_a_real_disk_that_is_full(place):
    disk = place / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        assert "the disk is full" in complaint("run good.toml -o disk/r", 1)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_out_of_memory_is_told_and_a_broken_pipe_is_not():
    assert "out of memory" in str(sentence(MemoryError()))
    assert sentence(BrokenPipeError(errno.EPIPE, "Broken pipe")) is None
    assert sentence(RuntimeError("a fault of ours")) is None


def test_swapped_arguments_of_fit():
    task = make_task("digits", clients=2)
    swapped: Any = fit
    with pytest.raises(SpecError, match=r"the order is fit\(algorithm, task\)"):
        swapped(task, fedavg())
    with pytest.raises(SpecError, match="must be a task, got str"):
        swapped("fedavg", "digits")
    with pytest.raises(SpecError, match="algorithm is a int"):
        swapped(3, task)


def test_a_metric_that_was_not_scored_is_answered_with_the_nearest(place):
    done = fit(fedavg(), make_task("digits", clients=2), rounds=1, folder="run")
    assert set(done.last()) == set(done.last("accuracy"))
    with pytest.raises(SpecError, match=r"not scored by 'acuracy': did you mean 'accuracy'"):
        done.last("acuracy")
    assert "did you mean 'accuracy'" in complaint("plot curves run --metric acuracy", 2)


def test_a_folder_of_runs_is_no_run(place):
    fit(fedavg(), make_task("digits", clients=2), rounds=1, folder="many/one")
    assert "many is not a run, but holds 1: name one of them (many/one)" in complaint("show many", 1)


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("rounds.jsonl", "{}\n{}\n", "rounds.jsonl, row 1 is damaged: it has no 'round'"),
        ("rounds.jsonl", '{"round": "x"}\n', "'round' cannot be 'x'"),
        ("rounds.jsonl", '{"round": 1, "ids": [], "dropped": {}, "evaluation": {"loss": 3}}\n', "'evaluation.loss'"),
        ("clients.jsonl", '{"round": 1, "ids": [0, 1], "accuracy": [0.5]}\n', "clients.jsonl, row 1 is damaged"),
        ("recipe.toml", "run = 3\n", "recipe.toml is damaged: 'run' cannot be 3"),
        ("recipe.toml", '[run]\nseeds = ["x"]\n', "'run.seeds' cannot be ['x']"),
        ("environment.json", "[]", "environment.json is damaged: no JSON object"),
        ("manifest.json", '{"sizes": 3}', "manifest.json is damaged: 'sizes' is invalid"),
    ],
)
def test_files_of_a_run_that_were_damaged_are_named(place, file, text, said):
    fit(fedavg(), make_task("digits", clients=2), rounds=1, folder="r")
    (place / "r" / file).write_text(text)
    command = "export r -o x.csv --table clients" if "clients" in file else "report r"
    assert said in complaint(command, 1)


def test_a_file_that_is_no_table_of_weights_is_not_called_learned(place):
    assert "afile is not a table of weights" in complaint("unfold good.toml -o afile", 2)
    assert (place / "afile").read_text() == "hello\n"


def test_unusual_data_are_a_note_on_stderr(place):
    small = call("run good.toml -o r --set algorithm.batch_size=600")
    assert small.exit_code == 0
    assert small.stderr.splitlines() == [
        "note: clients with fewer training examples than a batch of 600: 3 of 3 (0, 1, 2)"
    ]


def test_a_run_folder_that_cannot_be_made_in_python(place):
    with pytest.raises(CheckpointError, match="the run folder afile cannot be made: Not a directory"):
        fit(fedavg(), make_task("digits", clients=2), rounds=1, folder="afile")


def test_show_says_running_while_somebody_writes_and_interrupted_after_a_kill(place):
    fit(fedavg(), make_task("digits", clients=2), rounds=1, folder="r")
    status = place / "r" / "status.json"
    status.write_text(json.dumps({"state": "running", "round": 1, "reason": ""}))  # what SIGKILL leaves
    with locked(place / "r" / "lock"):
        assert ": running after round 1" in call("show r").output
    assert ": interrupted after round 1" in call("show r").output
    assert '"state": "interrupted"' in call("show r --json").output
