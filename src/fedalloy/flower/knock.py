"""A node asks until the server lets it in, and says in one line why it does not.

Flower's node ends when its server refuses it, with the same message for a key that nobody registered and for the minute
in which the server takes a killed predecessor for connected. So before Flower's program runs, this asks in its place.
The number of the node at the server is kept on disk: with it, a node can sign its killed predecessor off, and be let in
at once. A server of fedalloy gives the reason of a refusal in a header (:mod:`fedalloy.flower.contacts`).
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import fedalloy
from fedalloy.core.errors import SpecError
from fedalloy.experiment.records import atomic
from fedalloy.flower.contacts import AHEAD, BEHIND, CLOCK, ONLINE, REASON, UNKNOWN, VERSION
from fedalloy.flower.proxies import reaching_this_machine

OPTION = "--knock"
"""Our own option before those of Flower: the file for the node's number. Without it a node asks once."""
_WAITS = (2.0, 10.0)
"""Seconds between two requests: at first, and at most."""
_SLOWER = 1.5
_REPEAT = 600.0
"""Seconds after which the same reason is given again."""
_HEARTBEAT = 30
Say = Callable[[str], None]


class Fleet(Protocol):
    """The requests of a node to its server. Both raise Flower's HTTP errors."""

    def activate(self) -> str:
        """Count this node as connected; its number."""
        ...

    def deactivate(self, number: str) -> None:
        """Count this node as not connected."""
        ...


@dataclass(frozen=True)
class Refusal:
    """Why a node was not let in: the HTTP status, the server's own reason where it gave one, and how far this clock is
    ahead of the server's, in seconds; or the ``trouble`` with the connection."""

    status: int = 0
    reason: str = ""
    ahead: float = 0.0
    trouble: str = ""
    told: str = ""

    def __str__(self) -> str:
        if self.trouble:
            return f"the server cannot be reached: {self.trouble}"
        if self.clock_is_wrong:
            side = "ahead of" if self.ahead > 0 else "behind"
            return (
                f"this machine's clock is {abs(self.ahead):.0f} s {side} the server's, which accepts {AHEAD:.0f} s "
                f"ahead and {BEHIND:.0f} s behind; synchronise both clocks (NTP)"
            )
        if self.status in (502, 503, 504):
            return "the server's front answers, but its SuperLink does not; it may be starting"
        if self.status == 404:
            return "the address answers, but is not the server of a federation; check 'server' in node.toml"
        return self._about_the_key()

    def _about_the_key(self) -> str:
        known = {
            UNKNOWN: "the server does not know this node's key; send node.key.pub to the coordinator, who admits it",
            ONLINE: "the server still counts an earlier process of this node as connected; this ends within 60 s",
        }
        if self.reason in known:
            return known[self.reason]
        if self.status == 412:
            return f"{known[UNKNOWN]} (or it still counts an earlier process of this node as connected, up to 60 s)"
        if self.status == 401:
            return "the server does not accept this node's signature; check that node.key is the key it has admitted"
        return f"the server answers {self.status} {self.told}".strip()

    @property
    def clock_is_wrong(self) -> bool:
        """Whether the clocks differ by more than Flower allows."""
        return self.status == 401 and (self.reason == CLOCK or (not self.reason and not -BEHIND < self.ahead < AHEAD))


@dataclass
class Knock:
    """Asks a server until it lets the node in; ``kept`` is the file with the node's number."""

    fleet: Fleet
    kept: Path
    say: Say
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _said: dict[str, float] = field(default_factory=dict)

    def wait(self) -> None:
        """Return when the server lets the node in. The node is then signed off, ready for Flower to sign it on."""
        pause = _WAITS[0]
        while (refusal := self.ask()) is not None:
            self._explain(str(refusal), pause)
            self.sleep(pause)
            pause = min(_WAITS[1], pause * _SLOWER)

    def ask(self) -> Refusal | None:
        """Why the node is not let in; None if it is."""
        import httpx

        try:
            number = self._number()
            if not number or not self._signed_off(number):
                number = self.fleet.activate()
                self.fleet.deactivate(number)
            self._keep(number)
            return None
        except httpx.HTTPStatusError as error:
            return _refusal(error.response)
        except httpx.HTTPError as error:
            return Refusal(trouble=_plain(error))

    def _keep(self, number: str) -> None:
        """Keep the number; a full disk is no reason to stay out."""
        try:
            keep_number(self.kept, number)
        except OSError as error:
            why = error.strerror or str(error)
            self.say(f"{self.kept} cannot be written ({why}): if the node is killed, it may be let in a minute later")

    def _signed_off(self, number: str) -> bool:
        """Sign off a predecessor that was killed; false if the server knows no node of this key and number."""
        import httpx

        try:
            self.fleet.deactivate(number)
        except httpx.HTTPStatusError as error:
            refusal = _refusal(error.response)
            if refusal.status == 401 and not refusal.clock_is_wrong:
                return False  # the key has another number by now, or none
            if refusal.status != 412:  # 412: it was not connected
                raise
        return True

    def _number(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads(self.kept.read_text(encoding="utf-8"))["number"])
        return ""

    def _explain(self, why: str, pause: float) -> None:
        """Give a reason once, and again after a while."""
        now = self.clock()
        if now - self._said.get(why, -_REPEAT) >= _REPEAT:
            self._said = {why: now}
            self.say(f"not let in yet: {why}; asking again every {pause:.0f} to {_WAITS[1]:.0f} s")


