"""The node's side: read an order, check it, carry it out on the node's own data, answer.

Every order names the version of fedalloy that wrote it, its run, its client and, as data, the algorithm and the model.
An order that this node will not carry out is *refused* with the reason; one that goes wrong has *failed*. The server
only gets the type and the stage of an error, because its text may quote the data; the rest is in the node's own log.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

import torch

from fedalloy.core import aspects
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.blocks import client_keys
from fedalloy.core.client import Assignment, run_client
from fedalloy.core.cross import cross_scores
from fedalloy.core.errors import ClientError, FedalloyError, RegistryError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.packing import pack
from fedalloy.core.protocols import ENGINE_STATS, Shared, Weighting
from fedalloy.core.spec import from_spec
from fedalloy.core.types import Block, Cohort, Context, Contributions, Info, State, Weights
from fedalloy.flower.config import NodeConfig
from fedalloy.flower.node.approval import Approvals, fingerprint
from fedalloy.flower.node.audit import Audit
from fedalloy.flower.node.data import LocalTask, MakeTask, local_task
from fedalloy.flower.node.leaves import check_cohort, check_frozen, check_shared, whole
from fedalloy.flower.node.limits import bounded_memory, check_protected, check_steps, is_memory_error
from fedalloy.flower.node.policy import Policy
from fedalloy.flower.node.store import NodeStore, Start, Ticket
from fedalloy.flower.node.training import train
from fedalloy.flower.payloads import ALWAYS
from fedalloy.flower.protocol.header import LeavesLost, Malformed, Refused, plain_record, signed
from fedalloy.flower.protocol.orders import (
    Addressed,
    AlgorithmSpec,
    Cross,
    Evaluate,
    Hello,
    ReceivedOrder,
    Train,
    Work,
    read_order,
)
from fedalloy.flower.protocol.tensor_messages import TensorMessage, sizes
from fedalloy.flower.protocol.tensor_messages import pack as as_records
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.tasks.evaluation import evaluate_models
from fedalloy.tasks.metrics.metric import choose

if TYPE_CHECKING:
    from flwr.app import RecordDict

_TEXTS = ("status", "reason", "lag")
_NUMBERS = ("scores", "test_size", "cross_score")
"""The numbers of an answer beside statistics."""
log = logging.getLogger("fedalloy.flower")
Head = TypeVar("Head", bound=Work)


@dataclass(frozen=True)
class Order(Generic[Head]):
    """A checked order and what this node has to carry it out."""

    head: Head
    received: ReceivedOrder
    config: NodeConfig
    policy: Policy
    store: NodeStore
    algorithm: Algorithm
    task: LocalTask

    @property
    def client(self) -> int:
        """The number of this node's client."""
        return self.head.id

    @property
    def ticket(self) -> Ticket:
        """Which order this is."""
        return self.head.sitting, self.head.serial

    @property
    def shared(self) -> Shared:
        """The shared parts that a client uses, on this node's device."""
        received = self.parts("shared/")
        shared = whole(received, self.algorithm, self.task.objective, self.store, self.config.device)
        check_shared(shared, self.task.objective)
        return shared

    def parts(self, prefix: str) -> dict[str, dict[str, torch.Tensor]]:
        """The parts whose names begin with ``prefix``, without the prefix."""
        chosen = {name: leaves for name, leaves in self.received.parts.items() if name.startswith(prefix)}
        device = self.config.device
        return {
            name.removeprefix(prefix): {leaf: value.to(device) for leaf, value in leaves.items()}
            for name, leaves in chosen.items()
        }


@dataclass(frozen=True)
class WeighedElsewhere(Weighting):
    """A weighting at the server: a node only knows which statistics it needs."""

    weight_bound: ClassVar[float] = 1.0
    """The server has checked it when it built the algorithm."""

    statistics: frozenset[str] = frozenset()

    @property
    def requires(self) -> frozenset[str]:
        return self.statistics

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        raise SpecError("weights are computed at the server")


