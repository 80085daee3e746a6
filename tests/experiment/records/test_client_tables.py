"""Evaluations in files of their own read, resume and break like those in lines of JSON."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.fit import fit
from fedalloy.experiment.records import client_tables
from fedalloy.experiment.records.client_tables import DEFAULT_LEAST, ClientTables, least_clients
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.experiment.records.index import Index
from fedalloy.experiment.records.reading import last_clients, read_run
from fedalloy.experiment.records.stream import encode
from fedalloy.methods.published import fedavg
from fedalloy.testing import small_task

TASK = small_task()
RECORDS = ("rounds.jsonl", "clients.jsonl", "recipe.toml", "identity.json", "status.json")


def begin(place: Path, least: int | None) -> RunFolder:
    return RunFolder.create(place, {"run": {"seeds": [0]}}, {"parquet_from": least} if least else {})


def a_row(round: int = 1, count: int = 4, **more: Any) -> dict[str, Any]:
    scores = [None if place == 1 else place / 7 + round for place in range(count)]
    return {"round": round, "split": "test", "model": "global", **more, "ids": list(range(3, 3 + count)),
            "accuracy": scores, "top3": scores}  # fmt: skip


def written(place: Path, least: int | None, rows: list[dict[str, Any]]) -> RunFolder:
    folder = begin(place, least)
    with folder.lock():
        for row in rows:
            folder.append("clients", row)
    return folder


def bytes_of(place: Path) -> dict[str, bytes]:
    files = [*(place / name for name in RECORDS), *(place / "evaluations").glob("*")]
    return {file.name: file.read_bytes() for file in files}


NUMBERS = st.none() | st.floats(-1e299, 1e299) | st.integers(-1000, 1000) | st.just(float("nan")) | st.just(1e-300)


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(st.data())
def test_both_forms_read_alike_to_the_last_bit(tmp_path_factory, data):
    count = data.draw(st.integers(1, 5))
    column = st.lists(NUMBERS, min_size=count, max_size=count) | st.lists(
        st.integers(-9, 9), min_size=count, max_size=count
    )
    rows = [
        {"round": round, "split": "test", "model": model, **({"mix": 0.3} if model == "mixed" else {}),
         "ids": data.draw(st.lists(st.integers(0, 99), min_size=count, max_size=count, unique=True)),
         "accuracy": data.draw(column), "loss": data.draw(column)}
        for round in (1, 2) for model in ("mixed", "global", "personal")
    ]  # fmt: skip
    place = tmp_path_factory.mktemp("both")
    for name, least in (("lines", None), ("files", 2)):
        written(place / name, least, rows)
    lines, files = (list(read_run(place / name).clients()) for name in ("lines", "files"))
    assert [list(row) for row in files] == [list(row) for row in lines], "the same columns in the same order"
    assert files == lines
    assert last_clients(place / "files") == last_clients(place / "lines")
    assert len(list((place / "files").glob("evaluations/*"))) == (6 if count >= 2 else 0)
    read = []
    for name in ("lines", "files"):
        index = Index(place / name)
        index.update_fully()
        read.append((index.evaluations(), index.clients(), index.clients(1)))
        index.close()
    assert read[0] == read[1]


def test_other_programs_read_the_folder_as_one_table(tmp_path):
    pandas = pytest.importorskip("pandas")
    written(tmp_path / "run", 1, [a_row(1), a_row(2, mix=0.5, model="mixed"), a_row(2)])
    table = pandas.read_parquet(tmp_path / "run" / "evaluations")
    mine = table[(table["model"] == "global") & (table["round"] == 2)]
    assert mine["id"].tolist() == [3, 4, 5, 6]
    assert mine["accuracy"].isna().tolist() == [False, True, False, False]
    assert table["mix"].dropna().unique().tolist() == [0.5]


def test_the_same_row_gives_the_same_bytes_and_small_ones_stay_lines(tmp_path):
    rows = [a_row(1), a_row(2, count=3), {**a_row(3), "note": "x"}]
    for name in ("one", "two"):
        written(tmp_path / name, 4, rows)
    assert [file.name for file in (tmp_path / "one" / "evaluations").iterdir()] == ["round-000001-global.parquet"]
    assert bytes_of_both(tmp_path)
    head, *others = (json.loads(line) for line in (tmp_path / "one" / "clients.jsonl").read_text().splitlines())
    assert head == {"round": 1, "split": "test", "model": "global", "clients": 4,
                    "parquet": "round-000001-global.parquet"}  # fmt: skip
    assert others == [json.loads(encode(row)) for row in rows[1:]]


def bytes_of_both(place: Path) -> bool:
    one, two = ((place / name / "evaluations" / "round-000001-global.parquet").read_bytes() for name in ("one", "two"))
    return one == two and (place / "one/clients.jsonl").read_bytes() == (place / "two/clients.jsonl").read_bytes()


# ---------------------------------------------------------------------------------------------- resuming


class Killed(BaseException):
    pass


def train(place: Path, resume: bool = False, rounds: int = 5, **more: Any) -> None:
    fit(
        fedavg(lr=0.3), TASK, folder=place, resume=resume, rounds=rounds, engine="loop", checkpoint_every=0.0,
        **{"parquet_from": 2, **more},
    )  # fmt: skip


def killed_at(monkeypatch: pytest.MonkeyPatch, step: int, after: bool, resume: bool, place: Path) -> bool:
    """A run that dies at the given rename of a file, before or after it; False if it ended before."""
    real, left = os.replace, [step]

    def replace(*paths: Any) -> None:
        left[0] -= 1
        if left[0] == 0 and after:
            real(*paths)
        if left[0] <= 0:  # dead processes write nothing more
            raise Killed
        real(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace)
        try:
            train(place, resume=resume)
        except Killed:
            return True
    return False


@pytest.mark.parametrize("after", [False, True])
def test_a_kill_at_any_file_and_resume_gives_the_same_files(tmp_path, monkeypatch, after):
    train(tmp_path / "whole")
    expected, step = bytes_of(tmp_path / "whole"), 1
    assert sum(name.endswith(".parquet") for name in expected) == 5
    while killed_at(monkeypatch, step, after, False, place := tmp_path / f"cut-{step}"):
        killed_at(monkeypatch, 2, after, True, place)
        train(place, resume=True)
        assert bytes_of(place) == expected, step
        step += 1
    assert step > 12, "environment, identity, status and recipe, and in every round a file and a checkpoint"


def test_files_that_were_not_deleted_would_be_seen(tmp_path, monkeypatch):
    """The check above fails if files beyond the checkpoint stay."""
    train(tmp_path / "whole", rounds=2)
    train(tmp_path / "cut", rounds=2)
    left = tmp_path / "cut" / "evaluations" / "round-000003-global.parquet"
    for keep in (True, False):
        left.write_bytes(b"of a run that was killed in round 3")
        with monkeypatch.context() as patch:
            if keep:
                patch.setattr(ClientTables, "forget", lambda *_, **__: None)
            train(tmp_path / "cut", resume=True, rounds=2)
        assert left.exists() == keep
        assert (bytes_of(tmp_path / "cut") == bytes_of(tmp_path / "whole")) != keep


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_file_that_is_missing_is_named_before_anything_is_changed(tmp_path, damage):
    train(tmp_path, rounds=3)
    file = tmp_path / "evaluations" / "round-000002-global.parquet"
    file.unlink() if damage == "gone" else file.write_bytes(file.read_bytes()[:-9])
    before = bytes_of(tmp_path)
    with pytest.raises(CheckpointError, match=r"round-000002-global.parquet is missing or incomplete"):
        train(tmp_path, resume=True, rounds=4)
    assert bytes_of(tmp_path) == before


def test_the_limit_is_part_of_a_run(tmp_path):
    train(tmp_path, rounds=2)
    with pytest.raises(CheckpointError, match="parquet_from is 2 there, 3 here"):
        train(tmp_path, resume=True, rounds=3, parquet_from=3)


# ---------------------------------------------------------------------------------------------- without pyarrow


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_tables, "available", lambda: False)
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize(
    ("wanted", "scored", "least", "told"),
    [(None, 10, None, False), (None, DEFAULT_LEAST, None, True), (0, DEFAULT_LEAST, None, False), (50, 10, 50, False)],
)
def test_without_pyarrow_scores_stay_lines_and_a_large_run_says_so(bare, wanted, scored, least, told):
    found = least_clients(wanted, scored)
    assert found[0] == least
    assert ("pip install pyarrow" in (found[1] or "")) == told


def test_with_pyarrow_the_default_is_a_number():
    assert least_clients(None, 10) == (DEFAULT_LEAST, None)
    assert least_clients(0, 1 << 20) == (None, None)
    assert least_clients(7, 10) == (7, None)


def test_what_was_asked_for_and_cannot_be_written_is_refused_before_the_first_round(bare, tmp_path):
    with pytest.raises(SpecError, match=r"evaluate.parquet_from = 2: writing Parquet needs pyarrow"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_says_once_that_its_scores_stay_lines(bare, tmp_path, monkeypatch):
    monkeypatch.setattr(client_tables, "DEFAULT_LEAST", 2)
    with pytest.warns(RuntimeWarning, match="written as lines of JSON: Parquet needs pyarrow"):
        train(tmp_path, parquet_from=None, rounds=2)
    monkeypatch.setattr(client_tables, "available", lambda: True)
    train(tmp_path, parquet_from=None, rounds=3, resume=True)  # warnings are errors
    assert not (tmp_path / "evaluations").exists(), "a run keeps the form with which it began"
    assert "pyarrow" in json.loads((tmp_path / "environment.json").read_text())["notices"][0]


def test_files_are_neither_read_nor_continued_without_pyarrow(tmp_path, request):
    train(tmp_path, rounds=2)
    request.getfixturevalue("bare")
    with pytest.raises(CheckpointError, match="keeps the scores of its clients as Parquet, which needs pyarrow"):
        train(tmp_path, resume=True, rounds=3)
    with pytest.raises(CheckpointError, match="cannot be read: this needs pyarrow"):
        list(read_run(tmp_path).clients())


# ---------------------------------------------------------------------------------------------- damage


def line_with(folder: RunFolder, **changed: Any) -> None:
    line = json.loads((folder.path / "clients.jsonl").read_text())
    (folder.path / "clients.jsonl").write_text(json.dumps({**line, **changed}) + "\n")


def test_damage_is_named(tmp_path):
    folder = written(tmp_path / "run", 1, [a_row(count=2000)])
    file = folder.path / "evaluations" / "round-000001-global.parquet"
    whole = file.read_bytes()
    for place in (len(whole) // 4, len(whole) // 2, len(whole) - 20):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0x55]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match=r"round-000001-global.parquet is damaged"):
            list(read_run(folder.path).clients())
    file.write_bytes(whole)
    line_with(folder, clients=3)
    with pytest.raises(CheckpointError, match="it has 2000 rows of 3 columns, 3 clients are expected"):
        list(read_run(folder.path).clients())
    line_with(folder, clients="many")
    with pytest.raises(CheckpointError, match="damaged"):
        list(read_run(folder.path).clients())


@pytest.mark.parametrize("name", ["../../secret.parquet", "/etc/passwd", "round-1-global.parquet/x", ""])
def test_no_name_leads_out_of_the_run(tmp_path, name):
    folder = written(tmp_path / "run", 1, [a_row()])
    line_with(folder, parquet=name)
    with pytest.raises(CheckpointError, match="which no run writes"):
        list(read_run(folder.path).clients())


@pytest.mark.parametrize("linked", ["file", "folder"])
def test_links_are_not_followed(tmp_path, linked):
    folder, other = (written(tmp_path / name, 1, [a_row()]) for name in ("run", "other"))
    place = folder.path / "evaluations"
    source = place / "round-000001-global.parquet" if linked == "file" else place
    (place / "round-000001-global.parquet").unlink()
    if linked == "folder":
        place.rmdir()
    source.symlink_to(other.path / source.relative_to(folder.path))
    with pytest.raises(CheckpointError, match="not a regular file"):
        list(read_run(folder.path).clients())


def test_a_table_that_no_run_writes_is_refused(tmp_path):
    folder = written(tmp_path / "run", 1, [a_row()])
    file = folder.path / "evaluations" / "round-000001-global.parquet"
    table = pq.read_table(file)
    for changed, match in ((table.drop_columns(["id"]), "id"), (table.set_column(4, "id", [["a"] * 4]), "not numbers")):
        pq.write_table(changed, file)
        with pytest.raises(CheckpointError, match=f"damaged.*{match}"):
            list(read_run(folder.path).clients())


def test_tensors_and_infinities_are_kept_as_json_keeps_them(tmp_path):
    row = {**a_row(), "accuracy": torch.tensor([0.5, float("nan"), float("inf"), 1]).tolist()}
    for name, least in (("lines", None), ("files", 1)):
        written(tmp_path / name, least, [row])
    found = [list(read_run(tmp_path / name).clients()) for name in ("lines", "files")]
    assert found[0] == found[1]
    assert found[0][0]["accuracy"] == [0.5, None, None, 1.0]
