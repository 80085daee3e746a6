"""Columns of numbers, however they are kept, are written as the rows of the records say."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records import number_lists
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.number_lists import NumberList, read_lists
from fedalloy.experiment.records.stream import encode
from fedalloy.results.export import columns
from fedalloy.results.export.columns import (
    RowBlock,
    SameColumn,
    StoredColumn,
    TableColumn,
    ValueColumn,
    WrittenColumn,
    blocks_of,
    cell,
    lines_of,
)
from fedalloy.results.export.tables import blocks, rows
from fedalloy.results.export.writing import WRITERS, write_csv

QUICKLY = settings(max_examples=100, deadline=None, phases=[Phase.explicit, Phase.generate])
NUMBERS = st.none() | st.floats(-1e299, 1e299) | st.floats(-1, 1).map(lambda one: round(one, 3))
ODD = [0.0, -0.0, 1.0, 5e-324, 1e-4, 9.999e-5, 1e-5, 1e-7, 123456789.5, 1e9, 1e15 + 0.5, 1e16, 1e22, 0.1, 1 / 3, None]


@QUICKLY
@example(ODD)
@given(st.lists(NUMBERS, min_size=1, max_size=30))
def test_every_form_of_a_column_has_the_same_cells(values):
    expected = ["" if one is None else repr(one) for one in values]
    assert [text.decode() for text in StoredColumn(pa.array(values, pa.float64())).cells()] == expected
    assert [text.decode() for text in ValueColumn(values).cells()] == expected
    read = read_numbers(values)
    assert [text.decode() for text in read.cells] == expected
    assert [None if math.isnan(one) else one for one in read.values.tolist()] == values


@pytest.mark.parametrize("fast", [True, False])
@QUICKLY
@given(data=st.data())
def test_a_line_is_read_as_json_reads_it_or_not_at_all(fast, data):
    """Also one that is damaged at any byte."""
    count = data.draw(st.integers(1, 4))
    lists = st.lists(NUMBERS | st.integers(-9, 9), min_size=count, max_size=count)
    row = {"round": 3, "split": "test", "model": "a\u00fc", "ids": list(range(count)), "loss": data.draw(lists)}
    line = bytearray(f"{encode(row)}\n", "ascii")
    if data.draw(st.booleans()):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.sampled_from(b'0.,e-+nul"[]{}:\\x\n'))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(number_lists, "available", lambda: fast)
        number_lists._read_ids.cache_clear()
        found = read_lists(bytes(line))
    if found is None:
        return
    told, numbers = found
    again = {name: [None if math.isnan(one) else one for one in some.values.tolist()] for name, some in numbers.items()}
    try:
        parsed = json.loads(bytes(line))
    except ValueError:  # a number that JSON would write in another way, such as 00 or +1
        assert b"".join(line.split()) == bytes(line).strip()
        assert all(float(text or b"nan") is not None for some in numbers.values() for text in some.cells)
        return
    assert {**told, **again} == parsed


def test_whole_lines_are_read_at_once():
    """The test above would pass if nothing ever were."""
    line = b'{"round":1,"split":"test","model":"global","ids":[0,1],"accuracy":[0.5,null],"n":[3,4]}\n'
    told, lists = read_lists(line) or ({}, {})
    assert told["model"] == "global"
    assert {name: one.whole for name, one in lists.items()} == {"ids": True, "accuracy": False, "n": True}
    for wrong in (line.replace(b"null]", b"null,1]"), line.replace(b"0.5", b"1e999"), line[:-1], b"[]\n", b""):
        assert read_lists(wrong) is None


def two_forms(place: Path, names: list[str] | None = None, count: int = 5) -> dict[str, Path]:
    made = {}
    for form, least in (("lines", None), ("files", 2)):
        path = place / form / "run"
        manifest = {"clients": 9, "names": names} if names else None
        environment = {"parquet_from": least} if least else {}
        folder = RunFolder.create(path, {"name": "a, b", "run": {"seeds": [3]}}, environment, manifest)
        with folder.lock():
            for round, model in ((1, "global"), (2, "global"), (2, "personal")):
                values = [None if one == 1 else (one + round) / 7 for one in range(count)]
                more = {"top3": [1.0] * count} if round == 2 else {}
                folder.append("clients", {"round": round, "split": "test", "model": model,
                                          "ids": list(range(count)), "loss": values, **more})  # fmt: skip
        made[form] = path
    return made


def written(table: str, runs: list[Path], place: Path, format: str) -> bytes:
    WRITERS[format](place, lambda: blocks(table, runs))
    return place.read_bytes()


@pytest.mark.parametrize("names", [None, ["ann", 'b"o"b', "e, ve"]])
@pytest.mark.parametrize("fast", [True, False])
def test_files_do_not_depend_on_how_scores_are_kept(tmp_path, monkeypatch, names, fast):
    runs = two_forms(tmp_path, names)
    monkeypatch.setattr(number_lists, "available", lambda: fast)
    for format in WRITERS:
        found = {}
        for form, run in runs.items():
            monkeypatch.chdir(run.parent)
            found[form] = written("clients", [Path("run")], tmp_path / form / f"t.{format}", format)
        assert found["lines"] == found["files"], format
    expected = list(rows("clients", [Path("run")]))
    read = list(csv.reader(io.StringIO((tmp_path / "files/t.csv").read_text(), newline="")))
    head, *body = read
    assert head == [*expected[0], "top3"]
    assert body == [["" if row.get(name) is None else str(row.get(name)) for name in head] for row in expected]
    table = pq.read_table(tmp_path / "files/t.parquet")
    assert table.to_pylist() == [{name: row.get(name) for name in head} for row in expected]


def test_runs_of_both_forms_and_columns_that_come_late_in_one_file(tmp_path):
    runs = list(two_forms(tmp_path).values())
    text = written("clients", runs, tmp_path / "t.csv", "csv").decode()
    assert len(text.splitlines()) == 1 + 2 * 3 * 5
    assert text.splitlines()[0].endswith("client,client_name,loss,top3")
    assert text.splitlines()[1].endswith("0,,0.14285714285714285,")


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"0.14285714285714285", b"0.1428.571"), (b'"ids":[0', b'"ids":[-1'), (b"null", b"1e300"), (b"null", b"0.5,1")],
)
def test_damaged_lines_are_refused_by_name(tmp_path, old, new):
    file = two_forms(tmp_path)["lines"] / "clients.jsonl"
    file.write_bytes(file.read_bytes().replace(old, new, 1))
    with pytest.raises(CheckpointError, match=r"clients.jsonl"):
        written("clients", [file.parent], tmp_path / "t.csv", "csv")


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    file = two_forms(tmp_path)["lines"] / "clients.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    assert write_csv(tmp_path / "t.csv", lambda: blocks("clients", [file.parent])) == 10


def test_texts_and_truth_are_written_as_by_pythons_csv(tmp_path):
    given: list[dict[str, Any]] = [{"a": "x,y", "b": True}, {"a": 'say "no"', "b": False}, {"a": "two\nlines", "b": 1}]
    write_csv(tmp_path / "t.csv", lambda: blocks_of(given, 2))
    with io.StringIO(newline="") as file:
        csv.writer(file).writerows([["a", "b"], *(list(row.values()) for row in given)])
        assert (tmp_path / "t.csv").read_bytes().decode() == file.getvalue()


@QUICKLY
@given(st.data())
def test_lines_that_arrow_joins_are_those_that_python_joins(data):
    """Columns of every form in any order, also none of one value before the first that changes."""
    count = data.draw(st.integers(1, 5))
    values, texts = (st.lists(one, min_size=count, max_size=count) for one in (NUMBERS, st.none() | st.text()))
    made: dict[str, Callable[[], TableColumn]] = {
        "same": lambda: SameColumn(data.draw(st.sampled_from([None, "x,y", 3])), count),
        "any": lambda: ValueColumn(data.draw(texts)),
        "stored": lambda: StoredColumn(pa.array(data.draw(values), pa.float64())),
        "written": lambda: WrittenColumn(read_numbers(data.draw(values))),
    }
    kinds = data.draw(st.lists(st.sampled_from(list(made)), min_size=1, max_size=5))
    block = RowBlock(count, {str(place): made[kind]() for place, kind in enumerate(kinds)})
    names = [*block.columns, "not in this block"]
    expected = lines_of(block, names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "_LEAST_JOINED", 1)
        assert lines_of(block, names) == expected
        patch.setattr(columns, "_joined", lambda *_: b"joined")
        assert (lines_of(block, names) == b"joined") == bool({"stored", "written"} & set(kinds))


def read_numbers(values: list[float | None]) -> NumberList:
    found = NumberList.read(json.dumps(values, separators=(",", ":"))[1:-1].encode())
    assert found is not None
    return found


def test_cells_of_columns_of_one_value():
    assert list(SameColumn(None, 2).cells()) == [b"", b""]
    assert SameColumn(None, 2).kinds == ValueColumn([None]).kinds == frozenset()
    assert list(ValueColumn([float("nan"), 2]).cells()) == [b"", b"2"]
    assert cell("a\rb") == b'"a\rb"'
    numbers = NumberList.read(b"null,null")
    assert numbers is not None
    assert WrittenColumn(numbers).kinds == frozenset()
