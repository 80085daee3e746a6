"""``fedalloy.flower.Strategy``: fedalloy's weightings and servers for your own Flower app."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import flwr.serverapp.strategy
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedalloy.core.algorithm import Algorithm, ServerState, ServerStep, server_step
from fedalloy.core.errors import AlgorithmError, SpecError
from fedalloy.core.fraction import fraction_of
from fedalloy.core.keys import Key
from fedalloy.core.names import Names
from fedalloy.core.statistics import MAX_EXAMPLES
from fedalloy.core.types import Cohort, Context, Contribution
from fedalloy.experiment.fit import as_algorithm
from fedalloy.experiment.records.folder import Checkpoint
from fedalloy.experiment.round import Stopwatch
from fedalloy.experiment.sizes import KnownSizes
from fedalloy.flower.admission import read_seats
from fedalloy.flower.foreign import (
    BUFFERS,
    MAX_STEPS,
    Lacking,
    Named,
    ReplyReader,
    SentModel,
    array_bytes,
    average,
    check_usable,
    metrics_of,
)
from fedalloy.flower.ledger import Ledger, open_ledger, result_from_json, result_to_json
from fedalloy.flower.node_registry import Node, NodeRegistry, wait_for_nodes
from fedalloy.flower.protocol.header import Malformed
from fedalloy.flower.strategy_rows import check_scores, client_scores, evaluation, training
from fedalloy.flower.transport import Transport, attribute, check_sent

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
_log = logging.getLogger("flwr")


class Strategy(flwr.serverapp.strategy.Strategy):
    """Any fedalloy algorithm whose clients send a trained model, in place of Flower's ``FedAvg``.

    ``algorithm`` is a value (``fedadam(server_lr=0.01)``), a name (``"aaggff_s"``) or a spec. Clients do their
    own local training: of the algorithm's solver only the step size is used (``qfedavg(lr=0.1)`` needs it). Weightings
    that use losses or accuracies take them from the metrics in replies. If the names differ, ``metrics`` maps metrics
    to statistics, ``{"train_loss": "loss_before"}``, provided that they measure the same.

    Settings that ``FedAvg`` has keep its names and defaults. ``population`` is the number of clients (default: the
    nodes present when training starts); ``wait`` the seconds to wait for nodes; ``max_norm`` the largest norm of an
    update; ``max_examples`` and ``max_steps`` the most examples and local steps that a client may report (its number of
    examples is fixed at its first answer: a client that changes it is left out); ``buffers`` the arrays that are
    averaged by examples and not optimised. With a ``folder`` every round is recorded there (``fedalloy show FOLDER``,
    ``fedalloy report FOLDER``), and the same call continues after the last finished round. ``scores`` names the metrics
    of evaluations as fedalloy does, ``{"eval_acc": "accuracy"}``: what has a direction has worst served clients, and
    runs of other engines beside it.
    """

    def __init__(
        self,
        algorithm: Algorithm | str | Mapping[str, Any],
        *,
        metrics: Named | None = None,
        scores: Mapping[str, str] | None = None,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        population: int | None = None,
        wait: float = 600.0,
        folder: str | Path | None = None,
        seed: int = 0,
        max_norm: float | None = None,
        max_examples: int = MAX_EXAMPLES,
        max_steps: int = MAX_STEPS,
        buffers: Names = BUFFERS,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        poll: float = 0.2,
    ) -> None:
        self.algorithm = as_algorithm(algorithm)
        self._name, self._scores = algorithm if isinstance(algorithm, str) else "", check_scores(scores or {})
        check_usable(self.algorithm)
        rule = self.algorithm.weighting
        known = {weighted_by_key: "num_examples", **(metrics or {})}
        self._reader = ReplyReader(rule.requires, type(rule).__name__, known, arrayrecord_key, max_steps)
        # A custom weight need not be a number of examples.
        counted = all(theirs == "num-examples" for theirs, ours in self._reader.pairs if ours == "num_examples")
        self._sizes = KnownSizes(0, max_examples, whole=counted)
        self._fractions = _checked_fractions(train=fraction_train, evaluate=fraction_evaluate)
        self._least = {"train": min_train_nodes, "evaluate": min_evaluate_nodes, "there": min_available_nodes}
        self._population, self._wait, self._poll = population, wait, poll
        self._folder, self._seed, self._max_norm = Path(folder) if folder else None, seed, max_norm
        self._buffers, self._arrays_key, self._config_key = buffers, arrayrecord_key, configrecord_key
        self._ledger, self._average = Ledger(), partial(average, size=weighted_by_key)
        self._registry: NodeRegistry | None = None
        self._state: ServerState | None = None
        self._model: SentModel | None = None
        self._sent: list[Message] = []
        self._asked: dict[int, int] = {}
        self._row: dict[str, Any] = {}

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row per round of this session: the clients used, their weights, and the clients left out with the
        reason."""
        return self._ledger.rows

    def summary(self) -> None:
        """Log the parts of this strategy."""
        parts = {"weighting": self.algorithm.weighting, "server": self.algorithm.server}
        for name, part in parts.items():
            _log.info("\t├──> %s: %s", name, part)
        _log.info("\t└──> requires of every client: %s", ", ".join(sorted(self._reader.required)) or "nothing")

    # One round, as Flower calls it.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of a training round."""
        present = self._prepare(arrays, grid)
        self._row = {"round": server_round, "bytes_up": 0, "bytes_down": 0}
        if self._fractions["train"] == 0:
            self._sent = []
            return []
        chosen = self._choose(present, "train", server_round)
        self._sent = self._messages(chosen, arrays, config, server_round, MessageType.TRAIN)
        self._row["bytes_down"] = len(self._sent) * array_bytes(arrays)
        return self._sent

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The model after the round; None if no contribution was used, and the model does not change."""
        if not self._sent:
            return None, None
        assert self._model is not None
        contents, failures = self._contents(replies)
        contributions, refused = self._read(contents, self._model)
        step = self._step(server_round, contributions, sorted({*failures, *self._away()}))
        self._row["bytes_up"] = int(sum(one.stats["bytes_up"] for one in contributions.values()))
        self._record(step, {**refused, **step.dropped}, failures)
        self._row |= training({client: metrics_of(contents[client]) for client in step.ids.tolist()})
        if len(step.ids) == 0:
            why = step.refusal or "no contribution can be used"
            _log.warning("round %d: %s; the model does not change", server_round, why)
            return None, None
        self._state = step.state
        shared = step.state["shared"]
        self._model = replace(self._model, params=shared["params"], buffers=shared["buffers"])
        counted = [(client, contents[client]) for client in step.ids.tolist()]
        sizes = {client: contributions[client].stats["num_examples"] for client, _ in counted}
        return self._model.record(), self._average([(_metrics(content), sizes[client]) for client, content in counted])

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The messages of an evaluation."""
        present = self._prepare(arrays, grid)
        self._sent = []
        if self._fractions["evaluate"] > 0:
            chosen = self._choose(present, "evaluate", server_round)
            self._sent = self._messages(chosen, arrays, config, server_round, MessageType.EVALUATE)
        return self._sent

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """The clients' scores, averaged by their examples; each one is in the records."""
        if not self._sent:
            return None
        contents, failures = self._contents(replies)
        scores: dict[int, dict[str, float]] = {}
        sizes: dict[int, float] = {}
        for client, content in contents.items():
            try:
                scores[client] = metrics_of(content)
                sizes[client] = self._size(scores[client])
            except Malformed as error:
                failures[client] = str(error)
        for client, reason in failures.items():
            _log.warning("round %d: no score of %s: %s", server_round, self._known.describe(client), reason)
        columns = client_scores({client: scores[client] for client in sizes}, self._scores)
        if columns:
            self._ledger.scores({"round": server_round, "split": "test", "model": "global", "ids": [*sizes], **columns})
            self._row["evaluation"] = evaluation(columns)
        return self._average([(_metrics(contents[client]), size) for client, size in sizes.items()])

    # All rounds.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """All rounds, as Flower's own ``start`` runs them; with a folder, from the first that is not finished yet."""
        self.summary()
        with self._opened() as (self._ledger, saved):
            result, arrays, done = self._restore(saved, initial_arrays)
            if saved is None and evaluate_fn:
                _keep(result.evaluate_metrics_serverapp, 0, evaluate_fn(0, arrays))
            for round in range(done + 1, num_rounds + 1):
                configs = (train_config or ConfigRecord(), evaluate_config or ConfigRecord())
                watch = Stopwatch()
                arrays = self._run_round(grid, round, arrays, configs, timeout, result, evaluate_fn, watch)
                _log.info("[ROUND %d/%d] %.2f s", round, num_rounds, sum(watch.seconds.values()))
            self._ledger.close("finished", max(done, num_rounds))
        result.arrays = arrays
        return result

    def _run_round(
        self, grid: Grid, round: int, arrays: ArrayRecord, configs: tuple[ConfigRecord, ConfigRecord], timeout: float,
        result: Result, evaluate_fn: Evaluate | None, watch: Stopwatch,
    ) -> ArrayRecord:  # fmt: skip
        with watch.time("clients"):
            replies = self._exchange(grid, list(self.configure_train(round, arrays, configs[0], grid)), timeout)
        with watch.time("server"):
            moved, metrics = self.aggregate_train(round, replies)
        arrays = arrays if moved is None else moved
        _keep(result.train_metrics_clientapp, round, metrics)
        with watch.time("evaluate"):
            replies = self._exchange(grid, list(self.configure_evaluate(round, arrays, configs[1], grid)), timeout)
            _keep(result.evaluate_metrics_clientapp, round, self.aggregate_evaluate(round, replies))
            if evaluate_fn:
                _keep(result.evaluate_metrics_serverapp, round, evaluate_fn(round, arrays))
        self._ledger.row(self._row, watch.seconds)
        self._ledger.names(self._known.node_names())
        kept = {"roster": self._known.to_json(), "result": result_to_json(result), "sizes": self._sizes.to_state()}
        self._ledger.save(round, self._state or {}, kept)
        return arrays

    def _exchange(self, grid: Grid, sent: list[Message], timeout: float) -> list[Message]:
        replies = Transport(grid, gaps=(self._poll, self._poll)).exchange(sent, timeout)
        check_sent(replies)
        return replies

    def _opened(self) -> AbstractContextManager[tuple[Ledger, Checkpoint | None]]:
        return open_ledger(self._folder, self.algorithm, self._seed, self._name)

    def _restore(self, saved: Checkpoint | None, initial: ArrayRecord) -> tuple[Result, ArrayRecord, int]:
        """Where to continue: the results so far, the model, and the last finished round."""
        if saved is None:
            return Result(), initial, 0
        shared = saved.server["shared"]
        model = SentModel.of(initial, self._buffers)
        self._state, self._model = saved.server, replace(model, params=shared["params"], buffers=shared["buffers"])
        self._registry = NodeRegistry.from_json(saved.extra["roster"], self._population)
        self._sizes = replace(self._sizes, population=len(self._registry.names))
        self._sizes.restore(saved.extra.get("sizes"))
        _log.info("continuing after round %d", saved.round)
        return result_from_json(saved.extra["result"]), self._model.record(), saved.round

    # The parts of a round.

    @property
    def _known(self) -> NodeRegistry:
        assert self._registry is not None, "no round has been configured yet"
        return self._registry

    @property
    def _clients(self) -> int:
        return len(self._known.names)

    def _prepare(self, arrays: ArrayRecord, grid: Grid) -> dict[int, Node]:
        """Wait for nodes, identify them, and begin with the model that is about to be sent."""
        seats, least = read_seats(), self._least["there"]
        nodes = wait_for_nodes(grid, least, self._wait, self._poll, _log.info, keyed=seats is not None)
        if self._registry is None:
            self._registry = NodeRegistry.unnamed(self._population, nodes, seats)
            self._sizes = replace(self._sizes, population=self._clients)
            self.algorithm.check_able(self._clients, self._clients)
        for node in self._registry.place(nodes, seats):
            _log.warning("node %d is not used: it has none of the %d seats", node.number, self._clients)
        self._model = SentModel.of(arrays, self._buffers)
        if self._state is None:
            self._state = self.algorithm.init(self._model.params, self._clients, self._model.buffers)
        # The caller of the rounds may have changed the model: updates are relative to what is sent.
        shared = {**self._state["shared"], "params": self._model.params, "buffers": self._model.buffers}
        self._state = {**self._state, "shared": shared}
        return self._registry.present(nodes)

    def _choose(self, present: dict[int, Node], phase: str, round: int) -> dict[int, Node]:
        """Sample connected nodes by key, so that a repeated round samples the same ones."""
        fraction = self._fractions[phase]
        wanted = min(len(present), max(int(fraction_of(len(present), fraction)), self._least[phase]))
        if phase == "train" and fraction < 1:
            self.algorithm.check_cohort(wanted, self._clients)
        clients = torch.tensor(sorted(present))
        drawn = Key.of(self._seed).fold("round", round, phase).choice(len(clients), wanted)
        return {client: present[client] for client in clients[drawn].tolist()}

    def _messages(
        self, chosen: dict[int, Node], arrays: ArrayRecord, config: ConfigRecord, round: int, kind: str
    ) -> list[Message]:
        told = ConfigRecord({**config, "server-round": round})
        record = RecordDict({self._arrays_key: arrays, self._config_key: told})
        _log.info("%s: asking %d of %d clients", kind, len(chosen), self._clients)
        self._asked = {node.number: client for client, node in chosen.items()}
        return [
            Message(content=record, message_type=kind, dst_node_id=node, group_id=str(round)) for node in self._asked
        ]

    def _contents(self, replies: Iterable[Message]) -> tuple[dict[int, RecordDict], dict[int, str]]:
        """The replies by client, and why others sent nothing."""
        answers = attribute(self._sent, replies, "no reply within the time limit")
        found = dict(sorted((self._asked[node], answer) for node, answer in answers.items()))
        failures = {client: answer.problem for client, answer in found.items() if answer.content is None}
        return {client: answer.content for client, answer in found.items() if answer.content is not None}, failures

    def _read(
        self, contents: Mapping[int, RecordDict], model: SentModel
    ) -> tuple[dict[int, Contribution], dict[int, str]]:
        """The contributions that can be read. A statistic that no client sends is a mistake in the app, not of a
        node."""
        good: dict[int, Contribution] = {}
        bad: dict[int, Malformed] = {}
        for client, content in contents.items():
            try:
                good[client] = self._reader.read(content, model)
            except Malformed as error:
                bad[client] = error
        if not good and bad and all(isinstance(error, Lacking) for error in bad.values()):
            raise AlgorithmError(f"{self._known.describe(next(iter(bad)))}: {next(iter(bad.values()))}")
        return good, {client: str(error) for client, error in bad.items()}

    def _away(self) -> list[int]:
        """Clients that were expected but not connected; in sampled rounds none are expected."""
        if self._fractions["train"] < 1:
            return []
        return [client for client in range(self._clients) if client not in self._asked.values()]

    def _step(self, round: int, contributions: Mapping[int, Contribution], absent: list[int]) -> ServerStep:
        assert self._state is not None
        context = Context(
            round, self._clients, Key.of(self._seed).fold("round", round),
            local_lr=self.algorithm.solver.lr_at(round), absent=tuple(absent),
        )  # fmt: skip
        cohort = Cohort.gather(list(contributions), list(contributions.values()))
        step = server_step(self.algorithm, self._state, cohort, context, self._max_norm, self._sizes.limits(cohort.ids))
        self._sizes.learn(cohort)
        return step

    def _record(self, step: ServerStep, dropped: Mapping[int, str], failures: Mapping[int, str]) -> None:
        for client, reason in sorted({**failures, **dropped}.items()):
            _log.warning("round %d: %s is left out: %s", self._row["round"], self._known.describe(client), reason)
        self._row |= {
            "ids": step.ids.tolist(), "weights": step.weights, "info": step.info,
            "dropped": {str(client): reason for client, reason in sorted(dropped.items())},
            "failures": {str(client): reason for client, reason in sorted(failures.items())},
            "absent": sorted({*failures, *self._away()}), "idle": list(step.idle), "refusal": step.refusal,
        }  # fmt: skip

    def _size(self, metrics: Mapping[str, float]) -> float:
        """The weight of a client's scores; an invalid size is refused, as in training."""
        known = {name.replace("-", "_"): value for name, value in metrics.items()}
        named = [metrics[theirs] for theirs, ours in self._reader.pairs if ours == "num_examples" and theirs in metrics]
        size = named[0] if named else known.get("num_examples", 1.0)
        if problem := self._sizes.statistic.problem(size):
            raise Malformed(f"statistic 'num_examples' {problem}")
        return size


def _checked_fractions(**fractions: float) -> dict[str, float]:
    for name, value in fractions.items():
        if not 0 <= value <= 1:
            raise SpecError(f"fraction_{name} is {value}; use 0 to 1")
    return fractions


def _metrics(content: RecordDict) -> MetricRecord:
    return next(iter(content.metric_records.values()))


def _keep(into: dict[int, MetricRecord], round: int, metrics: MetricRecord | None) -> None:
    if metrics is not None:
        into[round] = metrics
