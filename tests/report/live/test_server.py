"""The live page over loopback: what it tells, that it grows with a run, and that it stops one."""

from __future__ import annotations

import os
from http.server import ThreadingHTTPServer

import pytest

from fedalloy.core.errors import SpecError
from fedalloy.experiment.records.stop import REQUESTED
from fedalloy.report.live.server import LiveServer
from tests.report.live.conftest import make_run


def test_the_page_and_everything_it_loads_is_there(serving):
    client = serving()
    page = client.get("/")
    assert page.headers["Content-Type"] == "text/html; charset=utf-8"
    names = [part.split('"')[0] for part in page.body.decode().split("/assets/")[1:]]
    assert {"live.js", "live.css", "charts.js", "d3.js", "palette.css"} <= set(names)
    for name in names:
        assert client.get(f"/assets/{name}").status == 200, name


def test_every_run_has_a_line(serving, root):
    make_run(root / "a" / "seed-3")
    make_run(root / "b", rounds=0, state="failed")
    make_run(root / "c", rounds=2, state="running")
    told = serving(token=None).get("/api/runs").json
    lines = {line["id"]: line for line in told["runs"]}
    assert told["can_stop"] is False
    assert set(lines) == {"a/seed-3", "b", "c"}
    first = lines["a/seed-3"]
    assert (first["name"], first["seed"], first["state"], first["round"], first["rounds"]) == (
        "fedavg",
        3,
        "finished",
        3,
        5,
    )
    assert (first["score"], lines["b"]["score"]) == (0.3, None)
    assert told["styles"]["fedavg"]["slot"] == 0


def test_a_run_that_was_killed_is_not_called_running(serving, root):
    make_run(root / "c", rounds=2, state="running")
    (root / "c" / "lock").write_text("")
    assert serving().get("/api/runs").json["runs"][0]["state"] == "interrupted"


def test_a_run_is_told_in_full(serving, root):
    make_run(root / "a")
    told = serving().get("/api/run?run=a").json
    assert told["complete"]
    assert told["rows"] == 3
    assert told["points"]["evaluation/accuracy/mean"] == {"x": [1, 2, 3], "y": [0.1, 0.2, 0.3]}
    assert told["points"]["train_loss"]["y"] == [1, 0.5, 0.33333]
    assert told["events"] == [{"round": 2, "client": 1, "text": "not finite"}]
    assert told["reasons"] == {"not finite": 1}
    assert told["clients"]["labels"] == ["bob", "ann"]
    assert told["clients"]["values"] == [0.3, 0.5]
    assert told["weights"]["panels"][0]["values"] == [[0.3333] * 3] * 3
    assert (told["participation"]["least"], told["participation"]["dropped"]) == (3.0, 1)
    assert told["seconds"] == {"total": 1.5, "mean": 0.5}
    assert 'name = "fedavg"' in told["recipe"]


def test_clients_of_an_earlier_evaluation_can_be_asked_for(serving, root):
    make_run(root / "a")
    client = serving()
    client.get("/api/run?run=a")
    assert client.get("/api/clients?run=a&round=1").json["values"] == [0.1, 0.5]
    assert client.get("/api/clients?run=a&round=x").status == 400
    assert client.get("/api/clients?run=a").status == 404


def test_a_run_with_damaged_records_does_not_hide_the_others(serving, root):
    make_run(root / "a")
    make_run(root / "b")
    (root / "b" / "rounds.jsonl").write_text('{"round":1}\n[]\n{"round":3}\n')
    make_run(root / "c")
    (root / "c" / "recipe.toml").write_text("= nonsense")
    client = serving()
    lines = {line["id"]: line["state"] for line in client.get("/api/runs").json["runs"]}
    assert lines == {"a": "finished", "b": "finished", "c": "unreadable"}
    assert client.get("/api/run?run=a").status == 200
    broken = client.get("/api/run?run=b")
    assert broken.status == 409
    assert "is invalid" in broken.json["error"]


