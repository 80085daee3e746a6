"""Monitoring: metrics on loopback for server and node, and logs that a collector can read."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")
pytest.importorskip("prometheus_client", reason="needs the extra 'metrics'")

from prometheus_client.parser import text_string_to_metric_families
from typer.testing import CliRunner

import fedalloy
from fedalloy.cli.app import app
from fedalloy.core.errors import SpecError
from fedalloy.flower import node_service, server_service, status
from fedalloy.flower.layout import NodePlace, ServerPlace
from fedalloy.flower.node.audit import Audit
from fedalloy.flower.programs import free_port
from fedalloy.flower.project_templates import FederationPlan, write_federation
from fedalloy.flower.prometheus import Measurement, NodeMetrics, serving
from fedalloy.flower.server_metrics import server_metrics
from fedalloy.flower.service_log import JsonLog, ServiceLog
from fedalloy.flower.signals import EndRequest
from tests.flower.server_records import NOW, Records, a_run

pytestmark = pytest.mark.flower


def scraped(port: int) -> dict[tuple[str, ...], float]:
    """What Prometheus would read: values by name and sorted labels."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return {(one.name, *sorted(one.labels.values())): one.value for family in families for one in family.samples}


def federation(tmp_path: Path) -> Path:
    write_federation(tmp_path / "fed", FederationPlan(("north", "south", "west"), port=free_port(), data="recipe"))
    return tmp_path / "fed"


def test_a_server_tells_what_status_tells(tmp_path, monkeypatch):
    records = Records(ServerPlace.read(federation(tmp_path) / "server"))
    monkeypatch.setattr(status, "answers", lambda place: True)
    monkeypatch.setattr(status, "front_answers", lambda place: True)
    for name in ("north", "south"):
        records.node(name, "online")
    records.contacts(north={"last_contact": NOW - 2, "version": "0.0.9"}, south={"last_contact": NOW - 99})
    records.run(1, a_run(tmp_path / "study"))
    port = free_port()
    with serving(port, lambda: server_metrics(records.place.folder, lambda: {"front": 2}, NOW)):
        found = scraped(port)
    assert found["fedalloy_status",] == 2, "nobody writes the run: it is interrupted"
    assert found["fedalloy_server_up",] == found["fedalloy_front_up",] == 1
    assert (found["fedalloy_node_connected", "north"], found["fedalloy_node_connected", "south"]) == (1, 0)
    assert found["fedalloy_node_last_contact_timestamp_seconds", "north"] == pytest.approx(NOW - 2)
    assert found["fedalloy_node_refused", "its key is not admitted", "key 99"] == 1
    assert found["fedalloy_node_version_info", "0.0.9", "north"] == 1
    assert (found["fedalloy_run_round", "study"], found["fedalloy_run_rounds", "study"]) == (2, 10)
    assert found["fedalloy_run_contributed", "north", "study"] == 1
    assert found["fedalloy_run_contributed", "south", "study"] == 0
    assert found["fedalloy_process_restarts_total", "front"] == 2
    assert found["fedalloy_certificate_expiry_timestamp_seconds", "ca.crt"] > NOW
    assert found["fedalloy_disk_free_bytes",] > 0
    assert ("fedalloy_build_info", fedalloy.__version__, "1.41.0") in found
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


def test_two_studies_whose_folders_have_one_name_are_two(tmp_path, monkeypatch):
    records = Records(ServerPlace.read(federation(tmp_path) / "server"))
    monkeypatch.setattr(status, "answers", lambda place: True)
    monkeypatch.setattr(status, "front_answers", lambda place: True)
    places = [tmp_path / name / "study" for name in ("north", "south")]
    for number, place in enumerate(places, 1):
        records.run(number, a_run(place))
    found = {one.name: one.values for one in server_metrics(records.place.folder, now=NOW)}
    assert found["fedalloy_run_round"] == {(str(place),): 2 for place in places}


def test_a_node_counts_what_was_asked_of_it_once(tmp_path):
    place = NodePlace.read(federation(tmp_path) / "nodes" / "north")
    audit = Audit(place.config.store, clock=lambda: 1000.0)
    audit.note({"asked": "train", "status": "ok", "bytes": {"delta": 400, "buffers": 8}})
    metrics = NodeMetrics(place, lambda: True, lambda: {"node": 1})

    def found() -> dict[tuple[str, ...], float]:
        return {(one.name, *labels): value for one in metrics() for labels, value in one.values.items()}

    assert found()["fedalloy_node_orders", "train", "ok"] == 1
    audit.note({"asked": "train", "status": "refused", "reason": "no", "bytes": {}})
    audit.note({"approved": "a study"})
    with audit.file.open("ab") as half:
        half.write(b'[]\nnot an entry\n{"asked": "trai')
    told = found()
    assert (told["fedalloy_node_orders", "train", "ok"], told["fedalloy_node_orders", "train", "refused"]) == (1, 1)
    assert told["fedalloy_node_sent_bytes",] == 408
    assert told["fedalloy_node_last_order_timestamp_seconds",] == 1000
    assert told["fedalloy_node_up",] == told["fedalloy_process_restarts", "node"] == 1
    port = free_port()
    with serving(port, metrics):
        assert scraped(port)["fedalloy_node_orders_total", "refused", "train"] == 1


