"""Nothing is told to strangers and nothing is done for them: other sites, other names, other paths, no token."""

from __future__ import annotations

import http.client
import json
import os
import socket

import pytest

from fedalloy.experiment.records.lock import locked
from fedalloy.report.live import guard
from tests.report.live.conftest import TOKEN, make_run

READS = ["/", "/api/runs", "/api/run?run=a", "/events?run=a:0", "/assets/live.js"]


FOREIGN = ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example:1", "0.0.0.0", ""]


@pytest.mark.parametrize("host", [*FOREIGN, "a@localhost", "localhost:80@evil.example", "[::1].evil.example"])
def test_a_foreign_name_that_points_here_reaches_nothing(serving, root, host):
    make_run(root / "a")
    client = serving()
    for target in READS:
        answer = client.get(target, Host=host)
        assert answer.status == 421
        assert b"fedavg" not in answer.body


def test_a_forwarded_port_works(serving):
    client = serving()
    for host in ("localhost:8421", "127.0.0.1", "[::1]:9", "LOCALHOST:1"):
        assert client.get("/api/runs", Host=host).status == 200


def test_two_names_or_none_are_refused(serving):
    client = serving()
    for heads in ("Host: localhost\r\nHost: evil.example\r\n", ""):
        with socket.create_connection(("127.0.0.1", client.port), timeout=60) as raw:
            raw.sendall(f"GET /api/runs HTTP/1.1\r\n{heads}Connection: close\r\n\r\n".encode())
            assert raw.makefile("rb").readline().split()[1] == b"421"


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1"])
def test_other_origins_may_not_read(serving, root, origin):
    make_run(root / "a")
    client = serving()
    for target in READS:
        answer = client.get(target, Origin=origin)
        assert answer.status == 403
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]


def test_the_page_itself_may(serving):
    client = serving()
    mine = f"127.0.0.1:{client.port}"
    assert client.get("/api/runs", Origin=f"http://{mine}", Sec_Fetch_Site="same-origin").status == 200


