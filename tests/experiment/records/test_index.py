"""An index tells what the records tell, whatever happened to either of them."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.core.errors import CheckpointError
from fedalloy.experiment.records import index as module
from fedalloy.experiment.records.index import Index
from fedalloy.experiment.records.index_tables import FILE
from fedalloy.experiment.records.scalars import scalars


class Counter:
    """Counts rounds: the smallest thing that can be gathered."""

    rounds = 0

    def add(self, row):
        self.rounds += 1

    def dump(self):
        return str(self.rounds).encode()

    def load(self, data):
        self.rounds = int(data or 0)


def row(round: int, salt: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = {
        "round": round, "ids": [0, 2], "weights": [0.25, 0.75], "train_loss": 1 / (round + salt), "absent": [],
        "dropped": {"1": "not finite"} if round % 3 == 0 else {}, "info": {"angle": [0.1, 0.3]},
    }  # fmt: skip
    if round % 2:
        found["evaluation"] = {"accuracy": {"mean": round / 100, "worst": None}}
    return found


def clients_row(round: int, **more: Any) -> dict[str, Any]:
    return {"round": round, "split": "test", "model": "global", **more, "ids": [0, 1], "accuracy": [0.5, round / 100]}


def write(folder: Path, rows: list[dict[str, Any]]) -> None:
    for name, make in (("rounds", lambda one: one), ("clients", lambda one: clients_row(one["round"]))):
        with (folder / f"{name}.jsonl").open("a") as file:
            file.writelines(json.dumps(make(one), separators=(",", ":")) + "\n" for one in rows)
    with (folder / "timings.jsonl").open("a") as file:
        file.writelines(json.dumps({"round": one["round"], "clients": 0.5, "server": 0.25}) + "\n" for one in rows)


def check(index: Index, rows: list[dict[str, Any]]) -> None:
    """The index says exactly what the rows say."""
    table = index.table()
    assert table.rounds == tuple(one["round"] for one in rows)
    for place, one in enumerate(rows):
        known = {name: value for name, value in zip(table.names, table.values[place], strict=True) if value == value}
        assert known == scalars(one)
    assert index.last_round == (rows[-1]["round"] if rows else 0)
    assert index.seconds() == [0.75] * len(rows)
    assert [round for round, _ in index.evaluations()] == [one["round"] for one in rows]
    assert sum(index.reasons().values()) == sum(len(one["dropped"]) for one in rows)
    assert {event["round"] for event in index.events()} == {one["round"] for one in rows if one["dropped"]}
    assert index.clients() == (clients_row(rows[-1]["round"]) if rows else {})
    for one in rows:
        assert index.clients(one["round"]) == clients_row(one["round"])
    assert all(int(one.dump()) == len(rows) for one in index.gathered.values())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 5)),
        st.tuples(st.just("cut"), st.integers(0, 4)),
        st.tuples(st.sampled_from(["update", "reopen", "damage", "torn line"]), st.just(0)),
    ),
    max_size=8,
)


@given(STEPS, st.integers(60, 2000))
def test_whatever_happens_the_index_agrees_with_the_records(steps, at_once):
    folder, before, module.AT_ONCE = Path(tempfile.mkdtemp()), module.AT_ONCE, at_once
    try:
        index, rows, salt = Index(folder, {"counter": Counter()}), list[dict[str, Any]](), 0
        for what, amount in steps:
            if what == "add":
                new = [row(len(rows) + 1 + more, salt) for more in range(amount)]
                write(folder, new)
                rows += new
            elif what == "cut":  # a run that resumes from an earlier round, and goes another way
                rows, salt = rows[:amount], salt + 1
                for name in ("rounds", "clients", "timings"):
                    (folder / f"{name}.jsonl").unlink(missing_ok=True)
                write(folder, rows)
            elif what == "torn line":
                with (folder / "rounds.jsonl").open("a") as file:
                    file.write('{"round":')
                index.update_fully()
                os.truncate(folder / "rounds.jsonl", (folder / "rounds.jsonl").stat().st_size - len('{"round":'))
            else:
                if what != "update":
                    index.close()
                if what == "damage":
                    (folder / FILE).write_bytes(b"SQLite format 3\0" + b"x" * 5000)
                index = index if what == "update" else Index(folder, {"counter": Counter()})
                index.update_fully()
        index.update_fully()
        check(index, rows)
        index.close()
    finally:
        module.AT_ONCE = before
        shutil.rmtree(folder)


def test_only_what_is_new_is_read_again(tmp_path, monkeypatch):
    write(tmp_path, [row(1), row(2)])
    index = Index(tmp_path)
    index.update_fully()
    index.close()
    read: list[int] = []

    def noted(one):
        read.append(one["round"])
        return scalars(one)

    monkeypatch.setattr(module, "scalars", noted)
    write(tmp_path, [row(3)])
    index = Index(tmp_path)
    index.update_fully()
    assert read == [3]
    assert index.table(after=2).rounds == (3,)
    index.close()


def test_an_index_in_use_elsewhere_or_in_a_foreign_file_is_kept_in_memory(tmp_path):
    write(tmp_path, [row(1)])
    first, second = Index(tmp_path), Index(tmp_path)
    for one in (first, second):
        one.update_fully()
        check(one, [row(1)])
        one.close()
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "linked").mkdir()
    write(tmp_path / "linked", [row(1)])
    (tmp_path / "linked" / FILE).symlink_to(elsewhere)
    linked = Index(tmp_path / "linked")
    linked.update_fully()
    check(linked, [row(1)])
    assert not elsewhere.exists()


def test_an_index_that_gathered_less_is_made_anew(tmp_path):
    write(tmp_path, [row(1), row(2)])
    poor = Index(tmp_path)
    poor.update_fully()
    poor.close()
    rich = Index(tmp_path, {"counter": Counter()})
    rich.update_fully()
    check(rich, [row(1), row(2)])


def test_another_version_of_the_tables_is_replaced_and_the_records_are_not_touched(tmp_path):
    write(tmp_path, [row(1)])
    before = {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)}
    with sqlite3.connect(tmp_path / FILE) as other:
        other.execute("CREATE TABLE rounds(x)")
    other.close()
    index = Index(tmp_path)
    index.update_fully()
    check(index, [row(1)])
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_a_broken_row_is_an_error_and_leaves_what_was_gathered(tmp_path):
    write(tmp_path, [row(1)])
    index = Index(tmp_path, {"counter": Counter()})
    index.update_fully()
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write(json.dumps(row(2)) + "\n[]\n")
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"rounds\.jsonl is not a row"):
            index.update()
        assert (len(index), index.gathered["counter"].dump()) == (1, b"1")


def test_mixtures_are_not_taken_for_evaluations_and_any_order_of_keys_is_read(tmp_path):
    with (tmp_path / "clients.jsonl").open("w") as file:
        for one in (clients_row(1, mix=0.5), clients_row(1), {"ids": [3], "accuracy": [1.0], "round": 2}):
            file.write(json.dumps(one, separators=(",", ":")) + "\n")
    index = Index(tmp_path)
    index.update_fully()
    assert index.evaluations() == [(1, "global"), (2, "global")]
    assert index.clients()["ids"] == [3]


def test_events_are_bounded_and_counted_in_full(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_EVENTS", 5)
    many = {**row(1), "dropped": {str(client): "late" for client in range(8)}}
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps({**many, "round": n}) + "\n" for n in (1, 2)))
    index = Index(tmp_path)
    index.update_fully()
    assert index.reasons() == {"late": 16}
    assert [(event["round"], event["client"]) for event in index.events()] == [(2, c) for c in (7, 6, 5, 4, 3)]
