"""Processes that die are noticed: started again, or the command ends with a reason and an exit code."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.core.errors import SpecError
from fedalloy.experiment.records.lock import holder
from fedalloy.flower import node_service, pki, server_service, supervision
from fedalloy.flower.layout import NodePlace, ServerPlace
from fedalloy.flower.prefork.__main__ import in_a_line
from fedalloy.flower.programs import TOKEN, Program, alive, carrying, free_port, wait_until
from fedalloy.flower.project_templates import FederationPlan, write_federation
from fedalloy.flower.server_service import ServerProcesses, check_startable, make_anew
from fedalloy.flower.service_log import ServiceLog
from fedalloy.flower.signals import EndRequest
from fedalloy.flower.supervision import ANNOUNCE, Deaths, HelperWatch, Lost

pytestmark = pytest.mark.flower
HELPER = """
import sys, time
from fedalloy.flower.supervision import announce
announce("flower-superexec", sys.argv)
time.sleep(600)
"""
SRC = str(Path(supervision.__file__).parents[2])


def surroundings(folder: Path) -> dict[str, str]:
    return {**os.environ, **HelperWatch.variables(folder), "PYTHONPATH": SRC}


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper that only announces itself stands for Flower's."""
    monkeypatch.setattr(supervision, "command_line", lambda program: [sys.executable, "-c", HELPER])


def announced(folder: Path) -> int | None:
    return holder(folder / "flower-superexec.lock") if (folder / "flower-superexec.json").exists() else None


def test_a_helper_that_died_is_started_again_with_the_same_arguments(helper, tmp_path):
    said: list[str] = []
    watch = HelperWatch(tmp_path, "node north", surroundings(tmp_path), said.append)
    watch.look()
    assert not said, "one that has not begun yet is not missed"
    first = subprocess.Popen([sys.executable, "-c", HELPER, "--port", "7"], env=surroundings(tmp_path))
    try:
        wait_until(lambda: announced(tmp_path) == first.pid, "it announced itself", 60)
        watch.look()
        assert not said
        first.kill()
        first.wait()
        watch.look()
        assert said == ["the process flower-superexec of node north ended; it is started again"]
        wait_until(lambda: announced(tmp_path) not in (None, first.pid), "the next one announced itself", 60)
        assert json.loads((tmp_path / "flower-superexec.json").read_text())["arguments"] == ["--port", "7"]
        watch.look()
        assert len(said) == 1
    finally:
        first.kill()
        if watch._process:
            watch._process.kill()
        watch.stop()


def test_a_helper_that_dies_again_and_again_is_given_up(monkeypatch, tmp_path):
    monkeypatch.setattr(supervision, "command_line", lambda program: [sys.executable, "-c", ""])
    watch = HelperWatch(tmp_path, "the server", surroundings(tmp_path), lambda text: None, deaths=Deaths(most=2))
    (tmp_path / "flower-superexec.json").write_text('{"arguments": [], "environment": {}}')
    with pytest.raises(Lost, match="ended 3 times"):
        look_until_it_is_given_up(watch)
    watch.stop()


def look_until_it_is_given_up(watch: HelperWatch) -> None:
    for _ in range(200):
        watch.look()
        time.sleep(0.05)


def test_deaths_long_ago_do_not_count():
    now = [0.0]
    deaths = Deaths(most=1, within=10.0, clock=lambda: now[0])
    for at in (0.0, 11.0, 22.0):
        now[0] = at
        deaths.note("it")
    with pytest.raises(Lost, match="it ended 2 times within 10 s"):
        deaths.note("it")


def federation(tmp_path: Path, **plan) -> Path:
    write_federation(tmp_path / "fed", FederationPlan(("north",), data="recipe", **plan))
    return tmp_path / "fed"


def node(tmp_path: Path) -> NodePlace:
    return NodePlace.read(federation(tmp_path) / "nodes" / "north")


class Plan:
    """What a node's program does at each start; then the operator asks it to end."""

    def __init__(self, monkeypatch, request: EndRequest, *codes: str) -> None:
        self.codes, self.request, self.starts = list(codes), request, 0
        monkeypatch.setattr(node_service, "supernode", lambda *_, **__: [sys.executable, "-c", self.next()])
        monkeypatch.setattr(node_service, "_PAUSES", (0.01, 0.02))
        monkeypatch.setattr(node_service, "_LOOK", 0.05)

    def next(self) -> str:
        self.starts += 1
        if self.starts == len(self.codes):
            self.request._note(signal.SIGTERM, None)
        return self.codes[self.starts - 1]