def half_of(spec: AlgorithmSpec) -> Algorithm:
    """The node's part of an algorithm.

    >>> half_of(AlgorithmSpec(solver={"kind": "sgd", "lr": 0.5}, weighting="Samples")).solver.lr
    0.5
    """
    solver = from_spec("solver", spec.solver.to_spec())
    known = ENGINE_STATS | aspects.provides(solver)
    if unknown := sorted(set(spec.requires) - known):
        raise SpecError(f"statistics {', '.join(unknown)} do not exist here; known: {', '.join(sorted(known))}")
    wire = tuple(from_spec("wire", one.to_spec(), f"wire[{i}]") for i, one in enumerate(spec.wire))
    try:
        return Algorithm(solver, WeighedElsewhere(frozenset(spec.requires)), ServerSgd(), wire)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise SpecError(str(error)) from error


def respond(content: RecordDict, node_config: Mapping[str, Any], make_task: MakeTask = local_task) -> RecordDict:
    """The answer to an order; a wrong configuration is reported in it. ``make_task`` reads the node's data."""
    try:
        config = NodeConfig.read(node_config)
    except FedalloyError as error:
        log.error("%s", error)
        return _refusal(f"this node is not configured properly: {error}")
    try:
        policy = Policy.read(config.policy)
    except FedalloyError as error:  # its text names the file, and may quote it
        log.error("%s", error)
        return _refusal("this node is not configured properly: its policy cannot be read (see the node's log)")
    order: ReceivedOrder | None = None
    try:
        order = read_order(content, policy.max_megabytes * 1e6, policy.models)
    except Malformed as error:
        answered = _refusing(f"the server's message cannot be read: {error}")
    except FedalloyError as error:
        log.warning("refused: %s", error)
        answered = _refusing(str(error))
    else:
        if config.threads:
            torch.set_num_threads(config.threads)
        answered = answer(order, config, policy, make_task)
        order = ReceivedOrder(order.head, {})  # its tensors are not needed for the audit log
    return _noted(order, answered, config.store)


def _noted(order: ReceivedOrder | None, answered: TensorMessage, store: Path) -> RecordDict:
    """An answer to send, once it is in the audit log. A refused order makes no store: a running node has one
    (:mod:`fedalloy.flower.prefork`)."""
    if answered.header["status"] == "refused" and not store.exists():
        return as_records(answered)
    try:
        Audit(store).note({**_asked(order), **_answered(answered)})
    except OSError as error:
        log.error("the audit log cannot be written: %s", error)
        reason = "this node cannot write its audit log, and answers nothing without it"
        return plain_record(signed(status="failed", reason=reason))
    return as_records(answered, release=True)


def _asked(order: ReceivedOrder | None) -> dict[str, Any]:
    """What was asked, for the audit log."""
    head = order.head if order else None
    if not isinstance(head, Addressed):
        return {"asked": "hello" if head else "unreadable"}
    study = fingerprint(head.algorithm, head.task)
    return {"asked": head.kind, "run": head.run, "round": head.round, "client": head.client, "study": study}


def _answered(message: TensorMessage) -> dict[str, Any]:
    """What was answered, for the audit log: by name and bytes, without values."""
    told: dict[str, Any] = {name: message.header[name] for name in _TEXTS if name in message.header}
    numbers = [*message.header.get("stats", ()), *(name for name in _NUMBERS if name in message.header)]
    return {**told, "bytes": sizes(message.parts), "numbers": numbers}


def _refusing(reason: str) -> TensorMessage:
    return TensorMessage(signed(status="refused", reason=reason))


def _refusal(reason: str) -> RecordDict:
    return plain_record(signed(status="refused", reason=reason))


