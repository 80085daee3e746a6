"""The registry of nodes: which node is which client.

A node is identified by the key with which it authenticates (without authentication, by its number). A fedalloy server
has a *seat* for every registered node, and a client is the node in its seat, no matter which other node claims to be
it.

On servers without seats (not fedalloy's, or without authentication) a client is bound on first contact: to the first
node that claims to be it; a second one is refused, whether the first is connected or not. Only the operator can undo
such a binding, by removing it from the bindings file.

Clients of apps that are not fedalloy's have numbers instead of names: that of the node's seat or, without seats, the
free numbers in the order of the nodes' names, then in the order in which they were registered. Flower's simulation
registers new nodes for every run, in the order of their partitions: there a node is identified by that order.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedalloy.core.errors import AlgorithmError, nearest

if TYPE_CHECKING:
    from flwr.serverapp import Grid

_NUMBERED, _SIMULATED = "node ", "simulated "
_SIMULATION = "InMemoryGrid"
"""The class of the grid in Flower's simulation; a private name, which its own run is the test of."""
_TELL_EVERY = 10.0
"""Seconds between two messages about what is being waited for."""


@dataclass(frozen=True)
class Seat:
    """The seat of a registered node: its name and its permanent identity; the latter is empty while its key is
    removed."""

    name: str
    identity: str


@dataclass(frozen=True)
class Node:
    """A connected node: its number in this federation, its permanent identity, since when it is connected, the name it
    was registered with, which is often empty, and its place among those connected, in the order of registration."""

    number: int
    identity: str
    since: str = ""
    name: str = ""
    place: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"node '{self.name}'" if self.name else f"the node with {self.identity}"


def connected(grid: Grid, *, keyed: bool = True) -> list[Node]:
    """The reachable nodes by number; each is identified by its key, or if not ``keyed`` by its number."""
    found = sorted(grid.get_nodes(), key=lambda info: (str(getattr(info, "registered_at", "")), info.node_id))
    simulated = any(kind.__name__ == _SIMULATION for kind in type(grid).__mro__)
    nodes = [
        Node(
            info.node_id,
            f"{_SIMULATED}{place}" if simulated else _identity(info, keyed),
            str(info.last_activated_at),
            str(info.name),
            place,
        )
        for place, info in enumerate(found)
    ]
    return sorted(nodes, key=lambda node: node.number)


def wait_for_nodes(
    grid: Grid, least: int, limit: float, poll: float, tell: Callable[[str], None], *, keyed: bool
) -> list[Node]:
    """The connected nodes, as soon as there are enough; reports what it waits for, up to a limit."""
    begun, told = time.monotonic(), 0.0
    while len(nodes := connected(grid, keyed=keyed)) < least:
        spent = time.monotonic() - begun
        if spent > limit:
            raise AlgorithmError(
                f"only {len(nodes)} of {least} nodes were connected after {limit:g} s: start the missing SuperNodes, "
                "lower 'min_available_nodes', or raise 'wait'"
            )
        if spent >= told:
            tell(f"waiting for nodes: {len(nodes)} of {least} are connected, {limit - spent:.0f} s left")
            told = spent + _TELL_EVERY
        time.sleep(poll)
    return nodes


def _identity(info: Any, keyed: bool) -> str:
    key = bytes(info.public_key) if keyed else b""
    return identity_of(key) if key else _numbered(info.node_id)


def _numbered(number: int) -> str:
    """The identity of a node by its number. A node that reconnects with its key gets the same number."""
    return f"{_NUMBERED}{number}"


def _remembered(kept: str) -> Node:
    """A node as a checkpoint knows it."""
    return Node(int(kept), _numbered(int(kept))) if kept.isdigit() else Node(0, kept)


def identity_of(key: bytes) -> str:
    """The identity of a node with a public key.

    >>> identity_of(b"a key")
    'key 8fa3aab2faa9b79e0a0398da5b5abd07'
    """
    return f"key {hashlib.sha256(key).hexdigest()[:32]}"


