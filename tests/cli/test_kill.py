"""A run that is killed anywhere and resumed leaves the same files as one that was left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from fedalloy.experiment.records.segments import segments

KILLS = 3
# Many clients make long rows, so that some reach the file between two checkpoints and must be cut on resuming.
CHANGES = ["partition={kind='iid', clients=150}", "evaluate.metrics=['accuracy', 'loss', 'top3']"]
CHECKPOINTS = ["--set", "run.checkpoint_every=0.1"]
SETTINGS = [*(word for change in CHANGES for word in ("--set", change)), *CHECKPOINTS]


def contents(folder: Path) -> dict[str, bytes]:
    """Everything that must not depend on interruptions: records, and the last checkpoint with model and states."""
    last = max((folder / "checkpoints").glob("round-*.safetensors"))
    files = [folder / "rounds.jsonl", folder / "clients.jsonl", folder / "status.json", folder / "manifest.json", last]
    files += (folder / "evaluations").glob("*")
    return {file.name: file.read_bytes() for file in files} | current_states(folder)


def current_states(folder: Path) -> dict[str, bytes]:
    """The states of clients that are on disk: of every client the newest; older ones may or may not still be there."""
    newest: dict[int, tuple[int, bytes]] = {}
    for segment in segments(folder / "clients"):
        for client, round, content in segment.read(segment.table()):
            assert content is not None, "its checksum does not match"
            newest[client] = max(newest.get(client, (0, b"")), (round, content), key=lambda one: one[0])
    return {f"client {client}": content for client, (_, content) in newest.items()}


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.002)


def newest(folder: Path) -> int:
    found = [int(file.stem.split("-")[1]) for file in (folder / "checkpoints").glob("round-*.safetensors")]
    return max(found, default=0)


def killed_thrice(cli, line: list[str], cut: Path, chance: random.Random) -> bool:
    """Kills the run in three places, each after a checkpoint of its own; False if it ended before a kill."""
    for number in range(KILLS):
        before = newest(cut) if number else 0
        child = cli.start(*line, "-o", str(cut), *["--resume"] * (number > 0))
        wait_for(lambda before=before: newest(cut) > before)
        time.sleep(chance.uniform(0, 0.1))
        os.kill(child[0], signal.SIGKILL)
        if cli.wait(child).code != -signal.SIGKILL:
            return False
    return True


def long_enough(cli, line: list[str], tmp_path: Path, chance: random.Random) -> tuple[list[str], Path]:
    """How many rounds outlast three kills depends on the machine: as many as needed, and the folder of the cut run."""
    for rounds in (100, 200, 400, 800, 1600, 3200):
        longer, cut = [*line, "--set", f"run.rounds={rounds}"], tmp_path / f"cut-{rounds}"
        if killed_thrice(cli, longer, cut, chance):
            return longer, cut
    raise AssertionError("3200 rounds ended before three kills")


@pytest.mark.parametrize(("algorithm", "memory"), [("fedavg", 64), ("scaffold", 64), ("ditto", 0)])
def test_sigkill_anywhere_and_resume(cli, recipe, tmp_path, algorithm, memory):
    """With memory = 0 the clients' states are files of their own beside the checkpoint."""
    line = ["run", str(recipe), "--json", *SETTINGS, "--set", f"algorithm.name={algorithm}"]
    line += ["--set", f"run.client_memory_mb={memory}"]
    line += ["--set", "algorithm.personal_epochs=1"] if algorithm == "ditto" else []
    line, cut = long_enough(cli, line, tmp_path, random.Random(algorithm))
    # A folder stands for its own recipe, so nothing needs to be said again.
    resumed = cli.run("run", cut, "--resume", "--json")
    assert resumed.code == 0, resumed.err
    whole = cli.run(*line, "-o", tmp_path / "whole")
    assert whole.code == 0, whole.err
    assert contents(cut) == contents(tmp_path / "whole")
    assert bool(current_states(cut)) == (memory == 0)


def test_sigkill_anywhere_and_resume_with_files_of_scores(cli, recipe, tmp_path):
    line = ["run", str(recipe), "--json", *SETTINGS, "--set", "evaluate.parquet_from=100"]
    line, cut = long_enough(cli, line, tmp_path, random.Random(2))
    assert cli.run("run", cut, "--resume", "--json").code == 0
    assert cli.run(*line, "-o", tmp_path / "whole").code == 0
    assert contents(cut) == contents(tmp_path / "whole")
    assert len(list((cut / "evaluations").iterdir())) >= 100


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_safe_says_how_to_go_on_and_a_second_writer_is_refused(cli, recipe, tmp_path, number):
    folder = tmp_path / "run"
    child = cli.start(
        "run", str(recipe), "-o", str(folder), "--set", "run.rounds=100000", "--set", "run.checkpoint_every=0.1"
    )
    wait_for(lambda: newest(folder) >= 2)
    second = cli.run("run", folder, "--resume")
    os.kill(child[0], number)
    first = cli.wait(child)
    assert second.code == 1
    assert f"is being written by process {child[0]}" in second.err
    assert first.code == 128 + number
    assert f"fedalloy run {folder} --resume" in first.out
    assert '"stopped"' in (folder / "status.json").read_text()


@pytest.mark.parametrize("jobs", [1, 2])
def test_sigterm_ends_a_comparison_with_its_own_code(cli, recipe, tmp_path, jobs):
    line = [
        "compare",
        str(recipe),
        "--set",
        "run.rounds=100000",
        *CHECKPOINTS,
        "-j",
        str(jobs),
        "-o",
        str(tmp_path / "c"),
    ]
    child = cli.start(*line)
    wait_for(lambda: len({file.parent for file in (tmp_path / "c").glob("*/seed-*/checkpoints/round-*")}) == jobs)
    os.kill(child[0], signal.SIGTERM)
    ended = cli.wait(child)
    assert ended.code == 143
    assert "the same command continues from here" in ended.err


def interrupted(cli, line: list[str], cut: Path) -> bool:
    """Asks a comparison of two runs to stop while both are playing; False if it ended before."""
    child = cli.start(*line, "-j", "2", "-o", str(cut))
    # Both in the middle of playing: a worker that is still setting up simply dies, which proves nothing.
    wait_for(lambda: len({file.parent for file in cut.glob("*/seed-*/checkpoints/round-*")}) == 2)
    os.kill(child[0], signal.SIGINT)
    begin = time.monotonic()
    code = cli.wait(child).code
    assert code in (0, 130)
    assert time.monotonic() - begin < 60, "it should stop after the round"
    states = [json.loads(file.read_text())["state"] for file in cut.glob("*/seed-*/status.json")]
    return code == 130 and set(states) != {"finished"}


def test_ctrl_c_ends_a_comparison_and_the_same_command_goes_on(cli, recipe, tmp_path):
    lines = {
        tmp_path / f"cut-{rounds}": ["compare", str(recipe), "--set", f"run.rounds={rounds}", *CHECKPOINTS]
        for rounds in (60, 240, 960, 3840)
    }
    # How many rounds outlast the signal depends on the machine.
    cut, line = next((cut, line) for cut, line in lines.items() if interrupted(cli, line, cut))
    whole = tmp_path / "whole"
    assert cli.run(*line, "-j", 1, "-o", cut, "--json").code == 0
    assert cli.run(*line, "-j", 1, "-o", whole, "--json").code == 0
    for run in sorted(whole.glob("*/seed-*")):
        assert contents(run) == contents(cut / run.relative_to(whole)), run.name
