"""Who is who: which node speaks for which client, bound on first contact.

A node is known by the key with which it authenticates itself (without authentication, by its number). The first
node that claims to be a client is that client from then on; a second one is refused, whether the first is connected or
not. Only the operator undoes a binding, by removing it from the file that keeps them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fedalloy.core.errors import nearest

if TYPE_CHECKING:
    from flwr.serverapp import Grid


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
    return f"key {hashlib.sha256(key).hexdigest()[:32]}" if key else f"node {info.node_id}"


@dataclass
class Roll:
    """The clients by name and the nodes bound to them; ``keep`` is told of every change."""

    names: tuple[str, ...]
    bound: dict[str, str] = field(default_factory=dict)
    keep: Callable[[Mapping[str, str]], None] = lambda bound: None
    refused: dict[Node, str] = field(default_factory=dict)

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
        if self.bound.get(client, node.identity) != node.identity:
            return (
                f"it says it is '{client}', but that is the node with {self.bound[client]}; if this node has replaced "
                "it, remove the old binding from the bindings file"
            )
        return None