def keep_number(file: Path, number: str) -> None:
    """Keep the number of a node at its server."""
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(file, json.dumps({"number": number}) + "\n")


@dataclass
class HttpFleet:
    """The requests of a node, made with Flower's own client."""

    client: Any
    public_key: bytes

    def activate(self) -> str:
        """Count this node as connected; its number."""
        from flwr.proto.fleet_pb2 import ActivateNodeRequest

        request = ActivateNodeRequest(public_key=self.public_key, heartbeat_interval=_HEARTBEAT)
        return str(self.client.ActivateNode(request).node_id)

    def deactivate(self, number: str) -> None:
        """Count this node as not connected."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest

        self.client.DeactivateNode(DeactivateNodeRequest(node_id=int(number)))


class TellsVersion:
    """Adds this node's version of fedalloy to its requests, for the server's list of contacts."""

    def intercept(self, context: Any, call_next: Callable[[Any], Any]) -> Any:
        """Add the header, and send the request."""
        context.request.headers[VERSION] = fedalloy.__version__
        return call_next(context)


@contextlib.contextmanager
def connected(server: str, authority: Path, key: Path) -> Iterator[HttpFleet]:
    """A node's connection to its server, authenticated by its key."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    try:
        private: Any = load_ssh_private_key(key.read_bytes(), password=None)
        public, signing = private.public_key(), RuntimeVersionHttpInterceptor(component_name="SuperNode")
        node = NodeAuthHttpInterceptor(private, public)
        headers: list[Any] = [signing, node, TellsVersion()]
        with reaching_this_machine():
            client = FleetHttpClient.from_server_address(server, False, authority.read_bytes(), headers)
    except (OSError, ValueError) as error:
        raise SpecError(f"{key} or {authority} cannot be used: {error}") from None
    with client:
        yield HttpFleet(client, public_key_to_bytes(public))


def take_option(arguments: list[str]) -> tuple[list[str], Path | None]:
    """The arguments for Flower, and the file for the node's number.

    >>> take_option(["flower-supernode", "--knock", "node.json", "--port", "1"])
    (['flower-supernode', '--port', '1'], PosixPath('node.json'))
    """
    if OPTION not in arguments:
        return arguments, None
    place = arguments.index(OPTION)
    return [*arguments[:place], *arguments[place + 2 :]], Path(arguments[place + 1])


def wait_until_let_in(arguments: Sequence[str], kept: Path) -> None:
    """Return when the server in the arguments of Flower's node lets it in; without encryption there are no keys."""
    given = dict(pairwise(arguments))
    if "--insecure" in arguments:
        return
    key, authority = Path(given["--auth-supernode-private-key"]), Path(given["--root-certificates"])
    with connected(given["--superlink"], authority, key) as fleet:
        Knock(fleet, kept, lambda text: print(text, flush=True)).wait()


def _refusal(response: Any) -> Refusal:
    """What an answer says: the reason that a front gives, or else the server's time to the second."""
    reason, _, rest = str(response.headers.get(REASON, "")).partition(" ")
    ahead = 0.0
    with contextlib.suppress(KeyError, ValueError, TypeError):
        ahead = (datetime.now(UTC) - parsedate_to_datetime(response.headers["date"])).total_seconds()
        ahead = float(rest) if reason == CLOCK else ahead
    return Refusal(response.status_code, reason, ahead, told=" ".join(str(response.text).split())[:200])


def _plain(error: Exception) -> str:
    """An error of the connection in words."""
    text = str(error) or type(error).__name__
    if "certificate" in text.lower():
        return (
            f"its certificate is not accepted ({text}); ca.crt must be that of the federation, and the address in "
            "'server' one that the certificate names"
        )
    return text
