"""What a server knows about its nodes from their requests: the last contact with each, and why one was refused.

The front sees every request of a node with its key and its clock. It writes this to ``contacts.json`` in the server's
folder, for ``fedalloy flower status``, and adds the reason to a refusal, for the node. Flower itself counts a node as
connected for up to a minute after its death, and gives one answer to a key that nobody registered and to a node that
still counts as connected.

Nothing of a request is believed unless the SuperLink accepted it, or its signature is that of the key it names.
"""

from __future__ import annotations

import binascii
import contextlib
import json
import os
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedalloy.flower.node_registry import identity_of

FILE = "contacts.json"
REASON = "x-fedalloy-reason"
"""The header of a refusal with its reason."""
UNKNOWN, ONLINE, CLOCK = "unknown-key", "still-connected", "clock"
AHEAD, BEHIND = 5.0, 305.0
"""Seconds by which the clock of a node may be ahead of the server's or behind it: Flower's limits."""
_MOST_STRANGERS = 64
_ACTIVATE = b"/v1/fleet/activate-node"
VERSION = "x-fedalloy-version"
"""The header with a node's version, when it asks to be let in."""
_KEY, _TIME, _SIGNATURE, _VERSION = b"flwr-public-key", b"flwr-timestamp", b"flwr-signature", VERSION.encode()


@dataclass
class Contact:
    """One key: the node's name (empty for a key that is not admitted), when it was last accepted and last refused
    (seconds since 1970), and why; the version of fedalloy that it says it has; and when two processes last used the key
    at the same time."""

    key: str
    name: str = ""
    address: str = ""
    last_contact: float | None = None
    refused: float | None = None
    reason: str = ""
    version: str = ""
    twice: float | None = None


@dataclass
class Contacts:
    """The contacts of a server's folder, by key; ``clock`` is the time of day.

    A process signs on once, by its first request. So requests that come afterwards on a connection that is older than
    that one are those of another process with the same key, as after a node's folder was copied. Flower notices
    nothing: both get orders, and each has states that the other one lacks.
    """

    folder: Path
    clock: Callable[[], float] = time.time
    known: dict[str, Contact] = field(default_factory=dict)
    _changed: bool = False
    _seats: tuple[int, dict[str, str]] = (0, {})
    _joined: dict[str, int] = field(default_factory=dict)

    def note(
        self, target: bytes, headers: Iterable[tuple[bytes, bytes]], address: str, status: int, connection: int = 0
    ) -> str:
        """Note a request that was answered with ``status``; the reason if it is a refusal with a known one.
        ``connection``: the number of the one it came on, in the order in which they were opened."""
        given = {name: value for name, value in headers if name in (_KEY, _TIME, _SIGNATURE, _VERSION)}
        try:
            key = b64decode(given[_KEY], validate=True)
        except (KeyError, binascii.Error):
            return ""
        if status == 200:
            self._accepted(key, address, given.get(_VERSION, b""))
            self._compare(identity_of(key), target, connection)
            return ""
        refused = status == 401 or (status == 412 and target == _ACTIVATE)
        return self._refused(key, given, address, status) if refused else ""

    def write(self) -> None:
        """Write the file if anything changed; a reader sees the old one or the new one."""
        if not self._changed:
            return
        self._changed = False
        draft = self.folder / f".{FILE}.{os.getpid()}"
        told = {"written": self.clock(), "contacts": [asdict(one) for one in self.known.values()]}
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
            draft.replace(self.folder / FILE)

    def _accepted(self, key: bytes, address: str, version: bytes) -> None:
        contact = self._contact(key, address)
        contact.last_contact, contact.reason = self.clock(), ""
        if version:  # a node says it when it joins
            contact.version = version[:40].decode("ascii", "replace")

    def _compare(self, identity: str, target: bytes, connection: int) -> None:
        if target == _ACTIVATE:
            self._joined[identity] = connection
        elif connection < self._joined.get(identity, 0):
            self.known[identity].twice = self.clock()

    def _refused(self, key: bytes, given: Mapping[bytes, bytes], address: str, status: int) -> str:
        if not _is_signed(key, given):
            return ""
        ahead = _seconds_ahead(given[_TIME], self.clock())
        contact = self._contact(key, address)
        contact.refused = self.clock()
        if not -BEHIND < ahead < AHEAD:
            contact.reason = f"{CLOCK} {ahead:+.1f}"
        else:
            contact.reason = ONLINE if status == 412 and contact.name else UNKNOWN
        return contact.reason

    def _contact(self, key: bytes, address: str) -> Contact:
        identity = identity_of(key)
        contact = self.known.pop(identity, None) or Contact(identity)
        contact.name, contact.address = self._names().get(identity, ""), address
        self.known[identity] = contact  # the latest is the last
        strangers = [one for one, kept in self.known.items() if not kept.name]
        for one in strangers[:-_MOST_STRANGERS]:
            del self.known[one]
        self._changed = True
        return contact

    def _names(self) -> dict[str, str]:
        """The names of the admitted keys, read again when the file of seats has changed."""
        file = self.folder / "seats.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            at = file.stat().st_mtime_ns
            if at != self._seats[0]:
                seats = json.loads(file.read_text(encoding="utf-8"))
                self._seats = at, {str(one["key"]): str(one["name"]) for one in seats if one["key"]}
        return self._seats[1]


def read_contacts(folder: Path) -> dict[str, Contact]:
    """The contacts in a server's folder by key; empty where its front has written none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        told: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return {one["key"]: Contact(**one) for one in told["contacts"]}
    return {}


def in_words(reason: str) -> str:
    """The reason of a refusal for the coordinator.

    >>> in_words("clock +7.2")
    "its clock is 7 s ahead of the server's"
    """
    kind, _, rest = reason.partition(" ")
    if kind == CLOCK:
        ahead = float(rest)
        return f"its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the server's"
    return {
        UNKNOWN: "its key is not admitted",
        ONLINE: "the server still counted an earlier process of it as connected",
    }.get(kind, reason)


def _is_signed(key: bytes, given: Mapping[bytes, bytes]) -> bool:
    """Whether the time in a request is signed with its key."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        public = load_pem_public_key(key)
        if not isinstance(public, ec.EllipticCurvePublicKey):
            return False
        public.verify(b64decode(given[_SIGNATURE], validate=True), given[_TIME], ec.ECDSA(hashes.SHA256()))
        return datetime.fromisoformat(given[_TIME].decode("ascii")).tzinfo is not None
    except (KeyError, ValueError, InvalidSignature, UnsupportedAlgorithm):
        return False


def _seconds_ahead(told: bytes, now: float) -> float:
    return (datetime.fromisoformat(told.decode("ascii")) - datetime.fromtimestamp(now, UTC)).total_seconds()