def test_a_link_from_elsewhere_leads_to_the_page_and_nowhere_else(serving):
    client = serving()
    visit = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"}
    assert client.get("/", **visit).status == 200
    assert client.get("/api/runs", **visit).status == 403
    assert client.get("/", **{**visit, "Sec_Fetch_Dest": "iframe"}).status == 403
    assert client.get("/assets/live.js", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status == 403
    assert client.get("/api/runs", Sec_Fetch_Site="same-site").status == 403


@pytest.mark.parametrize(
    ("token", "headers", "status"),
    [
        (None, {}, 403),
        ("", {}, 403),
        (TOKEN[:-1], {}, 403),
        (TOKEN + "x", {}, 403),
        ("ключ", {}, 403),
        (TOKEN, {"Origin": "http://evil.example"}, 403),
        (TOKEN, {"Host": "evil.example"}, 421),
        (TOKEN, {"Sec_Fetch_Site": "cross-site"}, 403),
        (TOKEN, {"Content-Type": "text/plain"}, 415),
        (TOKEN, {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    ],
)
def test_nothing_is_stopped_without_the_token_and_from_elsewhere(serving, root, token, headers, status):
    make_run(root / "a", state="running")
    with locked(root / "a" / "lock"):
        answer = serving().stop("a", token.encode().decode("latin-1") if token else token, **headers)
    assert answer.status == status
    assert not (root / "a" / "stop").exists()


def test_with_the_token_it_is_asked(serving, root):
    make_run(root / "a", state="running")
    with locked(root / "a" / "lock"):
        assert serving().stop("a").status == 200
    assert (root / "a" / "stop").exists()


def test_without_a_token_the_page_only_reads(serving, root):
    make_run(root / "a", state="running")
    for token in (None, "", "None"):
        answer = serving(token=None).stop("a", token)
        assert answer.status == 403
        assert "read-only" in answer.json["error"]
    assert not (root / "a" / "stop").exists()


def test_a_body_that_asks_for_nothing_is_refused(serving):
    client, heads = serving(), {"Content-Type": "application/json", "X-Fedalloy-Token": TOKEN}
    for body in (b"", b"[]", b"{}", b'{"run": 3}', b"{", b"\xff"):
        assert client.send("POST", "/api/stop", heads, body).status == 400


def test_a_long_body_is_not_read(serving):
    client = serving()
    heads = {"Content-Type": "application/json", "X-Fedalloy-Token": TOKEN, "Content-Length": "99999999"}
    answer = client.send("POST", "/api/stop", heads, b"{}")
    assert answer.status == 413
    assert answer.headers["Connection"] == "close"


TRICKS = [
    "..", "../outside", "../../etc", "/", "", ".", "./a", "a/", "a/..", "a/../a", "a/../../outside", "%2e%2e/outside",
    "..%2foutside", "a%00", "a\\..\\..\\outside", "link", "link/secret", "A", "file:///etc/passwd", "a/checkpoints",
]  # fmt: skip


def test_no_id_leads_out_of_the_folder(serving, root):
    """Ids are looked up, never joined to a path; what is not in the list does not exist."""
    make_run(root / "a")
    make_run(root.parent / "outside")
    (root.parent / "target" / "x").mkdir(parents=True)
    make_run(root.parent / "target" / "secret")
    (root / "link").symlink_to(root.parent / "target")
    client = serving()
    for trick in TRICKS:
        raw = trick.replace("\\", "%5C")
        for target in (f"/api/run?run={raw}", f"/api/clients?round=1&run={raw}", f"/events?run={raw}:0"):
            assert client.get(target).status in (400, 404), target
        assert client.stop(trick).status == 404, trick
    for folder in ("outside", "target/secret"):
        assert "stop" not in os.listdir(root.parent / folder)


@pytest.mark.parametrize(
    "target",
    ["/assets/../server.py", "/assets/..%2f..%2fserver.py", "/assets//etc/passwd", "/assets/", "/../../etc/passwd",
     "/assets/__init__.py", "//etc/passwd", "http://evil.example/api/runs?x", "/api", "/api/run/../runs"],
)  # fmt: skip
def test_no_address_leads_to_other_files(serving, target):
    client = serving()
    connection = http.client.HTTPConnection("127.0.0.1", client.port, timeout=60)
    connection.putrequest("GET", target, skip_accept_encoding=True)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    if target.startswith("http://"):  # a proxy's form, with the foreign name in Host as well
        assert answer.status == 421
    else:
        assert answer.status == 404
        assert json.loads(body) == {"error": "there is nothing here"}


@pytest.mark.parametrize("file", ["rounds.jsonl", "recipe.toml", "status.json", "manifest.json", "environment.json"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_run_with_linked_files_is_left_out(serving, root, file, moment):
    make_run(root / "a")
    secret = root.parent / "secret"
    secret.write_text('{"round": 1, "ids": [], "dropped": {"1": "very secret"}}\n')

    def link():
        (root / "a" / file).unlink()
        (root / "a" / file).symlink_to(secret)

    if moment == "before":
        link()
    client = serving()
    if moment == "after":
        link()
    answer = client.get("/api/run?run=a")
    assert answer.status == 404
    assert b"secret" not in answer.body


def test_a_run_that_becomes_a_link_is_not_followed(serving, root):
    make_run(root / "a")
    make_run(root.parent / "outside", recipe={"name": "very secret", "run": {"rounds": 1}})
    client = serving()
    os.rename(root / "a", root / "b")
    (root / "a").symlink_to(root.parent / "outside")
    assert client.get("/api/run?run=a").status == 404


def test_a_pipe_in_place_of_a_file_does_not_hang(serving, root):
    make_run(root / "a")
    (root / "a" / "rounds.jsonl").unlink()
    os.mkfifo(root / "a" / "rounds.jsonl")
    assert serving().get("/api/runs").json["runs"] == []


def test_every_answer_forbids_frames_foreign_code_and_guessing(serving):
    client = serving()
    for target in ("/", "/api/runs", "/assets/live.js", "/nowhere"):
        headers = client.get(target).headers
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers


def test_it_listens_on_loopback_alone(serving):
    assert serving().server.server_address[0] == "127.0.0.1"


def test_the_guard_would_notice_if_tokens_were_compared_by_prefix():
    """The comparison is of whole tokens: a planted shortcut is caught by the cases above."""
    from email.message import Message

    heads = Message()
    for name, value in (("Host", "localhost"), ("Content-Type", "application/json"), (guard.TOKEN_HEADER, TOKEN)):
        heads[name] = value
    assert guard.refuse_changing(heads, TOKEN) is None
    assert guard.refuse_changing(heads, TOKEN + "more") == (403, "the token is missing or wrong")