def seated(names: Sequence[str], seats: Sequence[Seat]) -> dict[str, str]:
    """The identity of every client: the node with the client's name, else the node whose seat has the client's number.

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


def site_names(names: Sequence[str], seats: Sequence[Seat]) -> tuple[str, ...]:
    """The operator's names of the clients: that of the node in a client's seat, else the client's own.

    >>> site_names(("0", "1", "2"), (Seat("north", "key a"), Seat("south", "")))
    ('north', 'south', '2')
    >>> site_names(("north", "east"), (Seat("south", "key b"), Seat("north", "key a")))
    ('north', 'east')
    """
    named = {seat.name for seat in seats} & {*names}
    found = [name if {name, seat.name} & named else seat.name for name, seat in zip(names, seats, strict=False)]
    return (*found, *names[len(found) :])


@dataclass
class NodeRegistry:
    """The clients by name, the nodes bound to them, and the node last ``seen`` as each; ``keep`` is called with every
    new binding. With ``seats`` there are no bindings: seats are read before every exchange, so that they may change
    during a run."""

    names: tuple[str, ...]
    bound: dict[str, str] = field(default_factory=dict)
    keep: Callable[[Mapping[str, str]], None] = lambda bound: None
    refused: dict[Node, str] = field(default_factory=dict)
    seats: Callable[[], Sequence[Seat]] | None = None
    seen: dict[int, Node] = field(default_factory=dict)
    sites: tuple[str, ...] = ()

    def refresh(self) -> None:
        """Read the seats again."""
        if self.seats is not None:
            seats = self.seats()
            self.bound, self.sites = seated(self.names, seats), site_names(self.names, seats)

    def title(self, client: int) -> str:
        """The name of a client's site, as its operator calls it; without seats the client's own name."""
        return (self.sites or self.names)[client]

    def client_of(self, node: Node) -> str | None:
        """The client of a node."""
        return next((client for client, identity in self.bound.items() if identity == node.identity), None)

    def strangers(self, nodes: list[Node]) -> list[Node]:
        """Connected nodes that have not been asked yet; a refused one is asked again after it has reconnected."""
        return [node for node in nodes if self.client_of(node) is None and node not in self.refused]

    def claim(self, node: Node, client: str) -> str | None:
        """Bind a node to the client it claims to be, or return why not."""
        reason = self._objection(node, client)
        if reason:
            self.refuse(node, reason)
            return reason
        self.bound[client] = node.identity
        self.keep(self.bound)
        return None

    def refuse(self, node: Node, reason: str) -> None:
        """Store why a node does not take part."""
        self.refused[node] = reason

    def present(self, nodes: list[Node]) -> dict[int, Node]:
        """The connected nodes by the number of their client."""
        known = {self.client_of(node): node for node in nodes}
        there = {number: known[name] for number, name in enumerate(self.names) if name in known}
        self.seen |= there
        return there

    def absence(self, client: int) -> str:
        """Why a client is not present."""
        name = self.title(client)
        if self.names[client] in self.bound:
            return f"the node of '{name}' is not connected"
        return f"no node has connected as '{name}'" if self.seats is None else f"no key is admitted for '{name}'"

    # Clients of apps that are not fedalloy's.

    @staticmethod
    def unnamed(population: int | None, nodes: list[Node], seats: Sequence[Seat] | None) -> NodeRegistry:
        """For ``population`` clients; by default for all connected nodes, up to the last of their seats."""
        taken = {seat.identity: number for number, seat in enumerate(seats or ()) if seat.identity}
        last = max((taken[node.identity] for node in nodes if node.identity in taken), default=-1)
        return NodeRegistry(_numbers(population or max(len(nodes), last + 1)))

    def place(self, nodes: list[Node], seats: Sequence[Seat] | None = None) -> list[Node]:
        """Give nodes the numbers of their seats, or without seats free numbers; returns the nodes without a number."""
        if seats is not None:
            taken = zip(self.names, seats, strict=False)
            self.bound = {name: seat.identity for name, seat in taken if seat.identity}
        else:
            new = sorted(self.strangers(nodes), key=lambda node: (node.name, node.place, node.number))
            free = [name for name in self.names if name not in self.bound]
            self.bound |= {name: node.identity for name, node in zip(free, new, strict=False)}
        return [node for node in nodes if self.client_of(node) is None]

    def describe(self, client: int) -> str:
        """A client with the node that was last seen as it.

        >>> NodeRegistry(("0", "1"), seen={0: Node(71, "node 71", name="hospital-a")}).describe(0)
        "client 0 (node 71, 'hospital-a')"
        """
        node = self.seen.get(client)
        if node is None:
            return f"client {client}"
        return f"client {client} (node {node.number}{f', {node.name!r}' if node.name else ''})"

    def node_names(self) -> list[str]:
        """The clients by the names of the nodes last seen as them; empty if no node has a name.

        >>> NodeRegistry(("0", "1"), seen={0: Node(71, "node 71", name="hospital-a")}).node_names()
        ['hospital-a', '1']
        """
        found = [self.seen[client].name if client in self.seen else "" for client in range(len(self.names))]
        return [own or name for own, name in zip(found, self.names, strict=True)] if any(found) else []

    def to_json(self) -> dict[str, int]:
        """The nodes seen, for a checkpoint: clients by the numbers of their nodes, or their other identities."""
        return {node.identity.removeprefix(_NUMBERED): client for client, node in self.seen.items()}

    @staticmethod
    def from_json(kept: Mapping[str, int], population: int | None = None) -> NodeRegistry:
        """The registry of a checkpoint."""
        names = _numbers(population or max(kept.values(), default=-1) + 1)
        nodes = {client: node for node, client in kept.items() if client < len(names)}
        seen = {client: _remembered(node) for client, node in nodes.items()}
        return NodeRegistry(names, {names[client]: node.identity for client, node in seen.items()}, seen=seen)

    def _objection(self, node: Node, client: str) -> str | None:
        if client not in self.names:
            return f"it says it is '{client:.80}', which is not a client of this run; {nearest(client, self.names)}"
        advice = "remove the old binding from the bindings file"
        if self.seats is not None:
            advice = "replace the other public key by its key in the server's nodes/ and run 'admit'"
            if client not in self.bound:
                return f"it says it is '{client}', but no admitted key has this seat; see 'clients' in server.toml"
        if self.bound.get(client, node.identity) != node.identity:
            return (
                f"it says it is '{client}', but that is the node with {self.bound[client]}; if this node has replaced "
                f"it, {advice}"
            )
        return None


def _numbers(population: int) -> tuple[str, ...]:
    """Names for clients without names: their numbers."""
    return tuple(str(number) for number in range(population))
