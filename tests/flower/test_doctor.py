"""``fedalloy flower doctor`` finds every fault that is planted, names it alone, and says what to do."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from flwr.proto.fleet_pb2 import ActivateNodeResponse, DeactivateNodeResponse
from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.experiment.recipe import load
from fedalloy.experiment.records import toml
from fedalloy.experiment.records.lock import locked
from fedalloy.flower import dry_run, pki, proxies, reachability
from fedalloy.flower.doctor import examine
from fedalloy.flower.layout import server_files
from fedalloy.flower.pki import make_server_certificate
from fedalloy.flower.programs import free_port
from fedalloy.flower.project_templates import FederationPlan, write_federation
from fedalloy.flower.reachability import OK, PROBLEM, WARNING, Diagnosis
from fedalloy.flower.review import Review
from tests.flower import shares

pytestmark = pytest.mark.flower
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy", "HTTP_PROXY", "http_proxy")


class Server(HTTPServer):
    """A front: it tells the time, and knows the key or not."""

    ahead = 0.0
    reason = ""

    def handle_error(self, *_: object) -> None:
        """A visitor that does not accept the certificate leaves; that is what is tested."""


class Answers(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: object) -> None: ...

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(time.time() - self.server.ahead, usegmt=True)

    def do_GET(self) -> None:
        self._answer(404, b"")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.server.reason:
            self._answer(412, b"")
        elif self.path.endswith("/activate-node"):
            self._answer(200, ActivateNodeResponse(node_id=7).SerializeToString())
        else:
            self._answer(200, DeactivateNodeResponse().SerializeToString())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if self.server.reason:
            self.send_header("x-fedalloy-reason", self.server.reason)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(folder: Path, port: int, **how: object) -> Iterator[Server]:
    """A front with the certificate of a server's folder."""
    server = Server(("127.0.0.1", port), Answers)
    for name, value in how.items():
        setattr(server, name, value)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(server_files(folder).certificate, server_files(folder).key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Place:
    """A node's folder with data, its server's folder, and the study."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        write_federation(folder / "fed", FederationPlan(("north", "south"), host="localhost", port=self.port))
        self.node, self.server = folder / "fed" / "nodes" / "north", folder / "fed" / "server"
        shares.write_share(self.node / "data", 0)
        self.set(data="data", port=free_port())
        self.recipe = folder / "study.toml"
        study = {**shares.tables(2), "algorithm": {"name": "aaggff_s"}, "run": {"rounds": 3, "seeds": [1]}}
        self.recipe.write_text(toml.dumps(study))

    def set(self, **values: object) -> None:
        file = self.node / "node.toml"
        kept = [line for line in file.read_text().splitlines() if line.partition("=")[0].strip() not in values]
        file.write_text("\n".join([*kept, *(f"{key} = {json.dumps(value)}" for key, value in values.items())]) + "\n")

    def examined(self, *, study: bool = False) -> dict[str, Diagnosis]:
        return {one.name: one for one in examine(self.node, load(self.recipe) if study else None)}

    def problems(self, *, study: bool = False) -> list[Diagnosis]:
        return [one for one in self.examined(study=study).values() if one.state == PROBLEM]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    for variable in PROXIES:
        monkeypatch.delenv(variable, raising=False)
    return Place(tmp_path)


def test_a_node_that_is_ready_is_ready(place):
    with serving(place.server, place.port):
        done = CliRunner().invoke(app, ["flower", "doctor", str(place.node), str(place.recipe)])
        assert done.exit_code == 0, done.output
        assert done.output.endswith("this node is ready\n")
        told = CliRunner().invoke(app, ["flower", "doctor", str(place.node), "--json"])
    checks = json.loads(told.stdout)["checks"]
    wanted = ["settings", "versions", "key", "own port", "disk", "name", "proxy", "private CA", "port", "TLS", "clock"]
    assert [one["name"] for one in checks] == [*wanted, "admitted", "policy", "data"]
    assert {one["state"] for one in checks} == {OK}


def test_a_name_without_an_address(place):
    place.set(server=f"nowhere.invalid:{place.port}")
    (wrong,) = place.problems()
    assert (wrong.name, "'nowhere.invalid' has no address" in wrong.found) == ("name", True)
    assert "DNS" in wrong.advice
    assert place.examined()["TLS"].found == "comes after 'name'"
    done = CliRunner().invoke(app, ["flower", "doctor", str(place.node)])
    assert done.exit_code == 1
    assert done.output.splitlines()[-1] == "to repair: name"


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine stands for another one, which is reached through a proxy."""
    monkeypatch.setattr(proxies, "LOOPBACK", ())


def test_a_proxy_that_refuses_and_one_that_is_not_there(place, monkeypatch, elsewhere):
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{free_port()}")
    (wrong,) = place.problems()
    assert (wrong.name, "does not answer" in wrong.found) == ("proxy", True)
    assert "NO_PROXY" in wrong.advice
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            visitor, _ = listener.accept()
            assert visitor.recv(100).startswith(b"CONNECT localhost:")
            visitor.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
            visitor.close()

        thread = threading.Thread(target=refuse)
        thread.start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{listener.getsockname()[1]}")
        (wrong,) = place.problems()
        thread.join()
    assert "refuses it (status 403)" in wrong.found
    monkeypatch.setenv("NO_PROXY", "localhost")
    assert place.examined()["proxy"].state == OK


@contextmanager
def forwarding(target: int) -> Iterator[int]:
    """A proxy that connects everybody to one port of this machine; its own port."""

    def relay(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65_536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def visit(visitor: socket.socket) -> None:
        with visitor, socket.create_connection(("127.0.0.1", target)) as server:
            assert visitor.recv(65_536).startswith(b"CONNECT ")
            visitor.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            back = threading.Thread(target=relay, args=(server, visitor))
            back.start()
            relay(visitor, server)
            back.join()

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=visit, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_through_a_proxy_that_lets_it_pass_everything_is_checked(place, monkeypatch, elsewhere):
    """The server's name is known to the proxy alone; its certificate must have it."""
    place.set(server=f"north.example.org:{place.port}")
    with serving(place.server, place.port, ahead=60.0), forwarding(place.port) as port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{port}")
        found = place.examined()
        assert found["proxy"].found.endswith("which lets it pass")
        assert "is not for 'north.example.org'" in found["TLS"].found
        place.set(server=f"localhost:{place.port}")
        (wrong,) = place.problems()
    assert wrong.name == "clock", "the handshake went through it"


def test_a_port_that_is_closed_and_one_that_is_silent(place, monkeypatch):
    (wrong,) = place.problems()
    assert (wrong.name, "cannot be reached" in wrong.found) == ("port", True)

    def silent(*_: object, **__: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(reachability, "_connected", silent)
    (wrong,) = place.problems()
    assert "does not answer within" in wrong.found
    assert "firewall" in wrong.advice


def another_certificate(folder: Path, hosts: tuple[str, ...] = (), days: int = 30) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    make_server_certificate(server_files(folder), hosts, days)


def test_the_certificate_of_somebody_else(place, tmp_path):
    """As a firewall shows one that opens encrypted connections."""
    another_certificate(tmp_path / "other")
    with serving(tmp_path / "other", place.port):
        (wrong,) = place.problems()
    assert wrong.name == "TLS"
    assert "signed by 'fedalloy federation authority', not by ca.crt" in wrong.found
    assert "a firewall opens encrypted connections" in wrong.advice


def test_a_name_that_the_certificate_does_not_have(place, tmp_path, monkeypatch):
    monkeypatch.setattr(pki, "LOOPBACK", ("elsewhere",))
    another_certificate(tmp_path / "other")
    shutil.copy(tmp_path / "other" / "ca.crt", place.node / "ca.crt")
    with serving(tmp_path / "other", place.port):
        (wrong,) = place.problems()
    assert (wrong.name, "is not for 'localhost'" in wrong.found) == ("TLS", True)


def test_certificates_that_have_expired_or_will_soon(place, tmp_path, monkeypatch):
    class Past(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) - timedelta(days=100)

    another_certificate(tmp_path / "soon", days=20)
    shutil.copy(tmp_path / "soon" / "ca.crt", place.node / "ca.crt")
    with serving(tmp_path / "soon", place.port):
        found = place.examined()["private CA"]
        assert (found.state, "expires in 20 days" in found.found) == (WARNING, True)
    monkeypatch.setattr(pki, "datetime", Past)
    another_certificate(tmp_path / "old", days=50)
    shutil.copy(tmp_path / "old" / "ca.crt", place.node / "ca.crt")
    with serving(tmp_path / "old", place.port):
        (wrong,) = place.problems()
        assert (wrong.name, "ca.crt expired on" in wrong.found) == ("private CA", True)
    (place.node / "ca.crt").write_text("nothing")
    with serving(place.server, place.port):
        (wrong,) = place.problems()
    assert (wrong.name, "cannot be used" in wrong.found) == ("private CA", True)


@pytest.mark.parametrize(("ahead", "words"), [(30.0, "3[01] s ahead of"), (-400.0, "(399|400) s behind")])
def test_a_clock_that_is_wrong(place, ahead, words):
    with serving(place.server, place.port, ahead=ahead):
        (wrong,) = place.problems()
    assert (wrong.name, bool(re.match(words, wrong.found))) == ("clock", True)
    assert "NTP" in wrong.advice


def test_a_key_that_nobody_admitted_is_missing_or_can_be_read_by_others(place):
    with serving(place.server, place.port, reason="unknown-key"):
        (wrong,) = place.problems()
        assert (wrong.name, "send node.key.pub to the coordinator" in wrong.found) == ("admitted", True)
    with serving(place.server, place.port):
        with locked(place.node / "store" / "node.lock"):
            assert "is running" in place.examined()["admitted"].found, "a running node is not signed off"
        (place.node / "node.key").chmod(0o644)
        (wrong,) = place.problems()
        assert (wrong.name, wrong.advice.startswith("chmod 600")) == ("key", True)
        (place.node / "node.key").unlink()
        (wrong,) = place.problems()
        assert (wrong.name, "does not exist" in wrong.found) == ("key", True)


def test_a_full_disk_a_store_that_cannot_be_written_and_a_port_that_is_taken(place, monkeypatch):
    with serving(place.server, place.port), socket.create_server(("127.0.0.1", 0)) as other:
        place.set(port=other.getsockname()[1])
        (wrong,) = place.problems()
        assert (wrong.name, "is taken" in wrong.found) == ("own port", True)
        place.set(port=free_port())
        usage = shutil.disk_usage(place.node)
        monkeypatch.setattr("fedalloy.flower.doctor.shutil.disk_usage", lambda path: usage._replace(free=3_000_000))
        (wrong,) = place.problems()
        assert (wrong.name, "0.00 GB are free" in wrong.found) == ("disk", True)
        monkeypatch.undo()
        place.set(store="node.toml")
        assert [(one.name, "cannot be written" in one.found) for one in place.problems()] == [("disk", True)]


def test_data_that_do_not_fit_the_study(place):
    with serving(place.server, place.port):
        wider = place.recipe.read_text().replace(f"shape = [{shares.FEATURES}]", "shape = [9]")
        place.recipe.write_text(wider)
        (wrong,) = place.problems(study=True)
        assert wrong.name == "data"
        assert f"examples have shape ({shares.FEATURES},), the recipe's (9,)" in wrong.found
        place.set(data="nothing")
        (wrong,) = place.problems()
        assert (wrong.name, "is not a folder or file" in wrong.found) == ("data", True)


def test_a_policy_that_forbids_the_study_and_one_that_wants_an_approval(place):
    policy = place.node / "policy.toml"
    with serving(place.server, place.port):
        policy.write_text('forbid = ["loss_before"]\n')
        (wrong,) = place.problems(study=True)
        assert (wrong.name, "forbids loss_before" in wrong.found) == ("study", True)
        policy.write_text("require_approval = true\n")
        (wrong,) = place.problems(study=True)
        assert wrong.name == "approval"
        assert Review.of(load(place.recipe)).study[:16] in wrong.found
        assert CliRunner().invoke(app, ["flower", "approve", str(place.node), str(place.recipe)]).exit_code == 0
        assert place.problems(study=True) == []
        policy.write_text("max_exampels = 3\n")
        (wrong,) = place.problems()
        assert (wrong.name, "did you mean 'max_examples'" in wrong.found) == ("policy", True)


def test_settings_that_cannot_be_read(place):
    place.set(data="")
    (wrong,) = place.problems()
    assert (wrong.name, "'data' is missing or empty" in wrong.found) == ("settings", True)


@pytest.mark.parametrize("algorithm", ["aaggff_s", "scaffold"])
def test_a_dry_run_trains_on_the_nodes_own_data_and_reaches_nobody(place, algorithm, monkeypatch):
    def unreachable(*_: object) -> None:
        raise AssertionError("a dry run opens no connection")

    monkeypatch.setattr(socket.socket, "connect", unreachable)
    place.recipe.write_text(place.recipe.read_text().replace("aaggff_s", algorithm))
    line = ["flower", "dry-run", str(place.node), str(place.recipe), "--rounds", "3"]
    done = CliRunner().invoke(app, [*line, "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [one["round"] for one in rows] == [1, 2, 3]
    assert rows[-1]["loss"] < rows[0]["loss"], "it learns"
    assert 0 <= rows[-1]["scores"]["accuracy"] <= 1
    assert not (place.node / "store").exists(), "the node keeps nothing of it"
    assert "Nothing was sent" in CliRunner().invoke(app, line).output


def test_a_dry_run_obeys_the_policy_and_knows_its_client(place):
    policy, line = place.node / "policy.toml", ["flower", "dry-run", str(place.node), str(place.recipe)]
    policy.write_text("require_approval = true\n")
    refused = CliRunner().invoke(app, line)
    assert refused.exit_code == 2
    assert "cannot take part: it refused: the study" in " ".join(refused.output.split())
    CliRunner().invoke(app, ["flower", "approve", str(place.node), str(place.recipe)])
    assert CliRunner().invoke(app, line).exit_code == 0
    place.set(client="7")
    assert "has no client '7'" in " ".join(CliRunner().invoke(app, line).output.split())
    assert "use 1 or more" in " ".join(CliRunner().invoke(app, [*line, "--rounds", "0"]).output.split())
    assert dry_run.alone(load(place.recipe), "1", 5).run.rounds == 5