def answer(
    received: ReceivedOrder, config: NodeConfig, policy: Policy, make_task: MakeTask = local_task
) -> TensorMessage:
    """Carry out an order; errors become answers. ``make_task`` reads the node's data."""
    head = signed(client=config.client)
    if isinstance(received.head, Hello):
        return TensorMessage({**head, "status": "ok"})
    try:
        with torch.no_grad(), bounded_memory(policy.max_memory_megabytes, config.device):
            done = _carry_out(received.head, received, config, policy, make_task)
        return TensorMessage({**head, "status": "ok", **done.header}, done.parts)
    except LeavesLost as error:
        return TensorMessage({**head, "status": "incomplete", "reason": str(error)})
    except Refused as error:
        log.warning("refused: %s", error)
        return TensorMessage({**head, "status": "refused", "reason": str(error)})
    except Exception as error:
        log.exception("an order of the server failed")
        if is_memory_error(error):
            reason = "the order needs more memory than the policy of this node allows (max_memory_megabytes)"
            return TensorMessage({**head, "status": "refused", "reason": reason})
        return TensorMessage({**head, "status": "failed", "reason": _in_short(error)})


def _carry_out(
    head: Work, received: ReceivedOrder, config: NodeConfig, policy: Policy, make_task: MakeTask
) -> TensorMessage:
    if head.client != config.client:
        raise Refused(f"the order is for '{head.client:.80}', this node is '{config.client}'")
    study, approvals = fingerprint(head.algorithm, head.task), Approvals(config.store)
    metrics = head.metrics if isinstance(head, Evaluate) else ()
    approvals.check(study, policy.require_approval, head.round, metrics)
    store = NodeStore.of(config.store, head.run, config.client)
    with store.lock():
        approvals.mark(head.run, study)
        # 'withdraw' or 'forget' may have come while it waited.
        approvals.check(study, policy.require_approval, head.round, metrics)
        order = _checked(head, received, config, policy, store, make_task)
        done = _KINDS[head.kind](order)
        store.sent({"kind": head.kind, "ticket": order.ticket, "round": head.round, **_contents(done)})
    return done


def _checked(
    head: Work, received: ReceivedOrder, config: NodeConfig, policy: Policy, store: NodeStore, make_task: MakeTask
) -> Order[Any]:
    """Everything about an order that can be checked before it is carried out."""
    try:
        algorithm = half_of(head.algorithm)
    except FedalloyError as error:
        raise Refused(f"the order cannot be understood ({type(error).__name__}: {error!s:.300})") from error
    policy.check_needs(algorithm.weighting.requires, f"weighting '{head.algorithm.weighting}'")
    try:
        task = make_task(config.data, head.id, head.task, config.device, policy)
    except (SpecError, RegistryError) as error:
        # The text of an error in the operator's own code may quote data.
        own = head.task.model is not None and head.task.model.kind in policy.models
        told = type(error).__name__ if own else f"{error!s:.300}"
        raise Refused(f"the task cannot be understood ({told})") from error
    policy.check_examples(len(task.examples("train")))
    check_frozen(task.frozen, head.task.frozen, config.client)
    return Order(head, received, config, policy, store, algorithm, task)


def _train(order: Order[Train]) -> TensorMessage:
    head, algorithm, examples = order.head, order.algorithm, order.task.examples("train")
    order.store.accept(order.ticket)
    start = order.store.start(head.state, head.on_lag) if algorithm.stateful else Start(0, None)
    shared = order.shared
    if "num_examples" in algorithm.needs(shared):
        order.policy.check_needs({"num_examples"}, "averaging the model's buffers")
    check_protected(algorithm, shared, order.policy)
    check_steps(algorithm.solver, head.epochs, len(examples), order.policy)
    ctx, work = _context(head), Assignment(examples, head.epochs, head.active)
    # The node's own key: noise that the server can draw too would not protect anything.
    secret = Key(secrets.randbits(64)) if order.policy.require_noise else ctx.key
    key = client_keys(secret, torch.tensor([order.client]))
    state = start.state or _first_state(order, shared)
    state = _on(state, order.config.device)
    made = run_client(algorithm, order.task.objective, shared, state, work, key, ctx, train)
    kept = made.state if algorithm.stateful else None
    order.store.finish(ctx.round, start.round, kept, order.ticket, bool(start.lag))
    wanted = {*ALWAYS, "num_sequences", *algorithm.weighting.requires}
    stats = {name: value for name, value in order.policy.allowed(made.stats).items() if name in wanted}
    lag = {"lag": start.lag} if start.lag else {}
    return TensorMessage(
        {"stats": {name: _json(value) for name, value in stats.items()}, **lag}, pack(made.payload, algorithm.packings)
    )


