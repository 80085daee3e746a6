"""A run's connection with its nodes: orders go to the clients' nodes, checked answers come back.

A new node is first asked for its identity, and gets no information about the run before that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedalloy.core.types import Payload
from fedalloy.flower.node_registry import Node, NodeRegistry, connected
from fedalloy.flower.protocol.header import LeavesLost, Malformed, Refused, Unwell, signed
from fedalloy.flower.protocol.replies import Reply, read_reply
from fedalloy.flower.protocol.tensor_messages import TensorMessage, sizes
from fedalloy.flower.transport import Answer, Take, Transport, every, of_a_live_run

_HELLO = 30.0
"""Seconds that a round waits for a new node to say who it is, if there are others to continue with."""
_AGAIN = 300.0
"""Seconds until one that did not say it is asked again: it hangs, or another study keeps it busy."""


@dataclass
class Connection:
    """The transport, the registry of nodes, the common header of orders, and the number of bytes ``sent``.

    A node has ``deadline`` seconds to answer; answers above ``max_bytes`` are not read.
    """

    transport: Transport
    registry: NodeRegistry
    header: Mapping[str, Any]
    say: Callable[[str], None] = print
    deadline: float = 600.0
    max_bytes: float = math.inf
    serial: int = 0
    sent: int = 0
    _silent: dict[Node, float] = field(default_factory=dict)

    def ask(
        self, orders: Mapping[int, TensorMessage], message_type: str, group: str, problems: dict[int, str],
        full: Payload | None = None, enough: int | None = None, take: Take = every,
    ) -> dict[int, Answer]:  # fmt: skip
        """The answers of the clients whose nodes gave one, or of the first that are ``enough``; all others are in
        ``problems``. A node that has lost its client's local leaves is sent the ``full`` parts and asked again.
        ``take`` gets every client's answer when it arrives, may empty it, and says whether it is one of ``enough``."""
        answers = self._ask(orders, message_type, group, problems, enough, take)
        lost = [client for client, answer in answers.items() if full is not None and self._lost_leaves(answer)]
        if full is None or not lost:
            return answers
        again = {client: TensorMessage(orders[client].header, full) for client in lost}
        kept = {client: answer for client, answer in answers.items() if client not in again}
        return kept | self._ask(again, message_type, group, problems, take=take)

    def opened(self, answer: Answer, full: bool = False) -> Reply:
        """A positive answer; its tensors are read only in ``full``."""
        assert answer.content is not None
        return read_reply(answer.content, self.max_bytes, full=full)

    def _ask(
        self, orders: Mapping[int, TensorMessage], message_type: str, group: str, problems: dict[int, str],
        enough: int | None = None, take: Take = every,
    ) -> dict[int, Answer]:  # fmt: skip
        there = self._present()
        problems |= {client: self.registry.absence(client) for client in orders if client not in there}
        clients = {there[client].number: client for client in orders if client in there}
        messages = {node: self._addressed(client, orders[client]) for node, client in clients.items()}
        self.sent += sum(sum(sizes(message.parts).values()) for message in messages.values())
        if not messages:
            return {}
        arrived: Take = lambda node, answer: take(clients[node], answer)  # noqa: E731
        found = self.transport.ask(messages, message_type, group, self.deadline, enough, arrived)
        problems |= {clients[node]: answer.problem for node, answer in found.items() if answer.content is None}
        return {clients[node]: answer for node, answer in found.items() if answer.content is not None}

    def _addressed(self, client: int, order: TensorMessage) -> TensorMessage:
        """An order with its complete header."""
        self.serial += 1
        who = {"serial": self.serial, "client": self.registry.names[client], "id": client}
        return TensorMessage({**self.header, **who, **order.header}, order.parts)

    def _lost_leaves(self, answer: Answer) -> bool:
        try:
            self.opened(answer)
        except LeavesLost:
            return True
        except (Malformed, Refused):
            return False
        return False

    def _present(self) -> dict[int, Node]:
        """The nodes of the reachable clients; new nodes are asked for their identity."""
        self.registry.refresh()
        with of_a_live_run():
            nodes = connected(self.transport.grid)
        alone = not self.registry.present(nodes)
        strangers = {node.number: node for node in self.registry.strangers(nodes) if alone or self._is_due(node)}
        messages = dict.fromkeys(strangers, TensorMessage(signed(kind="hello")))
        seconds = self.deadline if alone else min(self.deadline, _HELLO)
        answers = self.transport.ask(messages, "query", "hello", seconds) if messages else {}
        for number, answer in answers.items():
            self._introduce(strangers[number], answer)
        return self.registry.present(nodes)

    def _is_due(self, node: Node) -> bool:
        """Whether a new node is asked who it is: not one that lately did not say it."""
        return self.transport.clock() >= self._silent.get(node, -math.inf)

    def _introduce(self, node: Node, answer: Answer) -> None:
        """Bind a node to the client it claims to be. One that gave no answer is asked again later."""
        if answer.content is None:
            self._silent[node] = self.transport.clock() + _AGAIN
            self.say(f"{node} did not say who it is: {answer.problem}")
            return
        try:
            client = self.opened(answer).head.client
            reason = self.registry.claim(node, client)
        except Unwell as error:
            self.say(f"{node} did not say who it is: {error}")
            return
        except (Malformed, Refused) as error:
            reason = str(error)
            self.registry.refuse(node, reason)
        self.say(f"{node} " + (f"is refused: {reason}" if reason else f"is client {client}"))
