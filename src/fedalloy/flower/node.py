"""The node's half: read an order, check it, carry it out on the node's own data, answer. Knows nothing of Flower.

Every order names the version of fedalloy that wrote it, its run, its client and, as data, the algorithm and the model.
An order that this node will not carry out is *refused* with the reason; one that goes wrong has *failed*. Of errors
the server is told the kind and the stage and no more, because their text may quote the data; the rest is in the
node's own log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

import fedalloy
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.client import Assignment, client_keys, run_client
from fedalloy.core.cross import cross_scores
from fedalloy.core.errors import ClientError, FedalloyError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Shared
from fedalloy.core.spec import algorithm_from_spec
from fedalloy.core.types import Block, Cohort, Context, State
from fedalloy.engines.flower import ALWAYS, Refused
from fedalloy.engines.flower_letters import FORMAT, Letter, sizes
from fedalloy.flower.config import NodeConfig
from fedalloy.flower.data import LocalTask, local_task
from fedalloy.flower.policy import Policy
from fedalloy.flower.store import NodeStore, Start, Ticket
from fedalloy.tasks.evaluation import evaluate_models

log = logging.getLogger("fedalloy.flower")


@dataclass(frozen=True)
class Order:
    """A checked letter and what this node has to carry it out."""

    letter: Letter
    config: NodeConfig
    policy: Policy
    store: NodeStore
    algorithm: Algorithm
    task: LocalTask

    @property
    def head(self) -> dict[str, Any]:
        """What the letter says."""
        return self.letter.header

    @property
    def client(self) -> int:
        """The number of this node's client."""
        return int(self.head["id"])

    @property
    def ticket(self) -> Ticket:
        """Which order this is."""
        return int(self.head["sitting"]), int(self.head["serial"])

    @property
    def shared(self) -> Shared:
        """The parts that every client receives, on this node's device."""
        return self.parts("shared/")

    def parts(self, prefix: str) -> dict[str, dict[str, torch.Tensor]]:
        """The parts whose names begin so, under the rest of their names."""
        chosen = {name: leaves for name, leaves in self.letter.parts.items() if name.startswith(prefix)}
        device = self.config.device
        return {
            name.removeprefix(prefix): {leaf: value.to(device) for leaf, value in leaves.items()}
            for name, leaves in chosen.items()
        }


def answer(letter: Letter, config: NodeConfig, policy: Policy) -> Letter:
    """Carry out an order; whatever happens there is an answer."""
    head = {"format": FORMAT, "fedalloy": fedalloy.__version__, "client": config.client}
    try:
        check_version(letter.header)
        if letter.header.get("kind") == "hello":
            return Letter({**head, "status": "ok"})
        with torch.no_grad():
            done = _carry_out(letter, config, policy)
        return Letter({**head, "status": "ok", **done.header}, done.parts)
    except Refused as error:
        log.warning("refused: %s", error)
        return Letter({**head, "status": "refused", "reason": str(error)})
    except Exception as error:
        log.exception("an order of the server failed")
        return Letter({**head, "status": "failed", "reason": _in_short(error)})


def check_version(header: Mapping[str, Any]) -> None:
    """Refuse an order that another version of fedalloy wrote: its spec could mean something else here."""
    theirs, ours = header.get("fedalloy"), fedalloy.__version__
    if theirs != ours or header.get("format") != FORMAT:
        raise Refused(
            f"the server runs fedalloy {theirs!s:.40} (letters of format {header.get('format')!s:.10}), this node "
            f"fedalloy {ours} (format {FORMAT}): install the same version on both"
        )


def _carry_out(letter: Letter, config: NodeConfig, policy: Policy) -> Letter:
    head = letter.header
    work = _KINDS.get(str(head.get("kind")))
    if work is None:
        raise Refused(f"the order is of the unknown kind '{head.get('kind')!s:.40}'")
    if head.get("client") != config.client:
        raise Refused(f"the order is for '{head.get('client')!s:.80}', this node is '{config.client}'")
    store = NodeStore.of(config.store, str(head.get("run")), config.client)
    with store.lock():
        order = _checked(letter, config, policy, store)
        done = work(order)
        store.sent({"kind": head["kind"], "ticket": order.ticket, "round": head.get("round"), **_contents(done)})
    return done


def _checked(letter: Letter, config: NodeConfig, policy: Policy, store: NodeStore) -> Order:
    """Everything about an order that can be checked before it is carried out."""
    head = letter.header
    try:
        algorithm = algorithm_from_spec(head["algorithm"])
        client, spec = int(head["id"]), head["task"]
    except (FedalloyError, KeyError, TypeError, ValueError) as error:
        raise Refused(f"the order cannot be understood ({type(error).__name__}: {error!s:.300})") from error
    policy.check_model(spec.get("model"))
    policy.check_needs(algorithm.weighting.requires, f"weighting '{type(algorithm.weighting).__name__}'")
    task = local_task(config.data, client, spec, config.device)
    if len(task.examples("train")) < policy.min_examples:
        raise Refused("this node has fewer training examples than its policy wants")
    return Order(letter, config, policy, store, algorithm, task)


