"""Certificates, keys and the folders of a federation, without starting anything."""

from __future__ import annotations

import os
import socket
import ssl
import stat
import subprocess
import sys
import threading
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.core.errors import CheckpointError, RunLocked, SpecError
from fedalloy.experiment.recipe import parse
from fedalloy.flower import programs
from fedalloy.flower.admission import keys
from fedalloy.flower.config import NodeConfig
from fedalloy.flower.layout import NodePlace, ServerPlace, server_files
from fedalloy.flower.local import LocalFederation
from fedalloy.flower.node.policy import Policy
from fedalloy.flower.pki import (
    expires,
    make_node_key,
    make_server_certificate,
    public_half,
    renew_certificates,
    write_private,
)
from fedalloy.flower.prefork import launcher
from fedalloy.flower.programs import TOKEN, DidNotStart, Program, carrying, end_all, free_port, wait_until
from fedalloy.flower.project_templates import FederationPlan, numbered, write_federation
from fedalloy.flower.submission import NewLines
from fedalloy.flower.trial import Trial, trial_of


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def shake(files, name: str) -> str:
    """One TLS connection over a socket pair, as a node makes it; what it received."""
    ours, theirs = socket.socketpair()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files.certificate, files.key)

    def answer() -> None:
        try:
            with server.wrap_socket(theirs, server_side=True) as secured:
                secured.sendall(b"hello")
        except ssl.SSLError:
            theirs.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        context = ssl.create_default_context(cafile=files.ca_certificate)
        with context.wrap_socket(ours, server_hostname=name) as secured:
            return secured.recv(5).decode()
    finally:
        ours.close()
        thread.join()


def test_a_server_is_known_by_its_names_and_by_no_other(tmp_path):
    files = server_files(tmp_path)
    make_server_certificate(files, ["fed.example.org", "10.1.2.3"], days=30)
    for name in ("localhost", "127.0.0.1", "fed.example.org", "10.1.2.3"):
        assert shake(files, name) == "hello"
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(files, "evil.example.org")
    other = server_files(tmp_path / "other")
    make_server_certificate(other)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake(type(files)(other.ca_certificate, other.ca_key, files.certificate, files.key), "localhost")
    left = expires(files.certificate) - datetime.now(UTC)
    assert timedelta(days=29) < left <= timedelta(days=30)
    authority = x509.load_pem_x509_certificate(files.ca_certificate.read_bytes())
    assert authority.extensions.get_extension_for_class(x509.BasicConstraints).value.ca


def test_renewed_certificates_are_accepted_with_the_old_and_the_new_authority(tmp_path):
    """Names and keys stay, so that sites change their ca.crt one after the other."""
    write_federation(tmp_path / "fed", FederationPlan(("north",), host="fed.example.org", days=20))
    files = server_files(tmp_path / "fed" / "server")
    line = ["flower", "renew", str(tmp_path / "fed" / "server")]
    aside = files.ca_key.rename(tmp_path / "offline.key")
    missing = CliRunner().invoke(app, line)
    assert missing.exit_code == 2
    assert "--ca-key" in missing.output
    before, key = expires(files.ca_certificate), files.key.read_bytes()
    done = CliRunner().invoke(app, [*line, "--ca-key", str(aside), "--days", "100"])
    assert done.exit_code == 0, done.output
    assert f"before {before:%Y-%m-%d}" in " ".join(done.output.split())
    assert files.key.read_bytes() == key
    for file in (files.certificate, files.ca_certificate):
        assert timedelta(days=99) < expires(file) - datetime.now(UTC) <= timedelta(days=100)
    for authority in (tmp_path / "fed" / "nodes" / "north" / "ca.crt", files.ca_certificate):
        for name in ("fed.example.org", "127.0.0.1"):
            assert shake(type(files)(authority, aside, files.certificate, files.key), name) == "hello"
    make_server_certificate(server_files(tmp_path / "other"))
    told = files.certificate.read_bytes()
    with pytest.raises(SpecError, match=r"is not the key of .*ca\.crt"):
        renew_certificates(files, authority_key=tmp_path / "other" / "ca.key")
    assert files.certificate.read_bytes() == told, "nothing was written"


