"""``fedalloy flower dry-run``: rounds of a study on one node's own data, without a network.

The server's part, the node's part and the messages between them are those of a federation; only the transport is a
function call, and the other sites are absent. What the node keeps goes to a temporary folder, so that the real
federation finds no trace of it.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from fedalloy.core.errors import SpecError
from fedalloy.experiment.recipe import Recipe, parse
from fedalloy.experiment.records import toml
from fedalloy.experiment.records.reading import read_run
from fedalloy.flower.config import NodeConfig, ServerConfig
from fedalloy.flower.node.answer import respond
from fedalloy.flower.node.approval import Approvals
from fedalloy.flower.node.checking import client_number
from fedalloy.flower.node.data import local_task, remembering
from fedalloy.flower.protocol.header import LeavesLost, Malformed, Refused
from fedalloy.flower.protocol.replies import read_reply
from fedalloy.flower.protocol.tensor_messages import TensorMessage, pack
from fedalloy.flower.remote_task import remote_task
from fedalloy.flower.server import run_federation
from fedalloy.flower.submission import with_engine
from fedalloy.flower.transport import Answer, Take, Transport, every

_NODE = 1
Say = Callable[[str], None]


@dataclass(frozen=True)
class DryRound:
    """One round: the training loss before it, the bytes received and sent, the seconds at the node, and the scores."""

    round: int
    loss: float | None
    received: int
    sent: int
    seconds: float
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass
class InProcess:
    """A transport to one node in this process."""

    config: NodeConfig
    seconds: list[float] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = lambda seconds: None
    grid: Any = field(default_factory=lambda: _Alone())
    _make_task: Any = field(default_factory=lambda: remembering(local_task))

    def ask(
        self, messages: Mapping[int, TensorMessage], message_type: str, group: str, seconds: float,
        enough: int | None = None, take: Take = every,
    ) -> dict[int, Answer]:  # fmt: skip
        """The answers of the node."""
        begun = self.clock()
        answers = {
            node: Answer(respond(pack(message), self.config.to_keys(), self._make_task))
            for node, message in messages.items()
        }
        if message_type == "train":
            self.seconds.append(self.clock() - begun)
            _check(answers)
        for node, answer in answers.items():
            take(node, answer)
        return answers


class _Alone:
    """A federation with one node."""

    def get_nodes(self) -> list[Any]:
        """The node."""
        return [SimpleNamespace(node_id=_NODE, public_key=b"dry run", last_activated_at="", name="")]


def _check(answers: Mapping[int, Answer]) -> None:
    """End a dry run at the first answer that a server could not use: nobody else could contribute."""
    for answer in answers.values():
        assert answer.content is not None
        try:
            read_reply(answer.content)
        except LeavesLost:
            pass  # it is asked again, with them
        except (Malformed, Refused) as error:
            raise SpecError(f"this node cannot take part: it {error}") from None


def dry_run(config: NodeConfig, recipe: Recipe, rounds: int = 2, say: Say = lambda text: None) -> list[DryRound]:
    """Train some rounds on the node's own data; a refusal of the node's policy is an error with its reason."""
    if rounds < 1:
        raise SpecError(f"a dry run of {rounds} rounds trains nothing; use 1 or more")
    with tempfile.TemporaryDirectory(prefix="fedalloy-dry-run-") as name:
        place = Path(name)
        transport = InProcess(_aside(config, place / "store"))
        wanted = alone(recipe, config.client, rounds)
        (place / "recipe.toml").write_text(toml.dumps(wanted.model_dump(exclude_none=True)), encoding="utf-8")
        server = ServerConfig(place / "recipe.toml", place / "run")
        run_federation(server, cast(Any, transport.grid), say=say, transport=cast(Transport, transport))
        rows = list(read_run(place / "run").rounds())
        return [_round(row, seconds) for row, seconds in zip(rows, transport.seconds, strict=False)]


def alone(recipe: Recipe, client: str, rounds: int) -> Recipe:
    """The study when no other site is there: every round asks everybody, and has this node's answer alone."""
    told = with_engine(recipe).model_dump(exclude_none=True, exclude={"compare", "grid"})
    told["run"] |= {"rounds": rounds, "seeds": told["run"]["seeds"][:1]}
    told["engine"] |= {"minimum": 1, "wait": 1.0, "fraction": 1.0}
    told["evaluate"] = {name: value for name, value in told.get("evaluate", {}).items() if name != "clients"}
    made = parse({**told, "sampling": {}, "evaluate": told["evaluate"] | {"every": rounds}})
    client_number(client, remote_task(made).names)  # refused here, before anything is read
    return made


def _aside(config: NodeConfig, store: Path) -> NodeConfig:
    """The node with an empty store; what its operator has approved stays approved, for any number of rounds: nothing is
    sent."""
    store.mkdir()
    approvals = Approvals(config.store)
    kept = {study: {term: value for term, value in about.items() if term != "rounds"}
            for study, about in approvals.read().items()}  # fmt: skip
    if kept:
        (store / approvals.file.name).write_text(json.dumps(kept), encoding="utf-8")
    return replace(config, store=store)


def _round(row: Mapping[str, Any], seconds: float) -> DryRound:
    scores = {name: one["mean"] for name, one in (row.get("evaluation") or {}).items() if isinstance(one, dict)}
    return DryRound(row["round"], row["train_loss"], row["bytes_down"], row["bytes_up"], seconds, scores)
