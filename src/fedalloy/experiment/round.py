"""One round: sample, run the clients, drop stragglers, step the server, describe what happened."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm, ServerState, ServerStep, server_step
from fedalloy.core.engine import check_engine_kind, check_outcome
from fedalloy.core.keys import Key
from fedalloy.core.protocols import ClientStore, Engine, Outcome, Shared, Task
from fedalloy.core.recount import recounted
from fedalloy.core.task import check_task
from fedalloy.core.traffic import bytes_down, cross_bytes
from fedalloy.core.types import Cohort, Context, Contributions, State, Work
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.sampling import UniformSampling, all_available
from fedalloy.experiment.sizes import KnownSizes

MEGABYTE = 1e6
MANY_TARGETS = ("tokens", "segmentation")
"""Kinds of task in which a batch may have no target that counts, and is then no step."""


@dataclass
class Stopwatch:
    """The time of every phase of a round; the only part of a run that uses the clock."""

    seconds: dict[str, float] = field(default_factory=dict)
    _phase: str = field(default="", init=False, repr=False)
    _begin: float = field(default=0.0, init=False, repr=False)

    def time(self, phase: str) -> Stopwatch:
        """Add the time spent inside to ``phase``; phases are not nested."""
        self._phase, self._begin = phase, time.perf_counter()
        return self

    def __enter__(self) -> None:
        """The phase has begun."""

    def __exit__(self, *_: object) -> None:
        self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + time.perf_counter() - self._begin


@dataclass(frozen=True)
class Federation:
    """Everything that stays the same from round to round."""

    algorithm: Algorithm
    task: Task
    engine: Engine
    config: RunConfig
    root: Key = field(repr=False)
    notices: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        check_task(self.task, "the task of a federation")
        check_engine_kind(self.engine, "the engine of a federation")

    @property
    def resends(self) -> bool:
        """Whether a client whose link failed contributes a zero update instead of being left out."""
        return (self.algorithm.on_failure or self.config.devices.on_failure) == "resend"

    @cached_property
    def new_clients(self) -> Key:
        """The key of what new clients begin with; the same in every round."""
        return self.root.fold("new client")


@dataclass(frozen=True)
class RoundResult:
    """What a round did: the server's step, and the row that describes it."""

    step: ServerStep
    row: dict[str, Any]


def run_round(
    fed: Federation,
    state: ServerState,
    store: ClientStore,
    round: int,
    watch: Stopwatch,
    sizes: KnownSizes | None = None,
) -> RoundResult:
    """One round; client states are put into the store and new sizes are remembered, everything else is returned."""
    key, sizes = fed.root.fold("round", round), sizes or known_sizes(fed)
    with watch.time("plan"):
        work, absent = _assign(fed, round, key)
        ctx = Context(
            round=round,
            population=fed.task.population,
            key=key,
            local_lr=fed.algorithm.solver.lr_at(round, fed.config.rounds),
            rounds=fed.config.rounds,
        )
        known = _known(fed, store, work.clients)
        states = _with_new(fed, state, known, work.clients, round)
        _read_ahead(fed, round + 1)
    with watch.time("clients"):
        outcome = _run(fed, state, states, work, ctx)
    with watch.time("server"):
        limits, fewer = sizes.limits(outcome.cohort.ids), fed.engine.data_at_hand and fed.task.kind in MANY_TARGETS
        cohort = recounted(fed.algorithm, outcome.cohort, work, ctx, limits, fewer)
        cohort, late, seconds = _without_stragglers(fed, cohort, state["shared"])
        if outcome.failures or late:
            absent = sorted({*absent, *outcome.failures, *(() if fed.resends else late)})
        down = _sent_down(fed, state["shared"], work, known, outcome, cohort)
        cohort = _cross(fed, state["shared"], cohort)
        seen = replace(ctx, absent=tuple(absent)) if absent else ctx
        limits = limits if cohort.ids is outcome.cohort.ids else sizes.limits(cohort.ids)
        step = server_step(fed.algorithm, state, cohort, seen, fed.config.max_norm, limits)
        sizes.learn(cohort, limits)
    if fed.algorithm.stateful:
        with watch.time("store"):
            store.put(round, _counted(outcome, work, late, step))
    row = {"round": round, **_describe(fed.algorithm, state, work, cohort, step, outcome, down)}
    resent = [] if work.all_active and not late else sorted({*_silent(work), *(late if fed.resends else ())})
    row |= {"simulated_seconds": seconds, "absent": absent, "late": late, "resent": resent}
    row |= {"idle": list(step.idle), "refusal": step.refusal}
    return RoundResult(step, row)