def test_the_stream_grows_with_a_real_run_and_the_button_ends_it(serving, going):
    run, client = going(), serving()
    told = client.get("/api/run?run=live").json
    assert (told["state"], told["rows"]) == ("running", 1)
    events = client.events("/events?run=live:1")
    run.play(2)
    seen = events.until("added", lambda value: value["rows"] == 3)
    assert seen["points"]["train_loss"]["x"][-1] == 3
    line = events.until("runs", lambda value: any(one["round"] == 3 for one in value))
    assert line[0]["left"] > 0
    assert client.stop("live").json == {"asked": "live"}
    result = run.end()
    assert (result.status, result.ending.reason) == ("stopped", REQUESTED)
    assert result.ending.progress.round in (3, 4)
    last = events.until("runs", lambda value: value[0]["state"] == "stopped")
    assert last[0]["reason"] == REQUESTED


def test_what_happened_between_the_answer_and_the_stream_is_not_lost(serving, going):
    run, client = going(), serving()
    since = client.get("/api/runs").json["since"]
    rows = client.get("/api/run?run=live").json["rows"]
    run.play(3)
    events = client.events(f"/events?since={since}&run=live:{rows}")
    assert events.until("added", lambda value: value["rows"] == 4)
    events.close()
    behind = client.events(f"/events?since={10**9}&run=live:4")
    assert behind.until("runs")


def test_a_run_that_went_back_is_read_anew(serving, root):
    make_run(root / "a", rounds=4, state="running")
    client = serving()
    client.get("/api/run?run=a")
    events = client.events("/events?run=a:4")
    lines = (root / "a" / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    (root / "a" / "rounds.jsonl").write_bytes(b"".join(lines[:2]))
    assert events.until("anew") == {"run": "a"}
    assert client.get("/api/run?run=a").json["rows"] == 2


def test_new_runs_appear_and_deleted_ones_go(serving, root):
    client = serving()
    events = client.events("/events")
    make_run(root / "new")
    assert events.until("runs", lambda value: value[0]["id"] == "new")
    (root / "new" / "recipe.toml").unlink()
    assert events.until("runs", lambda value: value[0].get("gone"))


def test_a_run_of_many_rounds_is_sent_thinned_out(serving, root):
    make_run(root / "long", rounds=2000)
    told = serving().get("/api/run?run=long")
    line = told.json["points"]["train_loss"]
    assert told.json["rows"] == 2000
    assert len(line["x"]) <= 600
    assert (line["x"][0], line["x"][-1]) == (1, 2000)
    assert len(told.json["weights"]["columns"]["labels"]) <= 128
    assert len(told.body) < 400_000


def test_too_many_streams_are_refused_politely(serving, monkeypatch):
    monkeypatch.setattr("fedalloy.report.live.server.MOST_STREAMS", 1)
    client = serving()
    assert client.server.streams.acquire(blocking=False)
    refused = client.get("/events")
    assert (refused.status, refused.json["error"]) == (503, "too many pages are open")


def test_the_index_is_made_once_beside_the_run_and_nothing_else_changes(serving, root):
    make_run(root / "a")
    before = {file: (root / "a" / file).stat().st_mtime_ns for file in os.listdir(root / "a")}
    client = serving()
    client.get("/api/run?run=a")
    after = {file: (root / "a" / file).stat().st_mtime_ns for file in os.listdir(root / "a")}
    assert "index.sqlite" in after
    assert {name for name in after if not name.startswith("index.sqlite")} == set(before)
    assert {file: after[file] for file in before} == before


def test_what_cannot_be_served_is_told(root):
    with pytest.raises(SpecError, match="is not a folder"):
        LiveServer(root / "nowhere")
    with pytest.raises(SpecError, match="12 or more"):
        LiveServer(root, token="short")
    first = LiveServer(root)
    try:
        with pytest.raises(SpecError, match="choose another with --port"):
            LiveServer(root, port=int(first.server_address[1]))
    finally:
        first.server_close()


def test_the_watcher_rests_while_nobody_looks(serving, root):
    client = serving()
    make_run(root / "later")
    assert client.server.watch.version == client.get("/api/runs").json["since"]
    assert client.get("/api/runs").json["runs"] == []
    events = client.events("/events")
    assert events.until("runs")[0]["id"] == "later"


def test_ctrl_c_while_a_connection_comes_in_is_not_lost(tmp_path, monkeypatch):
    """The place of the connection has been given back by its thread: to do so again would be an error of its own."""

    def interrupted(self, request, client_address):
        self._connections.release()
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadingHTTPServer, "process_request", interrupted)
    with LiveServer(tmp_path) as server, pytest.raises(KeyboardInterrupt):
        server.process_request(None, None)