def test_a_node_key_is_a_p384_pair_in_openssh_format(tmp_path):
    make_node_key(tmp_path / "node.key", "north")
    private = load_ssh_private_key((tmp_path / "node.key").read_bytes(), password=None)
    public = load_ssh_public_key(public_half(tmp_path / "node.key").read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public


def test_secrets_are_their_owners_alone_and_nothing_is_overwritten(tmp_path):
    folder = tmp_path / "fed"
    write_federation(folder, FederationPlan(("north", "south"), host="fed.example.org"))
    keys = sorted(folder.glob("**/*.key"))
    assert [path.name for path in keys] == ["node.key", "node.key", "ca.key", "server.key"]
    assert {mode(path) for path in keys} == {0o600}
    assert {mode(folder / "server"), *(mode(path) for path in (folder / "nodes").iterdir())} == {0o700}
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(SpecError, match="nothing was written"):
        write_federation(folder, FederationPlan(("west",)))
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["fed"], "no draft is left"
    with pytest.raises(SpecError, match="not overwritten"):
        write_private(folder / "server" / "ca.key", b"x")


def test_a_federation_that_cannot_be_finished_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("fedalloy.flower.project_templates.make_node_key", fail)
    with pytest.raises(OSError, match="disk full"):
        write_federation(tmp_path / "fed", FederationPlan(numbered(2)))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "plan",
    [{"nodes": ()}, {"nodes": ("a", "a")}, {"nodes": ("../x",)}, {"nodes": ("server",)}, {"nodes": ("a",), "port": 0}],
)
def test_impossible_federations_are_refused(plan):
    with pytest.raises(SpecError):
        FederationPlan(**plan)


@pytest.mark.parametrize(
    "host",
    ["", "a b", "http://fed.example.org", "fed.example.org:9092", "-x", "10.0.0.300", "::1", "[::1]", "spitäl.de"],
)
def test_a_host_that_no_node_could_reach_is_refused_before_anything_is_written(host, tmp_path):
    with pytest.raises(SpecError, match="neither an IPv4 address nor a host name"):
        write_federation(tmp_path / "fed", FederationPlan(("a",), host=host))
    assert not list(tmp_path.iterdir())


def test_hosts_are_names_and_addresses():
    for host in ("localhost", "10.0.0.7", "fed.example.org", "server_1", "xn--spitl-ira.de", "0.0.0.0", "7.example"):
        assert FederationPlan(("a",), host=host).host == host


