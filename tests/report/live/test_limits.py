"""Whatever is asked, however often: a clear answer, and no more threads than are allowed."""

from __future__ import annotations

import socket
import threading
from urllib.parse import quote

import pytest

from tests.report.live.conftest import TOKEN, make_run

ABSURD = ["-1", "1e400", "nan", "NaN", "inf", "1.5", "9" * 40, "9" * 5000, "+3", " 3", "3_0", "٣", "", "0x10", "9" * 17]


@pytest.mark.parametrize("number", ABSURD, ids=lambda text: text[:8] or "nothing")
def test_an_absurd_number_is_answered_with_400(serving, root, number):
    make_run(root / "a")
    client, said = serving(), quote(number)
    for target in (f"/api/clients?run=a&round={said}", f"/events?run=a:{said}", f"/events?since={said}&run=a:0"):
        answer = client.get(target)
        assert answer.status == 400, target[:80]
        assert "whole number" in answer.json["error"]


def test_what_is_large_and_can_be_meant_is_answered(serving, root):
    make_run(root / "a")
    client = serving()
    client.get("/api/run?run=a")
    assert client.get(f"/api/clients?run=a&round={2**53 - 1}").json["round"] == 3
    assert client.get("/api/clients?run=a&round=0").json is None


@pytest.mark.parametrize(
    "target",
    ["/api/runs?" + "a=1&" * 200, "//[", "/events?run=a", "/events?run=" + "x" * 20_000 + ":0", "/api/run?run="],
)
def test_a_question_that_cannot_be_taken_apart_is_refused(serving, root, target):
    make_run(root / "a")
    assert serving().get(target).status in (400, 404)


@pytest.mark.parametrize(
    "body", [b"[" * 4000, b"{" * 4000, b"\xff\xfe", b"1e999", b'{"run": 1}', b'{"run": "\\ud800"}']
)
def test_a_body_that_is_no_question_is_refused(serving, body):
    sent = {"Content-Type": "application/json", "X-Fedalloy-Token": TOKEN}
    assert serving().send("POST", "/api/stop", sent, body).status in (400, 404)


@pytest.mark.parametrize(
    ("length", "status"), [("9" * 5000, b"413"), ("-1", b"413"), ("1e3", b"413"), ("4097", b"413")]
)
def test_an_absurd_length_is_refused(serving, length, status):
    client = serving()
    heads = f"Host: localhost\r\nX-Fedalloy-Token: {TOKEN}\r\nContent-Type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", client.port), timeout=60) as raw:
        raw.sendall(f"POST /api/stop HTTP/1.1\r\n{heads}Content-Length: {length}\r\n\r\n".encode())
        assert raw.makefile("rb").readline().split()[1] == status


def test_threads_are_bounded_and_who_comes_too_late_is_told(serving, root, monkeypatch):
    monkeypatch.setattr("fedalloy.report.live.server.MOST_CONNECTIONS", 4)
    client = serving()
    before = threading.active_count()
    held = [socket.create_connection(("127.0.0.1", client.port), timeout=60) for _ in range(4)]
    try:
        for _ in range(12):
            refused = client.get("/api/runs")
            assert (refused.status, refused.json["error"]) == (503, "too many connections are open; close some pages")
        assert threading.active_count() - before <= 4
    finally:
        for one in held:
            one.close()
    for _ in range(200):  # until the server has noticed that they are gone
        if client.get("/api/runs").status == 200:
            return
    raise AssertionError("closed connections still count")


def test_an_error_in_the_code_is_one_line_for_the_page(serving, root, monkeypatch):
    make_run(root / "a")
    client = serving()
    monkeypatch.setattr("fedalloy.report.live.answers.details", lambda *_: 1 / 0)
    answer = client.get("/api/run?run=a")
    assert answer.status == 500
    assert "ZeroDivisionError" in answer.json["error"]
