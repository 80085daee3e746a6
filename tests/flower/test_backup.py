"""A server is backed up while it works and restored elsewhere, and its study continues as if nothing had happened."""

from __future__ import annotations

import re
import shutil
import sqlite3
import stat
import tarfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.experiment.recipe import load
from fedalloy.experiment.records.reading import read_run
from fedalloy.experiment.records.stop import ask_to_stop
from fedalloy.flower import backup
from fedalloy.flower.backup import back_up, restore
from fedalloy.flower.control import Control
from fedalloy.flower.flwr_cli import SubmittedRun
from fedalloy.flower.layout import PAUSED, ServerPlace
from fedalloy.flower.project_templates import FederationPlan, write_federation
from fedalloy.flower.status import look
from fedalloy.flower.submission import WANTED, Study
from tests.flower.fake import federation, play, recipe_file
from tests.flower.server_records import Records, a_run
from tests.flower.test_federation import assert_equal, simulated

pytestmark = pytest.mark.flower


@pytest.fixture
def records(tmp_path: Path) -> Records:
    write_federation(tmp_path / "fed", FederationPlan(("north", "south", "west")))
    return Records(ServerPlace.read(tmp_path / "fed" / "server"))


def begun(records: Records, tmp_path: Path, algorithm: str = "scaffold"):
    """A study on this server, and its three nodes."""
    recipe, run = recipe_file(tmp_path, algorithm), records.place.folder / "runs" / "study"
    run.mkdir(parents=True)
    shutil.copy(recipe, run / "wanted.toml")
    records.run(1, run)
    return recipe, run, federation(tmp_path)


def test_a_study_continues_on_the_restored_server_as_if_nothing_had_happened(records, tmp_path):
    recipe, run, grid = begun(records, tmp_path)

    def stop_after_two(text: str) -> None:
        if "round 2/3" in text:
            ask_to_stop(run)

    play(recipe, run, grid, say=stop_after_two)
    server = records.place.folder
    done = CliRunner().invoke(app, ["flower", "backup", str(server), "-o", str(tmp_path / "backup.tar")])
    assert done.exit_code == 0, done.output
    assert "the server and 1 runs" in done.output
    kept = {file.name: file.read_bytes() for file in (server / "ca.key", server / "seats.json") if file.exists()}
    shutil.rmtree(server.parent)
    other = tmp_path / "another machine"
    done = CliRunner().invoke(app, ["flower", "restore", str(tmp_path / "backup.tar"), str(other)])
    assert f"fedalloy flower run {other}/server {other}/runs/study/wanted.toml -o {other}/runs/study" in " ".join(
        done.output.split()
    )
    assert (other / "server" / "ca.key").read_bytes() == kept["ca.key"]
    assert stat.S_IMODE((other / "server" / "ca.key").stat().st_mode) == 0o600
    assert ServerPlace.read(other / "server").node_keys
    with closing(sqlite3.connect(other / "server" / "state.db")) as database:
        assert database.execute("SELECT count(*) FROM run").fetchone() == (1,)
    ending = play(other / "runs" / "study" / "wanted.toml", other / "runs" / "study", grid)
    assert (ending.status, ending.progress.round) == ("finished", 3)
    rows = list(read_run(other / "runs" / "study").rounds())
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert not any(row.get("lagging") for row in rows)
    for part, leaves in simulated(recipe)[0].state["shared"].items():
        assert_equal(ending.state["shared"][part], leaves)


def test_a_backup_in_the_middle_of_a_run_is_a_run_that_was_interrupted(records, tmp_path):
    """After every round, while the writer holds the folder: each restored run reaches the same end. (FedAvg: the
    nodes keep nothing, so that they need not be set back.)"""
    recipe, run, grid = begun(records, tmp_path, "fedavg")

    def copy(text: str) -> None:
        if found := re.search(r"round (\d)/3", text):
            back_up(records.place.folder, tmp_path / f"{found[1]}.tar")

    ending = play(recipe, run, grid, say=copy)
    for round in (1, 2, 3):
        place = tmp_path / f"restored-{round}"
        restore(tmp_path / f"{round}.tar", place)
        assert len(list(read_run(place / "runs" / "study").rounds())) in (round - 1, round)
        again = play(recipe, place / "runs" / "study", federation(tmp_path))
        assert_equal(again.state["shared"]["params"], ending.state["shared"]["params"], 0.0)


