"""Tables say what the records say, in every format."""

from __future__ import annotations

import csv
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.records.reading import read_run
from fedalloy.results.export import writing
from fedalloy.results.export.columns import blocks_of
from fedalloy.results.export.latex import escape, latex
from fedalloy.results.export.tables import TABLES, blocks, rows
from fedalloy.results.export.writing import WRITERS, write_csv, write_parquet
from fedalloy.results.outcome import RunOutcome, read_outcome
from fedalloy.results.runs import runs_in
from fedalloy.results.table import summarise
from tests.report.live.conftest import make_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    for name, seed, rounds in (("fed_avg", 0, 3), ("fed_avg", 1, 2), ("50% & more", 0, 3), ("50% & more", 1, 1)):
        recipe = {"name": name, "run": {"rounds": 3, "seeds": [seed], "target_metric": "accuracy"}}
        make_run(tmp_path / "runs" / name[:3] / f"seed-{seed}", rounds=rounds, recipe=recipe)
    make_run(tmp_path / "runs" / "tuning" / "x")
    return runs_in([tmp_path / "runs"])


def read_csv(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def same(left, right):
    if isinstance(right, float):
        return math.isclose(float(left), right)
    return str(left) == ("" if right is None else str(right))


@pytest.mark.parametrize("table", sorted(TABLES))
@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_what_is_written_is_what_was_recorded(runs, tmp_path, table, format, monkeypatch):
    monkeypatch.setattr(writing, "AT_ONCE", 4)
    path, expected = tmp_path / f"table.{format}", list(rows(table, runs))
    assert WRITERS[format](path, lambda: blocks(table, runs)) == len(expected) > 0
    read = read_csv(path) if format == "csv" else pq.read_table(path).to_pylist()
    assert len(read) == len(expected)
    for found, wanted in zip(read, expected, strict=True):
        for name, value in wanted.items():
            assert same("" if found[name] is None else found[name], value), (name, found[name], value)


def test_the_rows_of_a_table(runs):
    assert len(runs) == 4
    one = read_run(runs[-1])
    rounds = [row for row in rows("rounds", runs) if row["run"] == runs[-1].as_posix()]
    assert [row["train_loss"] for row in rounds] == [row["train_loss"] for row in one.rounds()]
    clients = list(rows("clients", runs[-1:]))
    assert [(row["client"], row["client_name"], row["accuracy"]) for row in clients[:3]] == [
        (0, "ann", 0.5), (1, "bob", 0.1), (2, "eve", None)]  # fmt: skip
    assert sum(row["weight"] for row in rows("weights", runs[-1:]) if row["round"] == 1) == pytest.approx(1)
    with pytest.raises(SpecError, match="did you mean 'rounds'"):
        list(rows("round", runs))
    with pytest.raises(CheckpointError, match="no run in"):
        runs_in([runs[0] / "checkpoints"])


def test_columns_that_come_late_are_there_from_the_beginning(tmp_path):
    late: list[dict[str, Any]] = [{"a": 1}, {"a": 2.5, "b": "x"}, {"c": None}]
    write_csv(tmp_path / "t.csv", lambda: blocks_of(late, 1))
    assert read_csv(tmp_path / "t.csv")[0] == {"a": "1", "b": "", "c": ""}
    write_parquet(tmp_path / "t.parquet", lambda: blocks_of(late, 1))
    assert pq.read_table(tmp_path / "t.parquet").to_pylist()[1] == {"a": 2.5, "b": "x", "c": None}


def test_the_latex_table_has_the_numbers_of_the_comparison(runs):
    outcomes = [read_outcome(run) for run in runs]
    table, text = summarise(outcomes), latex(outcomes)
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(lines) == 3
    for row, line in zip(table, lines[1:], strict=True):
        assert line.startswith(escape(row.name))
        assert row.mean is not None
        assert f"{row.mean.mean:.3f}" in line
        assert rf"\pm {row.mean.deviation:.3f}" in line
    assert r"\mathbf" not in text, "two seeds decide nothing"
    assert r"\caption{No verdict over 2 seeds: one needs at least 3. Differences: paired by seed, one interval" in text
    assert not re.search(r"(?<!\\)[_#]", text)


def test_latex_sets_in_bold_what_is_decided_and_says_so_in_the_caption():
    scores = {"a_b": (0.80, 0.81, 0.79, 0.80), "better": (0.90, 0.92, 0.89, 0.91), "unsure": (0.80, 0.90, 0.75, 0.95)}
    runs = [RunOutcome(name, seed, "finished", scores={"mean": one}) for name in scores
            for seed, one in enumerate(scores[name])]  # fmt: skip
    text = latex(runs)
    assert re.findall(r"\\mathbf\{([\d.]+)\}", text) == ["0.905"]
    assert r"\caption{better beats a\_b in accuracy at 95 \% over 4 seeds." in text
    assert "2 simultaneous intervals at 96 \\%; verdicts follow Holm." in text.split(r"\caption{")[1].splitlines()[0]
    assert re.search(r"better & .* & \$\+0\.105 \[\+0\.\d+, \+0\.\d+\]\$", text)
    reversed_ones = [replace(run, higher_is_better=False) for run in runs]
    assert r"\caption{No method beats a\_b in accuracy at 95 \% over 4 seeds; better is worse." in latex(reversed_ones)


def test_the_command_writes_all_formats(runs, tmp_path):
    from fedalloy.cli.app import app

    folder = str(tmp_path / "runs")
    for format, file in (("csv", "a.csv"), ("parquet", "deep/a.parquet"), ("latex", "a.tex")):
        done = CliRunner().invoke(app, ["export", folder, "--format", format, "-o", str(tmp_path / file)])
        assert done.exit_code == 0, done.output
        assert (tmp_path / file).stat().st_size > 0
    for file, begins in (("b.PARQUET", b"PAR1"), ("b.tex", b"%"), ("b.csv", b"run,"), ("b.txt", b"run,")):
        done = CliRunner().invoke(app, ["export", folder, "-o", str(tmp_path / file)])  # the ending says the format
        assert done.exit_code == 0, done.output
        assert (tmp_path / file).read_bytes().startswith(begins), (tmp_path / file).read_bytes()[:20]
    other = CliRunner().invoke(app, ["export", folder, "-o", str(tmp_path / "b.xlsx")])
    assert other.exit_code == 2
    assert "a table as 'b.xlsx': the ending selects the format, allowed are .txt, .csv" in other.output
    CliRunner().invoke(app, ["export", folder, "--format", "csv", "-o", str(tmp_path / "c.parquet")])
    assert (tmp_path / "c.parquet").read_bytes() == (tmp_path / "b.csv").read_bytes()
    wrong = ["export", folder, "--format", "latex", "--table", "rounds", "-o", str(tmp_path / "b.tex")]
    assert CliRunner().invoke(app, wrong).exit_code == 2


def test_scores_of_clients_are_exported_without_torch(runs, tmp_path):
    """Loading it takes longer than writing a million rows."""
    line = ["export", str(tmp_path / "runs"), "--table", "clients", "-o", str(tmp_path / "clients.csv")]
    call = f"app({line}, standalone_mode=False)"
    code = f"import sys; from fedalloy.cli.app import app; {call}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert (tmp_path / "clients.csv").read_bytes().startswith(b"run,")
