"""The engine of real federations: a client's round is an order to its node, which runs the same ``run_client``.

Nodes keep their data and their states. The server only knows in which round the valid state was made; the node
keeps the states before and after its last round, so that a repeated round starts from the former.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.engine import ModelName
from fedalloy.core.errors import FedalloyError, SpecError
from fedalloy.core.gathering import Gathering
from fedalloy.core.protocols import Engine, Outcome, Shared, Task
from fedalloy.core.registry import register
from fedalloy.core.statistics import STATISTICS
from fedalloy.core.types import Context, Contribution, Contributions, Payload, State, Work
from fedalloy.experiment.recipe import Recipe
from fedalloy.flower.connection import Connection
from fedalloy.flower.payloads import (
    ALWAYS,
    check_sketch,
    counted_here,
    scored,
    told_algorithm,
    trained_on,
    tried,
    unpacked,
)
from fedalloy.flower.protocol.header import Malformed, Refused
from fedalloy.flower.protocol.replies import Reply
from fedalloy.flower.protocol.tensor_messages import TensorMessage, sizes
from fedalloy.flower.remote_task import RemoteTask, remote_task
from fedalloy.flower.transport import Answer
from fedalloy.tasks.objective import ModuleObjective

_BYTES_OF_A_NUMBER = 8


class FederationError(FedalloyError):
    """A federation cannot continue: too few nodes, or nodes that refuse what the algorithm needs."""

    passing = True


@register("engine", "flower")
@dataclass
class Flower(Engine):
    """Runs on the nodes of a Flower federation (``fedalloy flower --help``).

    A node has ``deadline`` seconds to answer. A round ends as soon as the ``fraction`` of its clients has contributed
    (a refusal is none); the others are left out of it, and the evaluation after it does not wait for them (for
    over-selection, ask more clients than are needed: ``cohort`` in ``[sampling]``). It needs ``minimum`` contributions;
    with fewer, the missing clients are asked again for ``wait`` seconds, then the run stops and can be resumed. Answers
    above ``max_megabytes`` are dropped. ``on_lag`` is for a node that does not have the valid state: it continues from
    the newest older one it has (from the initial one if there is none), or its contribution is dropped; both are
    recorded.
    """

    data_at_hand: ClassVar[bool] = False
    trains_here: ClassVar[bool] = False
    clients_keep_states = True
    fixed_options: ClassVar[bool] = False  # how long to wait for nodes may change from session to session
    deadline: float = 600.0
    minimum: int = 1
    fraction: float = 1.0
    wait: float = 3600.0
    max_megabytes: float = 1000.0
    on_lag: Literal["continue", "drop"] = "continue"
    _connection: Connection | None = field(default=None, init=False, repr=False)
    _notes: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)
    _test_sizes: dict[int, int | None] = field(default_factory=dict, init=False, repr=False)
    _late: frozenset[int] = field(default=frozenset(), init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("deadline", "wait", "max_megabytes"):
            if not getattr(self, name) > 0:
                raise SpecError(f"engine 'flower': {name} must be above 0, got {getattr(self, name)}")
        if not 0 < self.fraction <= 1:
            raise SpecError(f"engine 'flower': fraction must be above 0 and at most 1, got {self.fraction}")
        if self.minimum < 1:
            raise SpecError(f"engine 'flower': minimum must be 1 or more contributions, got {self.minimum}")

    @staticmethod
    def task_of(recipe: Recipe) -> RemoteTask:
        """The task of a one-seed recipe, without the data."""
        return remote_task(recipe)

    def attach(self, connection: Connection) -> None:
        """Connect with a federation; without one the engine cannot run."""
        self._connection = replace(connection, deadline=self.deadline, max_bytes=self.max_megabytes * 1e6)

    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        if isinstance(task.objective, ModuleObjective):
            task.objective.hollowed()  # the model as it was built is needed no more
        # Orders share their tensors, which are then packed and sent once.
        parts = {known: trained_on(algorithm, shared, known=known) for known in (False, True)}
        orders = {int(client): self._order(algorithm, states[int(client)], work, ctx, row, parts)
                  for row, client in enumerate(work.ids)}  # fmt: skip
        before = self._connected.sent
        needed = algorithm.needs(shared) - counted_here(algorithm)
        needed |= {"num_sequences"} if task.objective.unit == "targets" else set()
        like = algorithm.templates(shared)
        gathering = Gathering(work, exact=algorithm.exact_norms, like=like, storage=self.storage)
        found: dict[int, State] = {}
        failures: dict[int, str] = {}
        patience = _Patience(self, len(work))

        def take(client: int, answer: Answer) -> bool:
            # An answer is forgotten once it is in its row: at no time are there two copies of all of them.
            try:
                one = self._contribution(client, answer, algorithm, shared, needed)
                if reason := gathering.add_one(client, one):
                    raise Malformed(reason)
                found[client] = {"round": ctx.round}
                failures.pop(client, None)
            except (Malformed, Refused) as error:
                failures[client] = str(error)
                patience.lose(client, error)
            return client in found

        while len(found) < patience.enough:
            failures = {}
            asked = {client: order for client, order in orders.items() if client not in found}
            enough = patience.wanted - len(found) if self.fraction < 1 else None
            self._connected.ask(asked, "train", str(ctx.round), failures, parts[False], enough, take)
            patience.check(found, failures)
        self._late = frozenset(failures) if self.fraction < 1 else frozenset()
        return Outcome(gathering.cohort(), found, failures, self._connected.sent - before)

    def cross_score(self, algorithm: Algorithm, task: Task, shared: Shared, cohort: Contributions) -> Tensor:
        """Send all models to all clients that contributed; NaN where a node does not answer."""
        clients = cohort.ids.tolist()
        head, parts = {"kind": "cross", "algorithm": told_algorithm(algorithm)}, tried(algorithm, shared, cohort)
        orders = {client: TensorMessage(head, parts) for client in clients}
        problems: dict[int, str] = {}
        cross = torch.full((len(clients), len(clients)), torch.nan, dtype=torch.float64)
        for client, answer in self._connected.ask(orders, "evaluate", "cross", problems).items():
            try:
                scores = self._numbers(client, answer, "cross_score", len(clients))
                _check_scores(scores)
                cross[:, clients.index(client)] = scores
            except (Malformed, Refused) as error:
                problems[client] = str(error)
        self._note("unscored", problems)
        return cross

    def scores(
        self,
        algorithm: Algorithm,
        shared: Shared,
        states: Mapping[int, State],
        ids: Tensor,
        metrics: tuple[str, ...],
        models: Sequence[ModelName],
    ) -> list[dict[str, Tensor]]:
        """Clients score on their own test parts; only these numbers are returned."""
        head: dict[str, Any] = {"kind": "evaluate", "algorithm": told_algorithm(algorithm), "metrics": list(metrics)}
        head |= {"models": list(models), "on_lag": "continue"}
        full, rest = (scored(algorithm, shared, models, known=known) for known in (False, True))
        rounds = {client: _round_of(states[client]) for client in ids.tolist()}
        orders = {client: TensorMessage({**head, "state": at}, rest if at else full) for client, at in rounds.items()}
        found = torch.full((len(models), len(metrics), len(ids)), torch.nan, dtype=torch.float64)
        problems: dict[int, str] = {}
        self._test_sizes = {}
        # A node that was too slow to train is still at it.
        enough = max(1, len(orders.keys() - self._late)) if self._late else None
        for client, answer in self._connected.ask(orders, "evaluate", "evaluate", problems, full, enough).items():
            try:
                values = self._numbers(client, answer, "scores", len(models) * len(metrics))
                found[:, :, ids.tolist().index(client)] = values.reshape(len(models), len(metrics))
                self._test_sizes[client] = self._connected.opened(answer).head.test_size
            except (Malformed, Refused) as error:
                problems[client] = str(error)
        self._note("unscored", problems)
        return [{name: found[m, k] for k, name in enumerate(metrics)} for m in range(len(models))]

    def test_sizes(self, ids: Tensor) -> Tensor:
        """How many targets of every client's test part count; NaN if its policy forbids to tell it."""
        told = [self._test_sizes.get(client) for client in ids.tolist()]
        return torch.tensor([torch.nan if size is None else size for size in told], dtype=torch.float64)

    def notes(self) -> dict[str, Any]:
        """What was sent, by client, name and bytes, and which clients lagged, were refused or gave no scores."""
        told, self._notes = self._notes, {}
        refused = {node.name or node.identity: why for node, why in self._connected.registry.refused.items()}
        return {"sent": {}, **told, **({"refused": refused} if refused else {})}

    @property
    def _connected(self) -> Connection:
        if self._connection is None:
            raise FederationError(
                "engine 'flower' runs inside a federation: start one with 'fedalloy flower up', or send the run to one "
                "with 'flwr run'; for a simulation choose another engine"
            )
        return self._connection

    def _order(
        self, algorithm: Algorithm, state: State, work: Work, ctx: Context, row: int, parts: Mapping[bool, Payload]
    ) -> TensorMessage:
        """One client's share of a round."""
        head = {
            "kind": "train", "algorithm": told_algorithm(algorithm), "state": _round_of(state),
            "on_lag": self.on_lag, "epochs": int(work.epochs[row]), "active": bool(work.active[row]),
            "round": ctx.round, "rounds": ctx.rounds, "key": int(ctx.key.state), "local_lr": ctx.local_lr,
        }  # fmt: skip
        return TensorMessage(head, parts[_round_of(state) > 0])

    def _contribution(
        self, client: int, answer: Answer, algorithm: Algorithm, shared: Shared, needed: frozenset[str]
    ) -> Contribution:
        """A node's answer as a contribution, checked before a tensor is made."""
        sketch = self._connected.opened(answer)
        check_sketch(sketch.parts, algorithm, shared)
        stats, message = _stats(sketch.head.stats, needed), self._connected.opened(answer, full=True)
        payload = unpacked(message.parts, algorithm, shared)
        stats["bytes_up"] = float(sum(sizes(message.parts).values()))
        self._note_sent(client, message, dict.fromkeys(sketch.head.stats or (), 1))
        if sketch.head.lag:
            self._note("lagging", {client: f"{sketch.head.lag:.300}"})
        return Contribution(payload, stats, {})

    def _numbers(self, client: int, answer: Answer, name: Literal["scores", "cross_score"], count: int) -> Tensor:
        """A list of numbers in a header; null means NaN."""
        reply = self._connected.opened(answer)
        values = reply.head.numbers(name, count)
        self._note_sent(client, reply, {name: count})
        return torch.tensor(values, dtype=torch.float64)

    def _note_sent(self, client: int, reply: Reply, numbers: Mapping[str, int]) -> None:
        """What a node sent, by name and bytes."""
        more = {} if reply.head.test_size is None else {"test_size": 1}
        told = {name: _BYTES_OF_A_NUMBER * count for name, count in {**numbers, **more}.items()}
        mine: dict[str, int] = self._notes.setdefault("sent", {}).setdefault(str(client), {})
        mine |= {**sizes(reply.parts), **told}

    def _note(self, name: str, values: Mapping[int, str]) -> None:
        if values:
            self._notes.setdefault(name, {}).update({str(client): why for client, why in values.items()})