def test_every_folder_says_how_to_start_and_the_commands_are_quiet_and_encrypted(tmp_path):
    write_federation(tmp_path / "fed", FederationPlan(("north",), host="fed.example.org", port=4444, data="mine"))
    server, place = ServerPlace.read(tmp_path / "fed/server"), NodePlace.read(tmp_path / "fed/nodes/north")
    assert (server.host, server.port, server.local_address) == ("0.0.0.0", 4444, "127.0.0.1:4445")
    link, node = programs.superlink(launcher(), server), programs.supernode(launcher(), place)
    assert link[link.index("--host") :][:4] == ["--host", "127.0.0.1", "--port", "4445"]
    assert programs.front(server)[-3:] == ["0.0.0.0", "4444", "4445"]
    assert "--enable-supernode-auth" in link
    assert "--disable-runtime-dependency-installation" in link
    assert "--root-certificates" in node
    assert "--insecure" not in [*link, *node]
    assert "fed.example.org:4444" in node
    env = programs.environment(launcher(), tmp_path / "home")
    assert (env["FLWR_TELEMETRY_ENABLED"], env["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert NodeConfig.read(place.config.to_keys()) == place.config
    assert place.config.store == tmp_path / "fed/nodes/north/store", "paths are relative to the folder"
    assert Policy.read(place.config.policy) == Policy()
    for unit in tmp_path.glob("fed/**/*.service"):
        assert "$" not in unit.read_text()
    message = (tmp_path / "fed/nodes/north/README.md").read_text()
    assert "fed.example.org:4444" in message
    assert "NOT encrypted" not in message


def test_plain_text_needs_to_be_asked_for_and_says_so(tmp_path):
    write_federation(tmp_path / "fed", FederationPlan(("north",), secure=False))
    assert list((tmp_path / "fed").glob("**/*.key")) == []
    assert "--insecure" in programs.superlink(launcher(), ServerPlace.read(tmp_path / "fed/server"))
    assert "NOT encrypted" in (tmp_path / "fed/README.md").read_text()


def test_nothing_is_public_without_encryption_and_a_front(tmp_path, monkeypatch):
    with pytest.raises(SpecError, match=r"'fed\.example\.org' can be reached from others"):
        FederationPlan(("north",), secure=False, host="fed.example.org")
    write_federation(tmp_path / "fed", FederationPlan(("north",), secure=False))
    file = tmp_path / "fed/server/server.toml"
    file.write_text(file.read_text().replace('"127.0.0.1"', '"0.0.0.0"'))
    with pytest.raises(SpecError, match=r"on '0\.0\.0\.0' without encryption"):
        ServerPlace.read(file.parent)
    with pytest.raises(SpecError, match="one each"):
        ServerPlace(tmp_path, "0.0.0.0", 9092, local_port=9092)
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_CONTROL_API", "1")
    assert "FLWR_INTERNAL_GRPC_CONTROL_API" not in programs.environment(launcher(), tmp_path / "home"), (
        "opens 0.0.0.0:9093"
    )


@pytest.mark.parametrize("server", ["fed.example.org:9092", "0.0.0.0:9092", "[2001:db8::1]:9092", "fed.example.org"])
def test_a_node_speaks_to_nobody_elsewhere_without_encryption(server, tmp_path):
    write_federation(tmp_path / "fed", FederationPlan(("north",), secure=False))
    file = tmp_path / "fed/nodes/north/node.toml"
    written = file.read_text().replace('data = ""', 'data = "mine"')
    file.write_text(written)
    assert "--insecure" in programs.supernode(launcher(), NodePlace.read(file.parent))
    file.write_text(written.replace("localhost:9092", server))
    with pytest.raises(SpecError, match="without encryption"):
        NodePlace.read(file.parent)


def test_a_node_does_not_start_before_its_operator_said_where_its_data_are(tmp_path):
    write_federation(tmp_path / "fed", FederationPlan(("north",)))
    place = tmp_path / "fed/nodes/north"
    assert tomllib.loads((place / "node.toml").read_text())["data"] == ""
    with pytest.raises(SpecError, match="'data' is missing or empty"):
        NodePlace.read(place)
    done = CliRunner().invoke(app, ["flower", "node", str(place)])
    assert done.exit_code == 2
    assert LocalFederation.of(tmp_path / "fed").nodes["north"].config.data == "recipe", "a trial here uses the recipe's"
    (place / "node.toml").write_text((place / "node.toml").read_text().replace('data = ""', 'data = "mine"'))
    assert NodePlace.read(place).config.data == str(place / "mine")
    assert LocalFederation.of(tmp_path / "fed").nodes["north"].config.data == str(place / "mine")


def test_admit_without_a_server_says_so_and_leaves_nothing_behind(tmp_path):
    write_federation(tmp_path / "fed", FederationPlan(("north",), port=free_port()))
    before = sorted((tmp_path / "fed/server").iterdir())
    for _ in range(2):
        done = CliRunner().invoke(app, ["flower", "admit", str(tmp_path / "fed/server")])
        assert done.exit_code == 2, done.output
        assert "is not running" in done.output
        assert "fedalloy flower server" in " ".join(done.output.split())
    assert sorted((tmp_path / "fed/server").iterdir()) == before


def test_a_key_that_cannot_be_read_is_named(tmp_path):
    write_federation(tmp_path / "fed", FederationPlan(("north",)))
    (tmp_path / "fed/server/nodes/east.pub").mkdir()
    with pytest.raises(SpecError, match=r"east\.pub is not a public key"):
        keys(ServerPlace.read(tmp_path / "fed/server"))


def test_a_misspelt_setting_is_named(tmp_path):
    write_federation(tmp_path / "fed", FederationPlan(("north",)))
    file = tmp_path / "fed/nodes/north/node.toml"
    good = file.read_text()
    file.write_text(good.replace("policy =", "polici ="))
    with pytest.raises(SpecError, match="unknown key 'polici'; did you mean 'policy'"):
        NodePlace.read(file.parent)
    file.write_text(good.replace('client = "0"', 'client = ""'))
    with pytest.raises(SpecError, match="'client' is missing or empty"):
        NodePlace.read(file.parent)
    assert tomllib.loads(good)["secure"] is True


def test_a_trial_has_as_many_clients_as_nodes(tmp_path):
    recipe = parse({"partition": {"kind": "iid", "clients": 10}, "sampling": {"cohort": 5}})
    assert len(trial_of(recipe, tmp_path, None).nodes) == 10
    small = trial_of(recipe, tmp_path, 3)
    assert (len(small.nodes), small.recipe.partition.clients, small.recipe.sampling.cohort) == (3, 3, 3)
    with pytest.raises(SpecError, match="fedalloy run"):
        trial_of(recipe, tmp_path, 100)


def test_news_are_told_once_and_only_whole_lines(tmp_path):
    file = tmp_path / "log"
    told: list[str] = []
    news = NewLines(file)
    news.tell(told.append)
    file.write_text("one\ntw")
    news.tell(told.append)
    with file.open("a") as more:
        more.write("o\n")
    news.tell(told.append)
    assert told == ["one", "two"]


def sleeper(tmp_path: Path, mark: str, code: str) -> Program:
    return Program.start(
        "sleeper", [sys.executable, "-c", code], {**os.environ, TOKEN: mark}, tmp_path / "log", tmp_path
    )


def test_programs_in_sessions_of_their_own_are_found_by_their_mark_and_ended(tmp_path):
    inner = "import time; time.sleep(600)"
    code = (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True); {inner}"
    )
    mark = f"test-{tmp_path.name}-{free_port()}"
    program = sleeper(tmp_path, mark, code)
    wait_until(lambda: len(list(carrying(mark))) == 2, "both are running", 60, [program])
    program.kill()
    assert len(list(carrying(mark))) == 1, "the grandchild lives on"
    end_all(mark)
    assert list(carrying(mark)) == []


def test_a_program_that_ends_too_early_shows_its_log(tmp_path):
    program = sleeper(tmp_path, "none", "raise SystemExit('no such certificate')")
    with pytest.raises(DidNotStart, match=r"exit code 1(.|\n)*no such certificate"):
        wait_until(lambda: False, "ready", 60, [program])
    with pytest.raises(DidNotStart, match="exit code 1"):
        wait_until(lambda: False, "ready", 60, [Program("in the foreground", program.process, Path())])


def test_a_federation_that_is_running_is_not_started_twice(tmp_path):
    write_federation(tmp_path / "fed", FederationPlan(numbered(1)))
    federation = LocalFederation.of(tmp_path / "fed")
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        known = f'{{"pid": {sleeping.pid}, "mark": "m", "port": 1, "nodes": []}}'
        federation.running_file.write_text(known)
        with pytest.raises(RunLocked, match=f"process {sleeping.pid}"):
            federation.start()
    finally:
        sleeping.kill()
        sleeping.wait()


def test_init_on_the_command_line(tmp_path):
    line = ["flower", "init", str(tmp_path / "fed"), "--names", "north,south"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in (tmp_path / "fed/nodes").iterdir()) == ["north", "south"]
    again = CliRunner().invoke(app, line)
    assert again.exit_code == 2
    assert "nothing was written" in again.output
    plain = CliRunner().invoke(app, ["flower", "init", str(tmp_path / "plain"), "--insecure"])
    assert plain.exit_code == 0
    assert "not encrypted" in plain.output


def test_a_trial_that_is_interrupted_says_how_to_go_on_and_one_that_fails_where_to_look(tmp_path, monkeypatch):
    (tmp_path / "tiny.toml").write_text('[partition]\nkind = "iid"\nclients = 3\n')
    line = ["flower", "up", str(tmp_path / "tiny.toml"), "-o", str(tmp_path / "run")]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trial, "run", interrupted)
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 130
    assert "the same command continues" in done.output
    monkeypatch.setattr(Trial, "run", lambda *_: "finished:failed")
    (tmp_path / "run").mkdir()
    assert "reason" not in CliRunner().invoke(app, line).output, "there is no log to look into"
    (tmp_path / "run/federation.log").write_text("x")
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 1
    assert "federation.log" in done.output


def test_a_trial_keeps_the_federation_it_was_begun_with(tmp_path):
    recipe = parse({"partition": {"kind": "iid", "clients": 2}})
    trial = trial_of(recipe, tmp_path / "run", None)
    trial.prepare()
    key = (tmp_path / "run/federation/nodes/node-0/node.key").read_bytes()
    trial.prepare()
    assert (tmp_path / "run/federation/nodes/node-0/node.key").read_bytes() == key
    assert not trial.finished
    with pytest.raises(CheckpointError, match="has 2 nodes"):
        trial_of(recipe, tmp_path / "run", 3).prepare()
