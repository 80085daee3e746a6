"""Messages from nodes: one of the answers to a round is mutated, and the server's state must stay valid."""

from __future__ import annotations

import functools
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.fuzz.driving import Way
from benchmarks.fuzz.mutating import Case
from benchmarks.fuzz.states import check_finite, check_length
from benchmarks.fuzz.tensor_messages import HEADER, case_of_message, content_of

LIMIT = 25.0
_HOW = "how"
METHODS = ("fedavg", "median", "krum", "fednova", "scaffold", "aaggff_s", "fedadam")
_PLAYED = 8
CLIENTS = 4
"""One of them is the fuzzer; Krum needs three others."""


@functools.cache
def _stage(method: str) -> dict[str, Any]:
    """A federation before its first round, and what honest nodes answer."""
    from fedalloy import algorithms
    from fedalloy.core.keys import Key
    from fedalloy.experiment.config import RunConfig
    from fedalloy.experiment.round import Federation
    from fedalloy.experiment.starting import begin
    from fedalloy.flower.engine import Flower
    from fedalloy.testing import small_task

    task = small_task("batchnorm", (6, 8, 5, 7))
    algorithm = algorithms.named(method, batch_size=4).bind(task)
    config = RunConfig(rounds=3, engine=Flower(), max_norm=LIMIT)
    fed = Federation(algorithm, task, config.engine, config, Key.of(0))  # type: ignore[arg-type]
    state = begin(fed)
    return {"fed": fed, "state": state, "answers": [_honest(fed, state, client) for client in range(CLIENTS)]}


def _honest(fed: Any, state: Any, client: int) -> Any:
    """The answer of an honest node."""
    from fedalloy.core.blocks import client_keys
    from fedalloy.core.client import Assignment, run_client
    from fedalloy.core.types import Context
    from fedalloy.flower.protocol.header import signed
    from fedalloy.flower.protocol.tensor_messages import TensorMessage, pack

    ids = torch.tensor([client])
    ctx = Context(1, CLIENTS, fed.root.fold("round", 1), fed.algorithm.solver.lr_at(1, 3), 3)
    mine = fed.algorithm.init_client(state["shared"], fed.root, fed.task.objective.init)
    work = Assignment(fed.task.data("train", ids).client(0))
    with torch.no_grad():
        made = run_client(
            fed.algorithm, fed.task.objective, state["shared"], mine, work, client_keys(ctx.key, ids), ctx
        )
    head = signed(client=str(client), status="ok")
    stats = {name: value if value == value else None for name, value in made.stats.items()}
    return pack(TensorMessage({**head, "stats": stats}, made.payload))


@functools.cache
def examples() -> list[Case]:
    """The honest answer of the first client, for rules that use it differently."""
    return [{**case_of_message(_stage(method)["answers"][0]), _HOW: method.encode()} for method in METHODS]


class _Transport:
    """Returns given answers to every message."""

    def __init__(self, answers: list[Any]) -> None:
        self._answers = answers
        self.grid = SimpleNamespace(get_nodes=lambda: [_node(number) for number in range(len(answers))])

    def ask(
        self, tensor_messages: Any, message_type: str, group: str, seconds: float, enough: int | None = None,
        take: Any = lambda node, answer: None,
    ) -> dict[int, Any]:  # fmt: skip
        from fedalloy.flower.transport import Answer

        found = {node: Answer(self._answers[node]) for node in tensor_messages}
        for node, answer in found.items():
            take(node, answer)
        return found

    def clock(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        return None


def _node(number: int) -> Any:
    return SimpleNamespace(node_id=number, public_key=b"", last_activated_at="", name=str(number))


def _is_no_answer(content: Any) -> bool:
    from fedalloy.core.errors import FedalloyError
    from fedalloy.flower.protocol.tensor_messages import outline

    try:
        outline(content)
    except FedalloyError:
        return True
    return False


def read(case: Case, folder: Path) -> str:
    """One round; the answer is used or dropped, and the state stays valid."""
    from fedalloy.experiment.round import Stopwatch, run_round
    from fedalloy.experiment.storing import make_store
    from fedalloy.flower.connection import Connection
    from fedalloy.flower.node_registry import NodeRegistry
    from fedalloy.flower.protocol.header import signed

    content = content_of({name: data for name, data in case.items() if name != _HOW})
    if _is_no_answer(content) and zlib.crc32(case.get(HEADER, b"")) % _PLAYED:
        return "dropped"  # only some of those go through a whole round
    method = case.get(_HOW, b"").decode("latin-1")
    stage = _stage(method if method in METHODS else METHODS[0])
    fed, state = stage["fed"], stage["state"]
    answers = [content, *stage["answers"][1:]]
    names = tuple(map(str, range(CLIENTS)))
    registry = NodeRegistry(names, {name: f"node {name}" for name in names})
    transport: Any = _Transport(answers)
    fed.engine.attach(Connection(transport, registry, signed(), say=lambda text: None))
    played = run_round(fed, state, make_store(fed, state, None), 1, Stopwatch())
    check_finite(played.step.state)
    if method in ("fedavg", "median", "krum", "fednova"):
        check_length(state["shared"]["params"], played.step.state["shared"]["params"], LIMIT)
    return "counted" if 0 in played.row["ids"] else "dropped"


WAY = Way("node-messages", examples, read, 10_000)