@dataclass
class _Patience:
    """How long a round waits for its minimum of contributions; clients that refused are not expected any more."""

    engine: Flower
    asked: int
    lost: dict[int, str] = field(default_factory=dict)
    begun: float = field(init=False)
    said: str = ""

    def __post_init__(self) -> None:
        self.begun = self.engine._connected.transport.clock()

    @property
    def enough(self) -> int:
        """The contributions a round needs; a cohort smaller than the minimum must be complete."""
        return min(self.engine.minimum, self.asked)

    @property
    def wanted(self) -> int:
        """The contributions for which a round waits."""
        return max(self.enough, math.ceil(self.engine.fraction * self.asked - 1e-9))

    def lose(self, client: int, error: FedalloyError) -> None:
        """Note a client that will not contribute, even if asked again."""
        if isinstance(error, Refused):
            self.lost[client] = str(error)

    def check(self, found: Mapping[int, Any], failures: Mapping[int, str]) -> None:
        """Wait a moment and report it, or give up."""
        if len(found) >= self.enough:
            return
        connection = self.engine._connected
        why = "; ".join(f"{connection.registry.title(client)}: {reason}" for client, reason in sorted(failures.items()))
        lacking = f"{len(found)} of the {self.enough} contributions a round needs"
        if self.asked - len(self.lost) < self.enough:
            raise FederationError(f"the federation has {lacking}, and no more can arrive ({why})")
        waited = connection.transport.clock() - self.begun
        if waited >= self.engine.wait:
            raise FederationError(
                f"the federation has had {lacking} for {waited:.0f} s ({why}). Bring the nodes back and run the same "
                "command again: it continues from the last checkpoint"
            )
        if why != self.said:
            connection.say(f"waiting: {lacking} ({why}); giving up in {self.engine.wait - waited:.0f} s")
            self.said = why
        connection.transport.sleep(1.0)


def _stats(told: Mapping[str, float] | None, needed: frozenset[str]) -> dict[str, float]:
    """The statistics of a contribution; refused if a needed one is missing."""
    if told is None:
        raise Malformed("it sent no statistics")
    missing = sorted(needed - told.keys())
    if missing:
        raise Malformed(f"it did not send the statistics {', '.join(missing)}")
    wanted = {**ALWAYS, **dict.fromkeys(sorted(needed), math.nan)}
    return {name: told.get(name, instead) for name, instead in wanted.items()}


def _check_scores(scores: Tensor) -> None:
    """Refuse scores of other clients' models that cannot be accuracies."""
    for value in scores[~scores.isnan()].tolist():
        problem = STATISTICS["cross_score"].problem(value)
        if problem:
            raise Malformed(f"its 'cross_score' {problem}")


def _round_of(state: State) -> int:
    return int(state.get("round", 0))
