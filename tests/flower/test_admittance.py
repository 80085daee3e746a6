"""A node asks until it is let in: each reason is told apart, on both sides."""

from __future__ import annotations

import json
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from fedalloy.flower.contacts import FILE, Contacts, in_words, read_contacts
from fedalloy.flower.knock import Knock, Refusal
from fedalloy.flower.node_registry import identity_of
from fedalloy.flower.pki import make_node_key

pytestmark = pytest.mark.flower
NOW = 1_700_000_000.0
ACTIVATE, PULL = b"/v1/fleet/activate-node", b"/v1/fleet/pull-messages"


class Server:
    """What Flower's server does with the requests of one node: its number, whether its key is registered, whether it
    counts as connected, and how far the node's clock is ahead."""

    def __init__(self, number: str = "7", registered: bool = True, online: bool = False) -> None:
        self.number, self.registered, self.online = number, registered, online
        self.ahead, self.silent, self.front = 0.0, False, True
        self.asked: list[str] = []

    def activate(self) -> str:
        self._answer("activate")
        if not self.registered or self.online:
            self._refuse(412, "unknown-key" if not self.registered else "still-connected")
        self.online = True
        return self.number

    def deactivate(self, number: str) -> None:
        self._answer("deactivate")
        if not self.registered or number != self.number:
            self._refuse(401, "unknown-key")
        if not self.online:
            self._refuse(412, "")
        self.online = False

    def _answer(self, what: str) -> None:
        self.asked.append(what)
        if self.silent:
            raise httpx.ConnectError("[Errno 111] Connection refused")
        if self.ahead > 5:
            self._refuse(401, f"clock {self.ahead:+.1f}")

    def _refuse(self, status: int, reason: str) -> None:
        told = datetime.now(UTC) - timedelta(seconds=self.ahead)
        headers = {"date": told.strftime("%a, %d %b %Y %H:%M:%S GMT")}
        headers |= {"x-fedalloy-reason": reason} if self.front and reason else {}
        request = httpx.Request("POST", "https://server/")
        response = httpx.Response(status, headers=headers, request=request)
        raise httpx.HTTPStatusError("no", request=request, response=response)


def knock(server: Server, kept: Path, said: list[str] | None = None, on_sleep=lambda: None) -> Knock:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        on_sleep()

    return Knock(server, kept, (said if said is not None else []).append, sleep, lambda: now[0])


def test_a_killed_node_comes_back_at_once_because_it_signs_its_predecessor_off(tmp_path):
    server, kept = Server(), tmp_path / "store" / "number.json"
    assert knock(server, kept).ask() is None
    assert json.loads(kept.read_text()) == {"number": "7"}
    assert not server.online, "Flower's program signs it on"
    server.online, server.asked = True, []  # it was signed on and killed
    assert knock(server, kept).ask() is None
    assert server.asked == ["deactivate"]
    assert not server.online


def test_a_node_whose_disk_is_full_is_let_in_and_says_what_it_cannot_keep(tmp_path, monkeypatch):
    said: list[str] = []

    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fedalloy.experiment.records.atomic.write_text", full)
    assert knock(Server(), tmp_path / "number.json", said).ask() is None
    assert "No space left on device" in said[0]


def test_without_its_number_a_killed_node_waits_and_says_for_what(tmp_path):
    server = Server(online=True)
    said: list[str] = []

    def forget() -> None:
        server.online = len(server.asked) < 6

    knock(server, tmp_path / "number.json", said, forget).wait()
    (line,) = said
    assert "still counts an earlier process of this node as connected; this ends within 60 s" in line


def test_a_node_that_was_registered_anew_learns_its_new_number(tmp_path):
    (tmp_path / "number.json").write_text('{"number": "5"}')
    assert knock(Server(number="9"), tmp_path / "number.json").ask() is None
    assert json.loads((tmp_path / "number.json").read_text()) == {"number": "9"}


@pytest.mark.parametrize("number", ["", "7"])
@pytest.mark.parametrize("front", [True, False])
def test_each_refusal_is_told_apart(front, number, tmp_path):
    server, kept = Server(registered=False), tmp_path / "number.json"
    said: list[str] = []
    server.front, server.silent = front, True
    kept.write_text(json.dumps({"number": number}))

    def improve() -> None:
        if server.silent:
            server.silent, server.ahead = False, 7.0
        elif server.ahead:
            server.ahead = 0.0
        else:
            server.registered = True

    knock(server, kept, said, improve).wait()
    assert len(said) == 3
    assert "the server cannot be reached: [Errno 111]" in said[0]
    assert "clock is 7 s ahead of" in said[1] or "clock is 8 s ahead of" in said[1]
    assert "does not know this node's key" in said[2]
    assert ("or it still counts" in said[2]) == (not front), "only the front knows which"


def test_a_reason_is_given_once_and_again_after_ten_minutes(tmp_path):
    server = Server(registered=False)
    said: list[str] = []
    late = [lambda: False]
    patient = knock(server, tmp_path / "number.json", said, lambda: setattr(server, "registered", late[0]()))
    late[0] = lambda: patient.clock() > 900
    patient.wait()
    assert len(said) == 2
    assert len(server.asked) > 60


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        (Refusal(502), "its SuperLink does not"),
        (Refusal(404), "not the server of a federation"),
        (Refusal(401), "does not accept this node's signature"),
        (Refusal(401, ahead=-400.0), "clock is 400 s behind"),
        (Refusal(401, "unknown-key", ahead=5.9), "does not know this node's key"),
        (Refusal(426, told="update"), "answers 426 update"),
    ],
)
def test_other_answers_are_explained_too(refusal, words):
    assert words in str(refusal)


