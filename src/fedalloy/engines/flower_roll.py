"""Who is who: which node speaks for which client.

A node is known by the key with which it authenticates itself (without authentication, by its number). A server of
fedalloy's has a *seat* for every registered node, and a client is the node in its seat, whoever else claims to be it.

On servers without seats (other people's, or without authentication) a client is bound on first contact: the first node
that claims to be it is it from then on; a second one is refused, whether the first is connected or not. Only the
operator undoes such a binding, by removing it from the file that keeps them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedalloy.core.errors import nearest

if TYPE_CHECKING:
    from flwr.serverapp import Grid


@dataclass(frozen=True)
class Seat:
    """The place of a registered node: its name, and who it is for good; empty while its key is taken out."""

    name: str
    identity: str


@dataclass(frozen=True)
class Node:
    """A connected node: its number in this federation, who it is for good, and since when it is connected."""

    number: int
    identity: str
    since: str = ""


def connected(grid: Grid) -> list[Node]:
    """The nodes that can be reached now, by number."""
    nodes = [Node(info.node_id, _identity(info), str(info.last_activated_at)) for info in grid.get_nodes()]
    return sorted(nodes, key=lambda node: node.number)


def _identity(info: Any) -> str:
    key = bytes(info.public_key)
    return identity_of(key) if key else f"node {info.node_id}"


def identity_of(key: bytes) -> str:
    """Who a node with a public key is.

    >>> identity_of(b"a key")
    'key 8fa3aab2faa9b79e0a0398da5b5abd07'
    """
    return f"key {hashlib.sha256(key).hexdigest()[:32]}"


def seated(names: Sequence[str], seats: Sequence[Seat]) -> dict[str, str]:
    """Who is which client: a node whose name is that of a client, else the node whose seat has the client's number.

    >>> seated(("0", "1", "2"), (Seat("north", "key a"), Seat("south", ""), Seat("west", "key c")))
    {'0': 'key a', '2': 'key c'}
    >>> seated(("north", "east"), (Seat("west", "key c"), Seat("south", "key b"), Seat("north", "key a")))
    {'east': 'key b', 'north': 'key a'}
    """
    by_name = {seat.name: seat.identity for seat in seats if seat.name in names}
    by_number = {
        name: seat.identity for name, seat in zip(names, seats, strict=False) if not {name, seat.name} & by_name.keys()
    }
    return {name: one for name, one in (by_number | by_name).items() if one}


@dataclass
class Roll:
    """The clients by name and the nodes bound to them; ``keep`` is told of every change. With ``seats`` nobody is
    bound: who is who is looked up there before every exchange, so that it may change while a run goes on."""

    names: tuple[str, ...]
    bound: dict[str, str] = field(default_factory=dict)
    keep: Callable[[Mapping[str, str]], None] = lambda bound: None
    refused: dict[Node, str] = field(default_factory=dict)
    seats: Callable[[], Sequence[Seat]] | None = None

    def refresh(self) -> None:
        """Look at the seats as they are now."""
        if self.seats is not None:
            self.bound = seated(self.names, self.seats())

    def client_of(self, node: Node) -> str | None:
        """The client that a node is known to be."""
        return next((client for client, identity in self.bound.items() if identity == node.identity), None)

    def strangers(self, nodes: list[Node]) -> list[Node]:
        """Connected nodes that nobody has asked yet; one that was refused is asked again when it has reconnected."""
        return [node for node in nodes if self.client_of(node) is None and node not in self.refused]

    def claim(self, node: Node, client: str) -> str | None:
        """Bind a node to the client it claims to be, or say why not."""
        reason = self._objection(node, client)
        if reason:
            self.refuse(node, reason)
            return reason
        self.bound[client] = node.identity
        self.keep(self.bound)
        return None

    def refuse(self, node: Node, reason: str) -> None:
        """Remember why a node takes no part."""
        self.refused[node] = reason

    def present(self, nodes: list[Node]) -> dict[int, Node]:
        """The connected nodes by the number of their client."""
        known = {self.client_of(node): node for node in nodes}
        return {number: known[name] for number, name in enumerate(self.names) if name in known}

    def _objection(self, node: Node, client: str) -> str | None:
        if client not in self.names:
            return f"it says it is '{client:.80}', which is no client of this run; {nearest(client, self.names)}"
        advice = "remove the old binding from the bindings file"
        if self.seats is not None:
            advice = "put its public key in the place of the other one's into the server's nodes/ and run 'admit'"
            if client not in self.bound:
                return (
                    f"it says it is '{client}', but no key that is let in has this seat; see 'clients' in server.toml"
                )
        if self.bound.get(client, node.identity) != node.identity:
            return (
                f"it says it is '{client}', but that is the node with {self.bound[client]}; if this node has replaced "
                f"it, {advice}"
            )
        return None