def known_sizes(fed: Federation) -> KnownSizes:
    """The sizes of all clients, none of them known yet."""
    return KnownSizes(fed.task.population, fed.config.max_examples)


def _assign(fed: Federation, round: int, key: Key) -> tuple[Work, list[int]]:
    """The cohort's work, and the sampled clients that cannot answer."""
    devices, sampling = fed.config.devices, fed.config.sampling
    if devices.undisturbed:
        ids = sampling.choose(fed.task, round, key.fold("sample"), all_available)
        return Work.undisturbed(ids) if type(sampling) is UniformSampling else Work.of(ids), []  # those are sorted
    ids = sampling.choose(
        fed.task, round, key.fold("sample"), lambda some: devices.available(some, key.fold("available"))
    )
    links, epochs = devices.links(ids, key.fold("links")), devices.epochs_for(ids, key.fold("epochs"))
    if fed.resends or bool(links.all()):
        return Work.of(ids, epochs, links), []
    return Work.of(ids[links], epochs[links]), ids[~links].tolist()


def _read_ahead(fed: Federation, round: int) -> None:
    """Tell the task who takes part in the next round, so that it can read their data while this one is trained."""
    if fed.engine.trains_here and round <= fed.config.rounds and not fed.config.sampling.reads_data:
        fed.task.prefetch(lambda: _assign(fed, round, fed.root.fold("round", round))[0].ids)


def client_states(
    fed: Federation, state: ServerState, store: ClientStore, ids: Tensor, round: int = 0
) -> dict[int, State]:
    """Every client's state; a client without one gets its initial state."""
    clients = ids.tolist()
    known = _known(fed, store, clients)
    if not fed.engine.data_at_hand:
        return _with_new(fed, state, known, clients, round)
    known = fed.engine.read_states(known) if fed.engine.clients_keep_states and known else known
    return _initial(fed, state, clients, round, known)


def _known(fed: Federation, store: ClientStore, clients: list[int]) -> dict[int, State]:
    """The stored states, for algorithms whose clients keep one."""
    return store.get(clients) if fed.algorithm.stateful or fed.engine.clients_keep_states else {}


def _with_new(
    fed: Federation, state: ServerState, known: dict[int, State], clients: list[int], round: int
) -> dict[int, State]:
    new, algorithm = fed.new_clients, fed.algorithm
    if not fed.engine.data_at_hand and fed.engine.clients_keep_states:
        return {client: {} for client in clients} | known
    if not fed.engine.trains_here:
        return {client: {"new": algorithm.client_key(new, client, round)} for client in clients} | known
    return _initial(fed, state, clients, round, known)


def _initial(
    fed: Federation, state: ServerState, clients: list[int], round: int, known: dict[int, State]
) -> dict[int, State]:
    new, shared, algorithm = fed.new_clients, state["shared"], fed.algorithm
    if not algorithm.stateful and not algorithm.needs_fresh:
        return dict.fromkeys(clients, algorithm.init_client(shared, new, fed.task.objective.init))
    return {
        client: known[client]
        if client in known
        else algorithm.init_client(shared, algorithm.client_key(new, client, round), fed.task.objective.init)
        for client in clients
    }


def _run(fed: Federation, state: ServerState, states: dict[int, State], work: Work, ctx: Context) -> Outcome:
    if len(work) == 0:
        return Outcome(Cohort(work.ids, {}, {}), {})
    outcome = fed.engine(fed.algorithm, fed.task, state["shared"], states, work, ctx)
    check_outcome(outcome, work, fed.engine)
    return outcome


def _cross(fed: Federation, shared: Shared, cohort: Contributions) -> Contributions:
    """The cohort with its cross scores, measured where the data are."""
    if "cross_score" not in fed.algorithm.requires or not len(cohort):
        return cohort
    return cohort.with_cross(fed.engine.cross_score(fed.algorithm, fed.task, shared, cohort))