def test_a_node_that_ends_without_an_error_is_started_again_and_ends_when_it_is_asked_to(monkeypatch, tmp_path):
    place, request = node(tmp_path), EndRequest()
    said: list[str] = []
    inside = f"from pathlib import Path; Path({str(place.number_file)!r}).write_text('1')"
    place.config.store.mkdir(parents=True)
    plan = Plan(monkeypatch, request, inside, f"{inside}; raise SystemExit(1)", *[inside] * 5, "raise SystemExit(3)")
    assert node_service.NodeProcesses(place, ServiceLog(said.append), request).run() == 0
    assert plan.starts == 8
    assert said[1].startswith("the node's program ended with exit code 0; starting again")
    assert "exit code 1" in said[2]


def test_a_node_that_cannot_even_ask_the_server_ends_with_a_reason(monkeypatch, tmp_path):
    place, request = node(tmp_path), EndRequest()
    said: list[str] = []
    plan = Plan(monkeypatch, request, *["raise SystemExit(7)"] * 9)
    assert node_service.NodeProcesses(place, ServiceLog(said.append), request).run() == 1
    assert plan.starts == 5
    assert "failed 5 times to start (the node's program ended with exit code 7" in said[-1]


SERVICE = """
import sys
from pathlib import Path
from fedalloy.flower import node_service
from fedalloy.flower.service_log import ServiceLog
child = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], " \\
        "start_new_session=True); time.sleep(600)"
node_service.supernode = lambda *_, **__: [sys.executable, "-c", child]
sys.exit(node_service.keep_running(Path(sys.argv[1]), ServiceLog()))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_node_ends_at_once_with_everything_it_started(number, code, tmp_path):
    """Also with what lives in a session of its own, as a worker does; and a second one is refused meanwhile."""
    place = node(tmp_path)
    token = node_service.NodeProcesses(place, ServiceLog(), EndRequest()).token
    command = [sys.executable, "-c", SERVICE, str(place.folder)]
    service = Program.start("node", command, {**os.environ, "PYTHONPATH": SRC}, tmp_path / "log", tmp_path)
    try:
        wait_until(lambda: len(list(carrying(token))) == 2, "both processes are there", 60, [service])
        again = CliRunner().invoke(app, ["flower", "node", str(place.folder)])
        assert again.exit_code == 2
        assert f"running already (process {service.process.pid})" in " ".join(again.output.split())
        begun = time.monotonic()
        service.process.send_signal(number)
        assert service.process.wait(60) == code
        assert time.monotonic() - begun < 10
        assert list(carrying(token)) == []
    finally:
        service.kill()


def test_what_a_killed_node_has_left_is_ended_by_the_next(monkeypatch, tmp_path):
    place, request = node(tmp_path), EndRequest()
    processes = node_service.NodeProcesses(place, ServiceLog(lambda text: None), request)
    left = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, TOKEN: processes.token}
    )
    wait_until(lambda: left.pid in carrying(processes.token), "it is there", 60)
    request._note(signal.SIGTERM, None)
    threading.Thread(target=left.wait).start()
    processes.run()
    assert left.wait(60) != 0


def test_a_node_whose_data_are_not_there_does_not_start(tmp_path):
    folder = node(tmp_path).folder
    file = folder / "node.toml"
    file.write_text(file.read_text().replace('data = "recipe"', 'data = "nowhere.csv"'))
    done = CliRunner().invoke(app, ["flower", "node", str(folder)])
    assert done.exit_code == 2
    assert "nowhere.csv does not exist; 'data' in node.toml" in " ".join(done.output.replace("\n", " ").split())


def test_a_sign_of_life_that_is_refused_is_a_line_and_other_faults_are_shown(capsys):
    def raised(error: Exception) -> None:
        in_a_line(threading.ExceptHookArgs((type(error), error, None, threading.current_thread())))

    refused = RuntimeError("401")
    refused.response = SimpleNamespace(status_code=401)  # type: ignore[attr-defined]
    raised(refused)
    assert capsys.readouterr().out.startswith("the server answers 401 to this node's sign of life")
    raised(ValueError("something else"))
    assert "ValueError: something else" in capsys.readouterr().err


@pytest.mark.parametrize("which", ["port", "local_port"])
def test_a_server_whose_port_is_taken_says_so_at_once(which, tmp_path):
    place = ServerPlace.read(federation(tmp_path, port=free_port()) / "server")
    taken = place.port if which == "port" else place.link_port
    with socket.create_server(("127.0.0.1", taken)):
        done = CliRunner().invoke(app, ["flower", "server", str(place.folder)])
    assert done.exit_code == 2
    assert f"127.0.0.1:{taken}, which is taken" in " ".join(done.output.split())
    assert f"change '{which}'" in " ".join(done.output.split())


def test_a_server_whose_certificate_has_expired_or_is_gone_says_so_at_once(monkeypatch, tmp_path):
    place = ServerPlace.read(federation(tmp_path, port=free_port()) / "server")
    check_startable(place)
    later = datetime.now(UTC) + timedelta(days=pki.DAYS + 1)
    monkeypatch.setattr(server_service, "datetime", SimpleNamespace(now=lambda _: later))
    with pytest.raises(SpecError, match=r"(?s)ca\.crt expired on \d{4}-.*fedalloy flower renew"):
        check_startable(place)
    place.files.certificate.unlink()
    with pytest.raises(SpecError, match=r"server\.crt does not exist"):
        check_startable(place)


def sleeping(code: str = "import time; time.sleep(600)") -> Program:
    return Program("it", subprocess.Popen([sys.executable, "-c", code]), Path())


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found by their environment")
def test_a_server_that_ends_leaves_no_run_behind(tmp_path):
    """It would ask for its SuperLink for ever, and join the next server on that port."""
    server = ServerProcesses(ServerPlace.read(federation(tmp_path) / "server"), ServiceLog())
    mark = {**os.environ, ANNOUNCE: str(server._announced)}
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=mark) as run:
        try:
            wait_until(lambda: run.pid in carrying(mark[ANNOUNCE], ANNOUNCE), "it is there", 60)
            server.stop()
            assert run.wait(10) == -signal.SIGKILL
        finally:
            run.kill()


def test_a_server_opens_its_front_again_and_ends_with_its_superlink(monkeypatch, tmp_path):
    said: list[str] = []
    place = ServerPlace.read(federation(tmp_path) / "server")
    server = ServerProcesses(place, ServiceLog(said.append), link=sleeping(), front=sleeping("raise SystemExit(4)"))
    monkeypatch.setattr(server_service, "front", lambda place: [sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert server.front is not None
        assert server.link is not None
        server.front.process.wait(60)
        server.look()
        assert said == ["the front ended with exit code 4; it is started again"]
        assert server.front.running
        server.link.kill()
        with pytest.raises(Lost, match="the SuperLink ended with exit code -9"):
            server.look()
    finally:
        server.stop()
    assert not server.front.running


@pytest.mark.skipif(sys.platform != "linux", reason="the system tells nobody that a parent died")
def test_what_a_killed_service_has_started_ends_with_it(tmp_path):
    """Its SuperLink would keep the port, and the same command could not start it again."""
    child = (
        "import os, time; from fedalloy.flower.supervision import SERVICE, end_with_parent; end_with_parent(); "
        "print(os.getpid(), SERVICE in os.environ, flush=True); time.sleep(600)"
    )
    service = (
        "import os, subprocess, sys, time; from fedalloy.flower.supervision import of_this_service\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], env={{**os.environ, **of_this_service()}}, "
        "start_new_session=True); time.sleep(600)"
    )
    environment = {**os.environ, "PYTHONPATH": SRC}
    with subprocess.Popen([sys.executable, "-c", service], env=environment, stdout=subprocess.PIPE, text=True) as one:
        assert one.stdout is not None
        number, inherited = one.stdout.readline().split()
        assert inherited == "False", "what the program starts itself may outlive it"
        one.kill()
    wait_until(lambda: not alive(int(number)), "it ended", 60)


@pytest.mark.parametrize(
    "made", ["CREATE TABLE compacted_contexts (id)", "CREATE TABLE node (id); CREATE TABLE run (id)"]
)
def test_a_database_that_was_never_finished_is_made_again(made, tmp_path):
    """A server that is ended while Flower makes its tables could never start again."""
    place = ServerPlace.read(federation(tmp_path) / "server")
    with closing(sqlite3.connect(place.database)) as database, database:
        database.executescript(made)
    make_anew(place)
    assert not list(place.folder.glob("state.db*"))


@pytest.mark.parametrize("table", ["node", "run"])
def test_a_database_that_holds_anything_is_kept(table, tmp_path):
    place = ServerPlace.read(federation(tmp_path) / "server")
    make_anew(place)
    with closing(sqlite3.connect(place.database)) as database, database:
        database.executescript(f"CREATE TABLE {table} (id); INSERT INTO {table} VALUES (1)")
    kept = place.database.read_bytes()
    make_anew(place)
    assert place.database.read_bytes() == kept
    place.database.write_bytes(b"damaged" * 1000)
    make_anew(place)
    assert place.database.exists(), "what cannot be read is not for us to delete"
