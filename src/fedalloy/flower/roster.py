"""Which Flower node is which client: rules count clients from 0, Flower's node ids are large random numbers.

On a server of fedalloy's a node has the number of its seat, by its registered name and key. Elsewhere nobody has said
who is who: new nodes get the free places, by name and then by id, and keep them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from flwr.serverapp import Grid

from fedalloy.core.errors import AlgorithmError
from fedalloy.engines.flower_roll import Seat, identity_of

_TELL_EVERY = 10.0
"""Seconds between two lines that say what is being waited for."""


class Node(Protocol):
    """What Flower tells about a node; the name is the one it was registered with, often empty."""

    node_id: int
    name: str
    public_key: bytes


@dataclass
class Roster:
    """Clients by node id, for as long as a run lives. A node that restarts with the same key keeps its id."""

    population: int
    clients: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    @staticmethod
    def of(population: int | None, nodes: list[Node], seats: Sequence[Seat] | None) -> Roster:
        """A roster for so many clients; else for all who are there now, up to the last of their seats."""
        last = max((number for number in _seated(nodes, seats or ()).values()), default=-1)
        return Roster(population or max(len(nodes), last + 1))

    def admit(self, nodes: list[Node], seats: Sequence[Seat] | None = None) -> list[Node]:
        """Give nodes their seats, or without seats the free places; returns those for whom there is no place."""
        return self._place(nodes) if seats is None else self._seat(nodes, seats)

    def _seat(self, nodes: list[Node], seats: Sequence[Seat]) -> list[Node]:
        found = {node: client for node, client in _seated(nodes, seats).items() if client < self.population}
        kept = {node: client for node, client in self.clients.items() if client not in found.values()}
        self.clients = {**kept, **found}
        self.names |= {node.node_id: node.name for node in nodes}
        return [node for node in nodes if node.node_id not in found]

    def _place(self, nodes: list[Node]) -> list[Node]:
        left = []
        for node in sorted(nodes, key=lambda one: (one.name, one.node_id)):
            if node.node_id not in self.clients:
                if len(self.clients) >= self.population:
                    left.append(node)
                    continue
                self.clients[node.node_id] = len(self.clients)
            self.names[node.node_id] = node.name
        return left

    def present(self, nodes: list[Node]) -> dict[int, int]:
        """Node ids of those who are there, by client."""
        online = {node.node_id for node in nodes}
        found = {client: node for node, client in self.clients.items() if node in online}
        return dict(sorted(found.items()))

    def describe(self, client: int) -> str:
        """A client as people know it.

        >>> Roster(2, {71: 0, 5: 1}, {71: "hospital-a", 5: ""}).describe(0)
        "client 0 (node 71, 'hospital-a')"
        """
        node = next((node for node, one in self.clients.items() if one == client), None)
        name = self.names.get(node, "") if node is not None else ""
        return f"client {client} (node {node}{f', {name!r}' if name else ''})"

    def to_json(self) -> dict[str, int]:
        """What a checkpoint holds."""
        return {str(node): client for node, client in self.clients.items()}

    @staticmethod
    def from_json(population: int, kept: Mapping[str, int]) -> Roster:
        """The roster of a checkpoint."""
        return Roster(population, {int(node): client for node, client in kept.items()})


def _seated(nodes: list[Node], seats: Sequence[Seat]) -> dict[int, int]:
    """The numbers of the seats of nodes, by node id."""
    numbers = {seat.identity: number for number, seat in enumerate(seats) if seat.identity}
    known = {node.node_id: identity_of(bytes(node.public_key)) for node in nodes} if numbers else {}
    return {node: numbers[who] for node, who in known.items() if who in numbers}


def wait_for_nodes(grid: Grid, least: int, limit: float, poll: float, tell: Callable[[str], None]) -> list[Node]:
    """The nodes that are there, as soon as there are enough; says what it waits for, and never waits for ever."""
    begun, told = time.monotonic(), 0.0
    while True:
        nodes: list[Node] = list(grid.get_nodes())
        spent = time.monotonic() - begun
        if len(nodes) >= least:
            return nodes
        if spent > limit:
            raise AlgorithmError(
                f"only {len(nodes)} of {least} nodes were there after {limit:g} s: start the missing SuperNodes, lower "
                "'min_available_nodes', or raise 'wait'"
            )
        if spent >= told:
            tell(f"waiting for nodes: {len(nodes)} of {least} are here, {limit - spent:.0f} s left")
            told = spent + _TELL_EVERY
        time.sleep(poll)
