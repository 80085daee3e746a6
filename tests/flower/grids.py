"""A grid without a network: nodes are functions, and messages are answered when they are pulled."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from flwr import serverapp
from flwr.app import Error, Message, RecordDict

Handler = Callable[[Message], RecordDict | Error | None]


@dataclass
class Grid(serverapp.Grid):
    """``nodes`` maps a node id to what it does; None stands for silence."""

    nodes: dict[int, Handler]
    names: dict[int, str] = field(default_factory=dict)
    waiting: dict[str, Message] = field(default_factory=dict)
    asked: list[list[int]] = field(default_factory=list)

    def get_nodes(self) -> Any:
        return [
            SimpleNamespace(node_id=node, name=self.names.get(node, ""), public_key=b"", last_activated_at="")
            for node in self.nodes
        ]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        messages = list(messages)
        self.asked.append([message.metadata.dst_node_id for message in messages])
        for message in messages:
            message.metadata.__dict__["_message_id"] = uuid.uuid4().hex
            self.waiting[message.metadata.message_id] = message
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for message in [self.waiting.pop(one) for one in list(message_ids) if one in self.waiting]:
            said: Any = self.nodes[message.metadata.dst_node_id](message)
            if said is not None:
                replies.append(Message(said, reply_to=message))
        return replies

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        raise NotImplementedError

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))
