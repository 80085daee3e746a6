"""What is known about a federation, and since when: from fixed records, as a server and its front leave them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

import fedalloy
from fedalloy.cli.app import app
from fedalloy.cli.flower import _finish
from fedalloy.core.errors import SpecError
from fedalloy.experiment.records.folder import RunFolder
from fedalloy.flower import status
from fedalloy.flower.layout import PAUSED, RUNNING, ServerPlace
from fedalloy.flower.members import remove
from fedalloy.flower.programs import free_port
from fedalloy.flower.project_templates import FederationPlan, write_federation
from fedalloy.flower.site_logs import site_log
from fedalloy.flower.status import CRITICAL, OK, WARNING, look
from tests.flower.server_records import NOW, Records, a_run

pytestmark = pytest.mark.flower


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Records:
    """A server that answers."""
    write_federation(tmp_path / "fed", FederationPlan(("north", "south", "west"), port=free_port()))
    monkeypatch.setattr(status, "answers", lambda place: True)
    monkeypatch.setattr(status, "front_answers", lambda place: True)
    return Records(ServerPlace.read(tmp_path / "fed" / "server"))


def test_a_node_that_is_dead_is_silent_before_flower_notices(records):
    records.node("north", "online")
    records.node("south", "online")
    records.node("west", "online", until=-3.0)
    records.contacts(
        north={"last_contact": NOW - 2}, south={"last_contact": NOW - 45, "refused": NOW - 3, "reason": "clock +9.0"}
    )
    seen = look(records.place.folder, NOW)
    assert seen.server is not None
    north, south, west, stranger = seen.server.nodes
    assert (north.state, south.state, west.state) == ("connected", "silent", "not connected")
    assert south.since == NOW - 45, "since its last contact"
    assert west.since == pytest.approx(NOW - 3), "Flower has not written it down yet"
    assert (stranger.name, stranger.refusal) == ("", "its key is not admitted")
    texts = [one.text for one in seen.findings()]
    assert texts[0] == "2 of 3 nodes are missing: south (silent), west (not connected)"
    assert "south was refused: its clock is 9 s ahead of the server's" in texts
    assert seen.code == WARNING


def test_a_node_that_was_revoked_and_asks_on_has_its_name(records):
    """Its key is not admitted, but it is known whose it was."""
    records.node("north", "online")
    records.contacts(west={"last_contact": NOW - 9, "refused": NOW - 3, "reason": "unknown-key", "name": ""})
    remove(records.place, "west")
    seen = look(records.place.folder, NOW)
    assert seen.server is not None
    assert [(node.name, node.title) for node in seen.server.nodes if node.state == "not admitted"] == [
        ("", "west (a former key)"), ("", "key 99")
    ]  # fmt: skip
    assert "west (a former key) was refused: its key is not admitted" in [one.text for one in seen.findings()]
    later = [one.text for one in look(records.place.folder, NOW + 600).findings()]
    assert not [text for text in later if "was refused" in text], "it has stopped, as a key that was replaced does"
    assert [line for line in site_log(records.place.folder, "west") if "west (a former key) was refused" in line]


def test_versions_of_nodes_are_shown_and_another_one_is_a_warning(records):
    for name in ("north", "south"):
        records.node(name, "online")
    mine = {"last_contact": NOW - 1, "version": fedalloy.__version__}
    records.contacts(north=mine, south={**mine, "version": "0.0.9"})
    seen = look(records.place.folder, NOW)
    assert seen.server is not None
    assert [node.version for node in seen.server.nodes if node.name] == [fedalloy.__version__, "0.0.9"]
    assert [one.text for one in seen.findings() if "version" in one.text] == [
        f"south has fedalloy 0.0.9, the server {fedalloy.__version__}: runs refuse it until both have the same version"
    ]
    shown = CliRunner().invoke(app, ["flower", "status", str(records.place.folder)]).output
    assert "0.0.9" in shown


def test_all_nodes_dead_and_no_front_are_critical(records, monkeypatch):
    for name in ("north", "south"):
        records.node(name, "offline")
    records.node("west", "registered")
    seen = look(records.place.folder, NOW)
    assert seen.server is not None
    assert [one.state for one in seen.server.nodes] == ["not connected", "not connected", "never connected"]
    assert (seen.code, seen.findings()[0].text) == (CRITICAL, "no node is connected")
    monkeypatch.setattr(status, "front_answers", lambda place: False)
    assert "its front does not answer" in look(records.place.folder, NOW).findings()[0].text


def test_an_older_run_that_goes_on_is_shown_first_and_hides_none_that_broke_off_beside_it(records, tmp_path):
    """Of two studies side by side one fails: that is critical, until it is continued. What failed before is past."""
    records.node("north", "online")
    records.run(3, a_run(tmp_path / "past", "failed"), ago=900.0, over="failed")
    folder = a_run(tmp_path / "old")
    records.run(1, folder, ago=500.0)
    records.run(2, a_run(tmp_path / "new", "failed"), ago=100.0, over="failed")
    seen = look(records.place.folder, NOW)
    assert seen.server is not None
    states = [(one.number, one.state) for one in seen.server.runs]
    assert states == [("2", "finished:failed"), ("1", "running"), ("3", "finished:failed")]
    assert seen.server.runs[1].since == pytest.approx(NOW - 500.0)
    assert [run.folder for run in seen.runs] == [folder, tmp_path / "new"]
    told = [one.text for one in seen.findings() if one.level == CRITICAL]
    assert any(f"the run in {tmp_path / 'new'} is failed" in text for text in told), told
    records.run(4, tmp_path / "new", ago=50.0)
    assert [run.folder for run in look(records.place.folder, NOW).runs] == [tmp_path / "new", folder]


def test_a_run_that_waits_for_its_minimum_is_no_run_that_is_well(tmp_path):
    """Nodes that refuse are connected, and the last finished round was complete."""
    folder = a_run(tmp_path / "run", rows=1)
    (folder / "rounds.jsonl").write_text(json.dumps({"round": 1, "ids": [0, 1, 2], "dropped": {}}) + "\n")
    log = folder / "federation.log"
    with RunFolder(folder).lock():
        log.write_text("round 1/10: north, south, west\nwaiting: 1 of the 2 contributions a round needs (south: no)\n")
        seen = look(folder, NOW)
        assert [(one.level, "waiting: 1 of the 2" in one.text) for one in seen.findings()] == [(WARNING, True)]
        with log.open("a") as file:
            file.write("round 2/10: north, south, west\n")
        assert look(folder, NOW).code == OK


@pytest.mark.parametrize("state", ["stopped", "interrupted"])
def test_a_paused_run_is_shown_as_paused_and_is_no_fault(records, tmp_path, state):
    """It is over for Flower, and another run may be newer; '--wait 0' ends it in the middle of a round."""
    records.node("north", "online")
    folder = a_run(tmp_path / "paused", "stopped" if state == "stopped" else "running")
    (folder / PAUSED).touch()
    records.run(1, folder, ago=500.0, over="stopped")
    records.run(2, a_run(tmp_path / "new", "finished", rows=1), ago=100.0, over="completed")
    seen = look(records.place.folder, NOW)
    assert [(run.folder, run.state) for run in seen.runs] == [(folder, "paused")]
    assert not [one for one in seen.findings() if str(folder) in one.text]
    (folder / PAUSED).unlink()
    assert [run.folder for run in look(records.place.folder, NOW).runs] == [tmp_path / "new"]


def test_a_run_tells_round_speed_and_who_is_missing_since_when(tmp_path):
    folder = a_run(tmp_path / "run")
    (folder / "federation.log").write_text("one\nwaiting: 1 of the 2 contributions a round needs\n")
    with RunFolder.open(folder).lock():
        (run,) = look(folder, NOW).runs
    assert (run.state, run.round, run.rounds, run.seconds, run.left) == ("running", 2, 10, 4.0, 32.0)
    assert run.news.startswith("waiting: 1 of the 2")
    assert [(one.name, one.state, one.last) for one in run.clients] == [
        ("north", "in", 2), ("south", "late", 1), ("west", "out", 1)
    ]  # fmt: skip
    assert [(one.round, one.client, one.reason) for one in run.troubles] == [
        (2, "south", "no answer within 60 s"), (2, "west", "not finite")
    ]  # fmt: skip
    (interrupted,) = look(folder, NOW).runs
    assert interrupted.state == "interrupted", "nobody writes it any more"
    assert look(folder, NOW).code == CRITICAL


def test_a_round_that_waited_for_nodes_says_nothing_about_the_time_that_is_left(tmp_path):
    made = RunFolder.open(a_run(tmp_path / "run", rows=3))
    with made.lock():
        made.append("timings", {"round": 3, "clients": 3600.0, "server": 1.0})
        (run,) = look(made.path, NOW).runs
    assert (run.seconds, run.left) == (4.0, 28.0)


def test_the_command_shows_names_and_has_an_exit_code(records, tmp_path, monkeypatch):
    # The records are of NOW, which may be minutes ago when this test has its turn.
    monkeypatch.setattr(status, "time", SimpleNamespace(time=lambda: NOW))
    for name in ("north", "south", "west"):
        records.node(name, "online")
    records.run(1, a_run(tmp_path / "run", "finished", rows=1), ago=9.0, over="completed")
    line = ["flower", "status", str(records.place.folder)]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == OK, done.output
    for word in ("north", "connected", "run 1: finished:completed", "GB of disk", "valid until", "late", "flwr 1."):
        assert word in done.output
    found = json.loads(CliRunner().invoke(app, [*line, "--json"]).stdout)
    assert [one["name"] for one in found["server"]["nodes"]] == ["north", "south", "west"]
    assert found["run"]["round"] == 1
    assert found["findings"] == []


def test_a_look_changes_nothing(records):
    records.node("north", "online")
    before = {file: file.stat().st_mtime_ns for file in records.place.folder.rglob("*")}
    look(records.place.folder)
    assert {file: file.stat().st_mtime_ns for file in records.place.folder.rglob("*")} == before


def test_certificates_are_named_weeks_before_they_expire_and_a_full_disk_too(records, monkeypatch):
    records.node("north", "online")
    later = NOW + timedelta(days=397 - 30).total_seconds()
    records.node("south", "online", until=later)
    monkeypatch.setattr(status, "_SHORT_OF_DISK", 1e9)
    texts = " ".join(one.text for one in look(records.place.folder, later).findings())
    assert "the certificate server.crt expires in 30 days" in texts
    assert "GB of disk are free" in texts
    assert look(records.place.folder, later + 40 * 86_400).code == CRITICAL


def test_a_server_that_is_not_running(tmp_path):
    write_federation(tmp_path / "fed", FederationPlan(("north",), port=free_port()))
    seen = look(tmp_path / "fed")
    assert seen.runs == ()
    assert seen.server is not None
    assert not seen.server.answers
    assert (seen.code, seen.findings()[0].text) == (CRITICAL, "the server is not running")
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / "fed/server" / RUNNING).write_text(json.dumps({"pid": gone.pid}))
    assert f"(process {gone.pid}) is gone" in look(tmp_path / "fed").findings()[0].text
    with pytest.raises(SpecError, match="not a folder of a federation"):
        look(tmp_path)


def test_the_log_of_a_site_is_not_that_of_one_whose_name_begins_alike(records, tmp_path):
    run = a_run(tmp_path / "study")
    lines = ["north did not answer", "northwest did not answer", "it waits for south, north", "north-2 left", "north."]
    (run / "federation.log").write_text("\n".join(lines))
    assert [line for line in site_log(run, "north") if line in lines] == [lines[0], lines[2], lines[4]]


def test_a_site_that_is_admitted_has_a_log_before_it_was_ever_there(tmp_path):
    write_federation(tmp_path / "fed", FederationPlan(("north", "south"), data="recipe"))
    assert site_log(tmp_path / "fed" / "server", "south") == []
    with pytest.raises(SpecError, match=r"no site 'east'; allowed: north, south"):
        site_log(tmp_path / "fed" / "server", "east")


def test_who_is_missing_at_the_end_is_in_the_final_table(tmp_path, capsys):
    _finish("finished:completed", a_run(tmp_path / "run", "finished"))
    shown = capsys.readouterr().out
    assert "missing at the end" in shown
    line = next(line for line in shown.splitlines() if "south" in line)
    assert "round 1" in line
    assert "no answer within 60 s" in line


def test_watching_looks_again_until_ctrl_c(records, monkeypatch):
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("fedalloy.cli.flower_status.time.sleep", sleep)
    done = CliRunner().invoke(app, ["flower", "status", str(records.place.folder), "--watch", "--json"])
    assert len(done.stdout.splitlines()) == 3


def shown(folder: Path) -> tuple[int, dict[str, Any]]:
    """The exit code and the one line of JSON."""
    done = CliRunner().invoke(app, ["flower", "status", str(folder), "--json"])
    (line,) = done.stdout.splitlines()
    return done.exit_code, json.loads(line)


def damaged(file: Path) -> None:
    file.write_text("{ damaged")


def test_whatever_is_damaged_or_half_written_monitoring_gets_json(records, tmp_path):
    """What can be read is told; what cannot is critical, with a reason."""
    for name in ("north", "south", "west"):
        records.node(name, "online")
    good, bad = a_run(tmp_path / "good", "finished"), a_run(tmp_path / "bad", "finished")
    for number, run in enumerate((good, bad)):
        records.run(number, run)
    damaged(bad / "manifest.json")
    code, found = shown(records.place.folder)
    assert (code, [run["state"] for run in found["runs"]]) == (CRITICAL, ["unreadable", "finished"])
    assert [one for one in found["findings"] if "manifest.json is damaged" in one["text"]]
    shutil.rmtree(bad)
    damaged(records.place.files.certificate)
    code, found = shown(records.place.folder)
    assert (code, found["server"]["running"]) == (CRITICAL, True)
    assert [one for one in found["findings"] if "not everything about the server can be read" in one["text"]]


@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0 and then nothing"])
def test_a_database_that_is_being_made_or_is_damaged_is_no_traceback(records, content):
    """A SuperLink that starts makes the file before it makes the tables."""
    records.place.database.write_bytes(content)
    code, found = shown(records.place.folder)
    assert (found["server"]["nodes"], found["server"]["runs"]) == ([], [])
    texts = " ".join(one["text"] for one in found["findings"])
    assert ("state.db cannot be read" in texts) == bool(content)
    assert (code == CRITICAL) == bool(content)


def test_a_folder_that_is_none_of_a_federation_is_critical_for_monitoring_too(tmp_path):
    code, found = shown(tmp_path / "nowhere")
    assert (code, found["findings"][0]["level"]) == (CRITICAL, "critical")
    assert "is not a folder of a federation" in found["findings"][0]["text"]


def test_a_watch_survives_what_cannot_be_read_for_a_moment(records, monkeypatch):
    looks: list[int] = []

    def failing(folder: Path) -> status.Overview:
        looks.append(1)
        if len(looks) == 2:
            raise OSError(5, "Input/output error")
        return look(folder)

    def sleep(seconds: float) -> None:
        if len(looks) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status, "look", failing)
    monkeypatch.setattr("fedalloy.cli.flower_status.time.sleep", sleep)
    done = CliRunner().invoke(app, ["flower", "status", str(records.place.folder), "--watch", "--json"])
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["server"] is None for one in told] == [False, True, False]


def test_two_processes_with_one_key_are_a_warning(records):
    for name in ("north", "south", "west"):
        records.node(name, "online")
    records.contacts(north={"last_contact": NOW - 1, "twice": NOW - 4}, south={"last_contact": NOW - 1, "twice": 7.0})
    texts = [one.text for one in look(records.place.folder, NOW).findings()]
    assert [text for text in texts if "two processes" in text] == [
        "two processes use the key of north at the same time, the last time 4 s ago: its folder was copied and started "
        "twice; end one of them"
    ]