def request(key: Path, at: float = NOW) -> list[tuple[bytes, bytes]]:
    """The headers by which a node proves who it is."""
    private = load_ssh_private_key(key.read_bytes(), None)
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    told = datetime.fromtimestamp(at, UTC).isoformat().encode()
    signature = private.sign(told, ec.ECDSA(hashes.SHA256()))
    return [
        (b"flwr-public-key", b64encode(public(key))),
        (b"flwr-timestamp", told),
        (b"flwr-signature", b64encode(signature)),
    ]


def public(key: Path) -> bytes:
    private = load_ssh_private_key(key.read_bytes(), None)
    return private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name in ("north", "stranger"):
        make_node_key(tmp_path / name)
    seat = {"name": "north", "key": identity_of(public(tmp_path / "north"))}
    (tmp_path / "seats.json").write_text(json.dumps([seat, {"name": "south", "key": ""}]))
    return tmp_path


def test_the_front_notes_who_was_heard_when_and_why_one_was_refused(keys):
    now = [NOW]
    contacts = Contacts(keys, lambda: now[0])
    north, stranger = keys / "north", keys / "stranger"
    assert contacts.note(PULL, [*request(north), (b"x-fedalloy-version", b"0.0.9")], "10.0.0.7", 200) == ""
    contacts.note(PULL, request(north), "10.0.0.7", 200)
    now[0] += 30
    assert contacts.note(ACTIVATE, request(north), "10.0.0.7", 412) == "still-connected"
    assert contacts.note(ACTIVATE, request(stranger), "10.0.0.8", 412) == "unknown-key"
    assert contacts.note(PULL, request(north, now[0] + 7), "10.0.0.7", 401) == "clock +7.0"
    contacts.write()
    found = read_contacts(keys)
    one, other = found[identity_of(public(north))], found[identity_of(public(stranger))]
    assert (one.name, one.last_contact, one.refused, one.address) == ("north", NOW, NOW + 30, "10.0.0.7")
    assert in_words(one.reason) == "its clock is 7 s ahead of the server's"
    assert (one.version, other.version) == ("0.0.9", ""), "it is said when a node joins, and kept"
    assert (other.name, other.last_contact, in_words(other.reason)) == ("", None, "its key is not admitted")
    before = (keys / FILE).stat().st_mtime_ns
    contacts.write()
    assert (keys / FILE).stat().st_mtime_ns == before, "nothing new, nothing written"
    contacts.note(PULL, request(north), "10.0.0.7", 200)
    assert contacts.known[one.key].reason == "", "it is in again"


def test_nobody_can_speak_for_another_node(keys):
    """A refused request counts only if it is signed by the key that it names."""
    contacts = Contacts(keys, lambda: NOW)
    forged = [*request(keys / "north")[:1], *request(keys / "stranger")[1:]]
    assert contacts.note(PULL, forged, "10.0.0.9", 401) == ""
    assert contacts.note(PULL, request(keys / "north")[:1], "10.0.0.9", 401) == ""
    assert contacts.note(PULL, [(b"flwr-public-key", b"%%%")], "10.0.0.9", 200) == ""
    assert contacts.note(PULL, [], "10.0.0.9", 200) == ""
    assert not contacts.known


def test_strangers_cannot_fill_the_file(keys, monkeypatch):
    monkeypatch.setattr("fedalloy.flower.contacts._is_signed", lambda key, given: True)
    contacts = Contacts(keys, lambda: NOW)
    contacts.note(PULL, request(keys / "north"), "", 200)
    for number in range(100):
        headers = [(b"flwr-public-key", b64encode(str(number).encode())), *request(keys / "stranger")[1:2]]
        contacts.note(ACTIVATE, headers, "", 412)
    assert len(contacts.known) == 65
    assert any(one.name == "north" for one in contacts.known.values())


def test_two_processes_with_one_key_are_noticed(keys):
    """As after a node's folder was copied to another machine, and both were started: a new process signs on, and the
    requests of the one before go on."""
    north, now = keys / "north", [NOW]
    contacts = Contacts(keys, lambda: now[0])

    def twice() -> float | None:
        return next(iter(contacts.known.values())).twice

    for connection, target in ((3, ACTIVATE), (3, PULL), (4, PULL), (3, PULL)):
        contacts.note(target, request(north), "10.0.0.7", 200, connection)
    assert twice() is None, "one process has several connections, all of them opened after it signed on"
    contacts.note(ACTIVATE, request(north), "10.0.0.7", 200, 7)
    contacts.note(PULL, request(north), "10.0.0.7", 200, 8)
    assert twice() is None, "its predecessor was killed"
    now[0] += 60
    contacts.note(PULL, request(north), "10.0.0.9", 200, 4)
    assert twice() == now[0]
    contacts.write()
    assert next(iter(read_contacts(keys).values())).twice == now[0]
