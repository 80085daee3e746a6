"""A federation in one process: a Grid whose nodes are function calls, with nodes that misbehave when told to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flwr.app import Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedalloy.experiment.records import toml
from fedalloy.flower.config import NodeConfig, ServerConfig
from fedalloy.flower.node.answer import respond
from fedalloy.flower.node.data import local_task, remembering
from fedalloy.flower.server import run_federation
from fedalloy.flower.transport import Transport

# Flower lets only the process of an app make messages: let this one be such a process.
TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1

# In one process there is no need to make the same data for every order.
_make_task = remembering(local_task, most=100)


@dataclass
class FakeNode:
    """One node: its key, its configuration, and what is wrong with it."""

    key: str
    config: dict[str, Any]
    online: bool = True
    answers: bool = True
    since: str = ""
    tamper: Callable[[RecordDict], RecordDict | Error] = lambda content: content
    seen: list[str] = field(default_factory=list)


@dataclass
class FakeGrid:
    """What the engine needs of a Grid."""

    nodes: dict[int, FakeNode]
    waiting: dict[str, Message] = field(default_factory=dict)
    count: int = 0

    def get_nodes(self) -> list[Any]:
        return [
            SimpleNamespace(node_id=number, public_key=one.key.encode(), last_activated_at=one.since, name="")
            for number, one in self.nodes.items()
            if one.online
        ]

    def get_node_ids(self) -> list[int]:
        return [one.node_id for one in self.get_nodes()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            self.count += 1
            message.metadata.__dict__["_message_id"] = f"message-{self.count}"
            self.waiting[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = [self._reply(self.waiting[one]) for one in message_ids if one in self.waiting]
        return [reply for reply in replies if reply is not None]

    def _reply(self, message: Message) -> Message | None:
        one = self.nodes[message.metadata.dst_node_id]
        if not one.answers or not one.online:
            return None
        one.seen.append(message.metadata.message_type)
        content = one.tamper(respond(message.content, one.config, _make_task))
        del self.waiting[message.metadata.message_id]
        if isinstance(content, Error):
            return Message(content, reply_to=message)
        return Message(content, reply_to=message)


@dataclass
class FakeClock:
    """Time that passes only when somebody sleeps."""

    now: float = 0.0
    on_sleep: Callable[[float], None] = lambda now: None

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += max(seconds, 0.01)
        self.on_sleep(self.now)


def federation(place: Path, clients: Iterable[str] = ("0", "1", "2"), **config: Any) -> FakeGrid:
    """Nodes that take their share of the recipe's own data."""
    nodes = {}
    for number, client in enumerate(clients):
        keys = NodeConfig(client, "recipe", place / f"node-{number}").to_keys() | config
        nodes[100 + number] = FakeNode(f"key of {number}", keys)
    return FakeGrid(nodes)


def recipe_file(place: Path, algorithm: str = "fedavg", /, **tables: dict[str, Any]) -> Path:
    """A small recipe: three clients with unequal shares of the digits, two local steps or so."""
    recipe: dict[str, Any] = {
        "task": {"dataset": "digits", "model": "logistic", "valid_fraction": 0.1},
        "partition": {"kind": "dirichlet", "alpha": 0.5, "clients": 3},
        "algorithm": {"name": algorithm},
        "run": {"rounds": 3, "seeds": [7]},
        "evaluate": {"every": 3},
        "engine": {"kind": "flower", "deadline": 60.0, "minimum": 3, "wait": 300.0},
    }
    for name, table in tables.items():
        recipe[name] = {**recipe.get(name, {}), **table}
    file = place / f"{algorithm}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(toml.dumps(recipe))
    return file


def play(
    recipe: Path, folder: Path, grid: FakeGrid, clock: FakeClock | None = None, say: Any = lambda text: None,
    seats: Any = None,
):  # fmt: skip
    """Run a recipe over a fake federation."""
    clock = clock or FakeClock()
    transport = Transport(grid, clock, clock.sleep)  # type: ignore[arg-type]
    return run_federation(ServerConfig(recipe, folder), grid, say=say, transport=transport, seats=seats)  # type: ignore[arg-type]