def _train(order: Order) -> Letter:
    head, algorithm, shared = order.head, order.algorithm, order.shared
    order.store.accept(order.ticket)
    if any(part.reduce == "samples" for part in algorithm.parts(shared).values()):
        order.policy.check_needs({"num_examples"}, "averaging the model's buffers")
    start = order.store.start(int(head["state"]), head["on_lag"]) if algorithm.stateful else Start(0, None)
    ctx = _context(head)
    key = client_keys(ctx.key, torch.tensor([order.client]))
    work = Assignment(order.task.examples("train"), int(head["epochs"]), bool(head["active"]))
    state = start.state or _first_state(order, shared)
    made = run_client(algorithm, order.task.objective, shared, _on(state, order.config.device), work, key, ctx)
    order.store.finish(ctx.round, start.round, made.state if algorithm.stateful else None, order.ticket)
    wanted = {*ALWAYS, *algorithm.weighting.requires}
    stats = {name: value for name, value in order.policy.allowed(made.stats).items() if name in wanted}
    lag = {"lag": start.lag} if start.lag else {}
    return Letter({"stats": {name: _json(value) for name, value in stats.items()}, **lag}, made.payload)


def _evaluate(order: Order) -> Letter:
    """This client's scores, model by model and metric by metric; a forbidden metric is null."""
    head, shared, examples = order.head, order.shared, order.task.examples("test")
    metrics, solver = [str(name) for name in head["metrics"]], order.algorithm.solver
    start = order.store.start(int(head["state"]), "continue") if order.algorithm.stateful else Start(0, None)
    mine = _on(start.state or _first_state(order, shared), order.config.device)["solver"]
    block = Block(examples.x, examples.y, torch.tensor([0]), torch.tensor([len(examples)]))
    scores: list[float | None] = []
    for name in head["models"]:
        if name == "global":
            model = shared["params"], shared["buffers"]
        else:
            model = solver.personal(shared, mine, None if name == "personal" else float(name))
        allowed = tuple(metric for metric in metrics if metric not in order.policy.forbid)
        found = evaluate_models(order.task.objective, [model], block, allowed) if allowed else {}
        scores += [_json(float(found[metric][0])) if metric in found else None for metric in metrics]
    return Letter({"scores": scores})


def _cross(order: Order) -> Letter:
    """The accuracy of every client's model on this client's validation part."""
    order.policy.check_needs({"accuracy"}, "trying the models of others")
    shared, examples, payload = order.shared, order.task.examples("valid"), order.parts("cohort/")
    count = len(next(iter(payload[order.algorithm.solver.update].values())))
    block = Block(examples.x, examples.y, torch.tensor([0]), torch.tensor([len(examples)]))
    cohort = Cohort(torch.arange(count), payload)
    cross = cross_scores(order.task.objective, shared, cohort, block, order.algorithm.solver.update)[:, 0]
    return Letter({"cross_score": [_json(value) for value in cross.tolist()]})


_KINDS: dict[str, Callable[[Order], Letter]] = {"train": _train, "evaluate": _evaluate, "cross": _cross}


def _context(head: Mapping[str, Any]) -> Context:
    rounds = head["rounds"]
    return Context(
        round=int(head["round"]),
        population=int(head["population"]),
        key=Key(int(head["key"])),
        local_lr=float(head["local_lr"]),
        rounds=None if rounds is None else int(rounds),
    )


def _first_state(order: Order, shared: Shared) -> State:
    """What this client keeps before its first round, as in a simulation."""
    new = Key.of(int(order.head["seed"])).fold("new client")
    key = order.algorithm.client_key(new, order.client, int(order.head.get("round", 0)))
    return order.algorithm.init_client(shared, key, order.task.objective.init)


def _on(state: Any, device: str) -> State:
    """A nested state with its tensors on a device."""
    if isinstance(state, dict):
        return {name: _on(value, device) for name, value in state.items()}
    return cast(State, state.to(device) if isinstance(state, torch.Tensor) else state)


def _contents(letter: Letter) -> dict[str, Any]:
    """What a letter gives away: parts by bytes, numbers by name."""
    told = {name: value for name, value in letter.header.items() if name in ("stats", "scores", "cross_score")}
    return {"bytes": sizes(letter), **told}


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _in_short(error: Exception) -> str:
    """The kind of an error and where it happened, without its text."""
    if isinstance(error, ClientError):
        return f"{type(error.cause).__name__} at stage '{error.stage}' (the node's log says more)"
    return f"{type(error).__name__} (the node's log says more)"