def test_what_is_asked_of_a_restored_server_concerns_its_own_runs(records, tmp_path, monkeypatch):
    """Flower's database has the folders of the original, which may be there still; a backup of the copy, too."""
    run = a_run(tmp_path / "original", "stopped")
    (run / PAUSED).touch()
    shutil.copy(recipe_file(tmp_path, "fedavg"), run / WANTED)
    records.run(1, run)
    server, asked = records.place.folder, list[Path]()

    def begin(study: Study, say: object) -> tuple[SubmittedRun, bool]:
        asked.append(study.folder)
        return SubmittedRun(study.cli, "2"), True

    monkeypatch.setattr(Study, "begin", begin)
    for number in (1, 2):
        back_up(server, tmp_path / f"{number}.tar")
        restore(tmp_path / f"{number}.tar", tmp_path / f"copy-{number}")
        server = tmp_path / f"copy-{number}" / "server"
        place, here = ServerPlace.read(server), tmp_path / f"copy-{number}" / "runs" / "original"
        assert [one.folder for one in look(server).runs] == [here]
        cli: Any = SimpleNamespace(place=place)
        Control(cli, print).resume()
        assert asked.pop() == here, "though its session at the time of the backup is running, for Flower"
        assert Study(cli, load(here / WANTED), here)._running(print, ()) is None, "nobody works for it here"


def test_checkpoints_are_copied_before_the_records_and_again_if_they_are_replaced(records, tmp_path, monkeypatch):
    recipe, run, grid = begun(records, tmp_path, "fedavg")
    play(recipe, run, grid)
    newest = max((run / "checkpoints").glob("*"))
    real = backup.Archive.add
    failed: list[Path] = []

    def replaced(self, file: Path, name: str) -> None:
        if file == newest and not failed:
            failed.append(file)
            raise FileNotFoundError
        real(self, file, name)

    monkeypatch.setattr(backup.Archive, "add", replaced)
    back_up(records.place.folder, tmp_path / "b.tar")
    with tarfile.open(tmp_path / "b.tar") as tar:
        names = tar.getnames()
    last = max(place for place, name in enumerate(names) if "/checkpoints/" in name)
    assert last < names.index("runs/study/rounds.jsonl")
    assert f"runs/study/checkpoints/{newest.name}" in names
    assert names.count("runs/study/rounds.jsonl") == 1, "a run in the server's folder is there once"
    assert not [name for name in names if name.endswith(("/lock", "index.sqlite"))]


def test_nothing_is_overwritten_and_a_damaged_backup_writes_nothing(records, tmp_path):
    file, place = tmp_path / "backup.tar", tmp_path / "new"
    back_up(records.place.folder, file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with pytest.raises(SpecError, match="is not overwritten"):
        back_up(records.place.folder, file)
    with pytest.raises(SpecError, match="not empty: nothing was written"):
        restore(file, tmp_path)
    whole = file.read_bytes()
    cut, changed = tmp_path / "cut.tar", tmp_path / "changed.tar"
    cut.write_bytes(whole[: len(whole) // 2])
    changed.write_bytes(whole.replace(b"north", b"nordh"))
    for bad in (cut, changed, records.place.folder / "server.toml"):
        with pytest.raises(CheckpointError, match=r"cannot be restored|is damaged|is no backup"):
            restore(bad, place)
        assert not place.exists()


def test_what_is_no_backup_and_a_folder_that_is_missing_are_said_in_words(records, tmp_path):
    with pytest.raises(CheckpointError, match=r"server\.toml is no backup of a server"):
        restore(records.place.folder / "server.toml", tmp_path / "new")
    with pytest.raises(SpecError, match=r"there is no folder .*missing; make it"):
        back_up(records.place.folder, tmp_path / "missing" / "backup.tar")
    with pytest.raises(SpecError, match=r"every later backup would hold it"):
        back_up(records.place.folder, records.place.folder / "backup.tar")


def test_an_archive_that_would_write_elsewhere_is_refused(tmp_path):
    (tmp_path / "evil").write_text("x")
    with tarfile.open(tmp_path / "evil.tar", "w") as tar:
        tar.add(tmp_path / "evil", arcname="../outside")
    with pytest.raises(CheckpointError, match="cannot be restored"):
        restore(tmp_path / "evil.tar", tmp_path / "place" / "new")
    assert not (tmp_path / "place" / "outside").exists()


def test_a_large_database_needs_space_only_where_the_backup_is_written(records, tmp_path, monkeypatch):
    """The system's temporary folder may be small, or in memory."""
    with closing(sqlite3.connect(records.place.database)) as base:
        base.execute("create table if not exists more (x)")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    back_up(records.place.folder, tmp_path / "b.tar")
    with tarfile.open(tmp_path / "b.tar") as tar:
        assert f"server/{records.place.database.name}" in tar.getnames()
    assert not list(tmp_path.glob(".*")), "no draft and no copy is left"


def test_a_full_disk_is_said_in_words_and_leaves_nothing(records, tmp_path, monkeypatch):
    def full(self, file: Path, name: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(backup.Archive, "add", full)
    with pytest.raises(CheckpointError, match=r"b\.tar cannot be written: .*No space left"):
        back_up(records.place.folder, tmp_path / "b.tar")
    assert not list(tmp_path.glob(".*"))
    assert not (tmp_path / "b.tar").exists()