def _evaluate(order: Order[Evaluate]) -> TensorMessage:
    """This client's scores, model by model and metric by metric, and how many targets they are over; a forbidden metric
    is null."""
    head, shared, examples = order.head, order.shared, order.task.examples("test")
    metrics, solver = head.metrics, order.algorithm.solver
    try:
        choose(metrics)
    except RegistryError as error:
        raise Refused(f"the order cannot be understood ({error!s:.300})") from error
    mine = _kept(order, shared) if any(name != "global" for name in head.models) else {}
    block = Block.of(examples)
    scores: list[float | None] = []
    for name in head.models:
        if name == "global":
            model = shared["params"], shared["buffers"]
        else:
            model = aspects.personal_model(solver, shared, mine, None if name == "personal" else name)
        allowed = tuple(metric for metric in metrics if metric not in order.policy.forbid)
        found = evaluate_models(order.task.objective, [model], block, allowed) if allowed else {}
        scores += [_json(float(found[metric][0])) if metric in found else None for metric in metrics]
    size = {} if {"num_examples", "test_size"} & {*order.policy.forbid} else {"test_size": _counted(order, examples.y)}
    return TensorMessage({"scores": scores, **size})


def _counted(order: Order[Evaluate], y: Any) -> int:
    """How many targets of the test part count."""
    counts = order.task.objective.counts(y) if len(y) else None
    return len(y) if counts is None else int(counts.sum())


def _kept(order: Order[Evaluate], shared: Shared) -> State:
    """The state of this client's solver, for its own models."""
    start = order.store.start(order.head.state, "continue") if order.algorithm.stateful else Start(0, None)
    kept: State = _on(start.state or _first_state(order, shared), order.config.device)["solver"]
    return kept


def _cross(order: Order[Cross]) -> TensorMessage:
    """The accuracy of every client's model on this client's validation part."""
    if "cross_score" not in order.head.algorithm.requires:
        raise Refused("the study does not need the models of others scored: its weighting does not require cross_score")
    order.policy.check_needs({"accuracy"}, "scoring the models of others")
    shared, examples, payload = order.shared, order.task.examples("valid"), order.parts("cohort/")
    count = check_cohort(payload, order.task.objective, order.algorithm.solver.update)
    block = Block.of(examples)
    cohort = Cohort(torch.arange(count), payload)
    cross = cross_scores(order.task.objective, shared, cohort, block, order.algorithm.solver.update)[:, 0]
    return TensorMessage({"cross_score": [_json(value) for value in cross.tolist()]})


_KINDS: dict[str, Callable[[Order[Any]], TensorMessage]] = {"train": _train, "evaluate": _evaluate, "cross": _cross}


def _context(head: Train) -> Context:
    return Context(head.round, head.population, Key(head.key), local_lr=head.local_lr, rounds=head.rounds)


def _first_state(order: Order[Any], shared: Shared) -> State:
    """This client's initial state, as in a simulation."""
    new = Key.of(order.head.seed).fold("new client")
    key = order.algorithm.client_key(new, order.client, order.head.round)
    return order.algorithm.init_client(shared, key, order.task.objective.init)


def _on(state: Any, device: str) -> State:
    """A nested state with its tensors on a device."""
    if isinstance(state, dict):
        return {name: _on(value, device) for name, value in state.items()}
    return cast(State, state.to(device) if isinstance(state, torch.Tensor) else state)


def _contents(message: TensorMessage) -> dict[str, Any]:
    """The contents of a message: parts by bytes, numbers by name."""
    told = {name: value for name, value in message.header.items() if name in ("stats", *_NUMBERS)}
    return {"bytes": sizes(message.parts), **told}


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _in_short(error: Exception) -> str:
    """The type of an error and where it happened, without its text."""
    if isinstance(error, ClientError):
        return f"{type(error.cause).__name__} at stage '{error.stage}' (see the node's log)"
    kind = error.__cause__ or error  # errors of the node's own function are wrapped
    return f"{type(kind).__name__} (see the node's log)"