def _sent_down(
    fed: Federation, shared: Shared, work: Work, known: dict[int, State], outcome: Outcome, cohort: Contributions
) -> int:
    """What was sent to the clients: their orders, and the models of others where these are cross-scored."""
    orders = outcome.bytes_down
    if orders is None:
        strangers = sum(client not in known for client in work.clients) if known else len(work)
        orders = bytes_down(fed.algorithm, shared, len(work), strangers)
    return orders + cross_bytes(fed.algorithm, shared, cohort)


def _without_stragglers(
    fed: Federation, cohort: Contributions, shared: Shared
) -> tuple[Contributions, list[int], float]:
    """The cohort without clients that missed the deadline (or with their updates zeroed), and the simulated seconds."""
    devices = fed.config.devices
    if len(cohort) == 0 or not devices.takes_time:
        return cohort, [], devices.deadline or 0.0
    megabytes = cohort.stats["bytes_up"] / MEGABYTE
    spent = devices.seconds(cohort.ids, cohort.stats["num_steps"].nan_to_num(0.0), megabytes, fed.root.fold("devices"))
    late = devices.late(spent)
    if not bool(late.any()):
        return cohort, [], devices.round_seconds(spent)
    gone = cohort.ids[late]
    if fed.resends:
        return cohort.resend(gone, fed.algorithm.neutral(shared)), gone.tolist(), devices.round_seconds(spent)
    return cohort.select(cohort.ids[~late]), gone.tolist(), devices.round_seconds(spent)


def _counted(outcome: Outcome, work: Work, late: list[int], step: ServerStep) -> dict[int, State]:
    """The new states of clients whose contribution was used; all others keep their old state."""
    silent, counted = {*_silent(work), *late}, set(step.ids.tolist())
    return {client: state for client, state in outcome.states.items() if client in counted and client not in silent}


def _silent(work: Work) -> list[int]:
    """The clients whose link failed."""
    return [] if work.all_active else work.ids[~work.active].tolist()


def _describe(
    algorithm: Algorithm,
    state: ServerState,
    work: Work,
    cohort: Contributions,
    step: ServerStep,
    outcome: Outcome,
    down: int,
) -> dict[str, Any]:
    """The row of ``rounds.jsonl``: a function of the seed alone, never of the clock. Where something other than a
    model is exchanged, ``bytes_model`` is what the model would have cost in each direction."""
    came, stats = len(cohort), cohort.stats
    if len(step.ids) < came:
        counted = torch.isin(cohort.ids, step.ids)
        stats = {name: stats[name][counted] for name in ("num_steps", "train_loss")}
    model = {} if algorithm.target == "params" else {"bytes_model": _model_bytes(state) * len(work)}
    return model | {
        "ids": work.clients if step.ids is work.ids else step.ids.tolist(),
        "weights": _plain(step.weights),
        "num_steps": stats["num_steps"].tolist() if came else [],
        "train_loss": _mean(stats["train_loss"]) if came else None,
        "bytes_up": int(outcome.cohort.stats["bytes_up"].sum()) if len(outcome.cohort) else 0,
        "bytes_down": down,
        "dropped": {str(client): why for client, why in {**outcome.failures, **step.dropped}.items()},
        "info": {name: _plain(value) for name, value in step.info.items()},
    }


def _model_bytes(state: ServerState) -> int:
    return sum(tree.nbytes(state["shared"][part]) for part in ("params", "buffers"))


def _mean(values: Tensor) -> float | None:
    """The mean over clients that trained."""
    if not math.isnan(mean := float(values.mean())):
        return mean
    known = values[~values.isnan()]
    return float(known.mean()) if len(known) else None


def _plain(value: Any) -> Any:
    """Weights and info as JSON; element-wise weights are summarised by their mean over a leaf."""
    if isinstance(value, Tensor):
        return (value if value.dim() <= 1 else value.flatten(1).mean(1)).tolist()
    if isinstance(value, dict):
        return {name: _plain(leaf) for name, leaf in value.items()}
    return value
