"""A run can be read while it grows, a row at a time, and by pandas and DuckDB in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fedalloy.experiment.records.reading
from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.reading import find_runs, last_row, read_rows, read_run


def round_row(round: int) -> dict[str, Any]:
    row: dict[str, Any] = {
        "round": round, "ids": [2, 5], "weights": [0.25, 0.75], "dropped": {7: "not finite"} if round == 2 else {},
        "absent": [], "train_loss": float("nan") if round == 2 else 1 / round, "bytes_up": 80, "bytes_down": 80,
        "simulated_seconds": 1.5, "info": {},
    }  # fmt: skip
    if round % 2:
        row |= {"evaluation": {"accuracy": {"mean": 0.5, "worst10": 0.1}}, "global": {"accuracy": 0.6}}
    return row


@pytest.fixture
def path(tmp_path: Path) -> Path:
    folder = RunFolder.create(tmp_path / "a", {"run": {"rounds": 3}}, {"torch": "x"}, {"sizes": [1]})
    with folder.lock():
        for round in (1, 2, 3):
            folder.append("rounds", round_row(round))
            folder.append("timings", {"round": round, "seconds": 0.5})
        folder.append("clients", {"round": 1, "split": "test", "ids": [2, 5], "accuracy": [0.5, float("nan")]})
        folder.append("clients", {"round": 3, "split": "test", "ids": [2, 5], "accuracy": [0.5, 0.75]})
        folder.set_status("finished", 3)
    return folder.path


def test_a_run_tells_everything(path: Path) -> None:
    run = read_run(path)
    assert run.recipe == {"run": {"rounds": 3}}
    assert run.environment == {"torch": "x"}
    assert run.status["state"] == "finished"
    assert run.manifest == {"sizes": [1]}
    assert run.last_round == 3
    assert [row["round"] for row in run.rounds()] == [1, 2, 3]
    assert [row["accuracy"] for row in run.clients()] == [[0.5, None], [0.5, 0.75]]
    assert [row["seconds"] for row in run.timings()] == [0.5] * 3
    assert run.columns == {"rounds": list(round_row(1)), "clients": ["round", "split", "ids", "accuracy"]}


@pytest.mark.parametrize("half", [b'{"round":4,"ids"', b'{"round":4}', b"\0\0\0", b"\0\0\n"])
def test_a_half_written_last_line_is_left_out(path: Path, half: bytes) -> None:
    with (path / "rounds.jsonl").open("ab") as file:
        file.write(half)
    run = read_run(path)
    assert [row["round"] for row in run.rounds()] == [1, 2, 3]
    assert run.last_round == 3


def test_a_broken_line_in_the_middle_is_an_error(path: Path) -> None:
    with (path / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round":\n{"round":5}\n')
    with pytest.raises(CheckpointError, match="line 4"):
        list(read_run(path).rounds())


def test_the_record_follows_a_run_that_grows(path: Path) -> None:
    run = read_run(path)
    folder = RunFolder.open(path)
    with folder.lock():
        folder.append("rounds", {"round": 4})
        assert run.last_round == 3
        folder.flush()
        assert run.last_round == 4


def test_rows_are_read_one_by_one(path: Path) -> None:
    rows = read_run(path).rounds()
    assert next(rows)["round"] == 1
    with (path / "rounds.jsonl").open("r+b") as file:
        file.truncate(0)
    assert iter(rows) is rows


@pytest.mark.parametrize("count", [0, 1, 2, 5000])
def test_the_last_row_is_found_from_the_end(tmp_path: Path, count: int) -> None:
    stream = tmp_path / "s.jsonl"
    lines = [f'{{"round":{number},"pad":"{"x" * (number % 97)}"}}\n' for number in range(count)]
    stream.write_text("".join(lines))
    row = last_row(stream)
    assert row == (list(read_rows(stream))[-1] if count else None)


def test_a_row_longer_than_a_block_is_found_too(tmp_path: Path) -> None:
    stream = tmp_path / "s.jsonl"
    stream.write_text('{"round":1}\n{"round":2,"pad":"' + "x" * 300_000 + '"}\n{"half')
    row = last_row(stream)
    assert row is not None
    assert row["round"] == 2


def test_missing_streams_are_empty(path: Path) -> None:
    (path / "rounds.jsonl").unlink()
    assert list(read_run(path).rounds()) == []
    assert read_run(path).last_round == 0


def test_runs_are_found_below_a_folder(tmp_path: Path, path: Path) -> None:
    deep = RunFolder.create(tmp_path / "grid" / "seed-2", {}, {}).path
    RunFolder.create(deep / "inside", {}, {})
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "recipe.toml").write_text("")
    assert find_runs(tmp_path) == [path, deep]
    assert find_runs(path) == [path]
    assert find_runs(tmp_path / "none") == []
    with pytest.raises(CheckpointError, match="holds no run"):
        read_run(tmp_path / "recipes")


def documented_line(start: str, path: Path) -> str:
    """The line of the module's docstring that begins so, about this run."""
    text = fedalloy.experiment.records.reading.__doc__ or ""
    (line,) = (line.strip() for line in text.splitlines() if line.strip().startswith(start))
    return line.partition(" = ")[2].replace("runs/a", path.as_posix()) if " = pd" in line else line


def test_the_documented_pandas_lines_work(path: Path) -> None:
    pd = pytest.importorskip("pandas")
    rounds = eval(documented_line("rounds = pd", path), {"pd": pd})
    assert rounds["round"].tolist() == [1, 2, 3]
    assert rounds["train_loss"].isna().tolist() == [False, True, False]
    clients = eval(documented_line("clients = pd", path), {"pd": pd})
    assert clients["ids"].tolist() == [2, 5, 2, 5]
    assert clients["accuracy"].tolist()[2:] == [0.5, 0.75]


def test_the_documented_duckdb_lines_work(path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    text = fedalloy.experiment.records.reading.__doc__ or ""
    lines = [line.strip().replace("runs/a", path.as_posix()) for line in text.splitlines() if "duckdb.sql" in line]
    rounds, clients = (eval(line, {"duckdb": duckdb}).fetchall() for line in lines)
    assert [row[0] for row in rounds] == [1, 2, 3]
    assert clients[-1] == (3, 5, 0.75)


def test_reading_does_not_load_torch() -> None:
    code = "from fedalloy.experiment.records import reading, toml\nimport sys; sys.exit('torch' in sys.modules)"
    source = str(Path(fedalloy.experiment.records.reading.__file__).resolve().parents[3])
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, check=False).returncode == 0