def test_two_monitors_that_ask_at_once_count_nothing_twice(tmp_path, monkeypatch):
    place = NodePlace.read(federation(tmp_path) / "nodes" / "north")
    audit = Audit(place.config.store, clock=lambda: 1000.0)
    for _ in range(3):
        audit.note({"asked": "train", "status": "ok", "bytes": {}})
    metrics = NodeMetrics(place, lambda: True)
    second = threading.Thread(target=lambda: [*metrics()])
    count = metrics._count

    def while_the_other_asks(row: Mapping[str, Any]) -> None:
        if not second.ident:
            second.start()
            second.join(0.1)
        count(row)

    monkeypatch.setattr(metrics, "_count", while_the_other_asks)
    first = [*metrics()]
    second.join()
    for found in (first, [*metrics()]):
        assert [one.values for one in found if one.name == "fedalloy_node_orders"] == [{("train", "ok"): 3}]


def test_metrics_are_on_loopback_alone_and_need_a_free_port_and_the_extra(monkeypatch):
    from prometheus_client import exposition

    begun: list[Any] = []
    real = exposition.start_http_server

    def start(*given: Any, **named: Any) -> Any:
        begun.append(named)
        return real(*given, **named)

    monkeypatch.setattr("prometheus_client.start_http_server", start)
    port = free_port()
    with serving(port, lambda: [Measurement("one", "one", (), {(): 1.0})]):
        assert begun[0]["addr"] == "127.0.0.1"
        with pytest.raises(SpecError, match="choose another port"), serving(port, list):
            pass
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(SpecError, match="the extra 'metrics'"), serving(port, list):
        pass
    with serving(None, list):
        pass


def test_a_log_in_json_has_every_line_of_every_process():
    out = io.StringIO()
    log = JsonLog(out=out)
    log.say("the server is ready")
    code = "import sys; print('\\x1b[92mINFO \\x1b[0m:      started'); print('ERROR : no', file=sys.stderr); print('x')"
    for _ in range(2):  # started again, it has the same pipe
        pipe = log.stream("superlink")
        subprocess.run([sys.executable, "-c", code], stdout=pipe, stderr=pipe, check=True)
    log.close()
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    told = [(row["process"], row["level"], row["message"]) for row in rows]
    assert told[0] == ("fedalloy", "info", "the server is ready")
    once = {("superlink", "info", "started"), ("superlink", "error", "no"), ("superlink", "info", "x")}
    assert set(told[1:]) == once
    assert len(told) == 7
    assert all(row["time"].endswith("+00:00") for row in rows)


def test_as_text_processes_write_to_the_terminal_themselves():
    said: list[str] = []
    log = ServiceLog(said.append)
    log.say("ready")
    assert (said, log.stream("superlink")) == (["ready"], None)


def test_the_services_serve_metrics_and_log_as_they_are_told(tmp_path, monkeypatch):
    """With a program that prints a line and ends in place of Flower's."""
    fed, port = federation(tmp_path), free_port()
    out, seen = io.StringIO(), {}
    log = JsonLog(out=out)
    real = node_service.NodeProcesses.run

    def run(self) -> int:
        assert self._once() == "the node's program ended with exit code 0"
        seen.update(scraped(port))
        self.request._note(signal.SIGTERM, None)
        return real(self)

    monkeypatch.setattr(node_service, "supernode", lambda *_, **__: [sys.executable, "-c", "print('INFO : hello')"])
    monkeypatch.setattr(node_service.NodeProcesses, "run", run)
    assert node_service.keep_running(fed / "nodes" / "north", log, port) == 0
    assert (seen["fedalloy_node_up",], seen["fedalloy_process_restarts_total", "node"]) == (0, 0)
    rows = [json.loads(line) for line in out.getvalue().splitlines()]
    assert ("supernode", "hello") in [(row["process"], row["message"]) for row in rows]
    monkeypatch.setattr(server_service.ServerProcesses, "start", lambda self, request: os.kill(os.getpid(), 15))
    monkeypatch.setattr(server_service.ServerProcesses, "stop", lambda self: seen.update(scraped(port)))
    monkeypatch.setattr(server_service, "check_startable", lambda place: None)
    done = CliRunner().invoke(app, ["flower", "server", str(fed / "server"), "--metrics-port", str(port)])
    assert done.exit_code == 0
    assert seen["fedalloy_status",] == 2
    assert EndRequest().code == 0


@pytest.mark.parametrize("command", ["server", "node"])
def test_why_a_service_does_not_start_is_a_line_of_its_log(command, tmp_path):
    """A collector reads nothing but JSON."""
    fed = federation(tmp_path)
    folder = fed / "server" if command == "server" else fed / "nodes" / "north"
    (folder / ("server.key" if command == "server" else "node.key")).unlink()
    done = CliRunner().invoke(app, ["flower", command, str(folder), "--log-format", "json"])
    (told,) = [json.loads(line) for line in done.output.splitlines()]
    assert (done.exit_code, told["level"], "does not exist" in told["message"]) == (2, "error", True)
