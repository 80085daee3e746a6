"""Checks that an engine does what the loop does: both run the same rounds, and cohorts and states are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from fedalloy.core.algorithm import ServerState, server_step
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Engine, Outcome, Shared
from fedalloy.core.types import Context, Contributions, Payload, State, Work
from fedalloy.engines.loop import Loop
from fedalloy.testing.answers import answered
from fedalloy.testing.cases import EngineCase, engine_cases
from fedalloy.testing.comparing import copied, differences

TOLERANCE = 1e-9
"""Largest error in float64, relative to ``max(1, |value|)``."""


@dataclass(frozen=True)
class Problem:
    """A difference between an engine and the loop."""

    case: str
    round: int
    what: str

    def __str__(self) -> str:
        return f"case '{self.case}', round {self.round}: {self.what}"


def check_engine(
    engine: Engine, cases: Iterable[EngineCase] | None = None, tolerance: float = TOLERANCE
) -> list[Problem]:
    """Run every case with the engine and with the loop; empty when they agree.

    A case ends with the first round in which something differs. In every first round the engine also runs
    twice: the second result must equal the first bit for bit, and the inputs must not change.

    >>> from fedalloy.engines.loop import Loop
    >>> from fedalloy.testing.cases import plain_case
    >>> check_engine(Loop(), [plain_case()])
    []
    """
    return [problem for case in cases or engine_cases() for problem in _run_rounds(engine, case, tolerance)]


@dataclass
class _Track:
    """The progress of one engine in a case."""

    case: EngineCase
    engine: Engine
    state: ServerState = field(init=False)
    first: Shared = field(init=False)
    clients: dict[int, State] = field(default_factory=dict)
    kept: tuple[Contributions, dict[str, Any]] | None = None
    cross: Tensor | None = None

    def __post_init__(self) -> None:
        self.case = replace(self.case, algorithm=self.case.algorithm.bind(self.case.task))
        params, buffers = self.case.task.objective.init(Key.of(1))
        self.state = self.case.algorithm.init(params, self.case.task.population, buffers)
        self.first = self.state["shared"]

    def inputs(self, work: Work) -> dict[int, State]:
        """The states of the working clients; a new client gets its initial state."""
        fresh = Key.of(2)
        return {
            client: self.clients[client]
            if client in self.clients
            else self.case.algorithm.init_client(
                self.state["shared"], fresh.fold(client), self.case.task.objective.init
            )
            for client in work.ids.tolist()
        }

    def neutral(self) -> Payload:
        """The contribution that replaces a late client's; always from the first state."""
        return self.case.algorithm.neutral(self.first)

    def call(self, work: Work, ctx: Context) -> Outcome:
        """Call the engine, with only what an engine may use."""
        shared = self.state["shared"]
        return self.engine(self.case.algorithm, self.case.task, shared, self.inputs(work), work, ctx)

    def advance(self, outcome: Outcome, ctx: Context) -> None:
        """The server's half of the round."""
        self.clients |= outcome.states
        self.kept = outcome.cohort.keep(), copied(answered(outcome.cohort, self.neutral()))
        algorithm, cohort = self.case.algorithm, outcome.cohort
        if "cross_score" in algorithm.weighting.requires:
            self.cross = self.engine.cross_score(algorithm, self.case.task, self.state["shared"], cohort)
            cohort = cohort.with_cross(self.cross)
        self.state = server_step(algorithm, self.state, cohort, ctx).state


def _run_rounds(engine: Engine, case: EngineCase, tolerance: float) -> Iterator[Problem]:
    truth, tried = _Track(case, Loop()), _Track(case, engine)
    for round, work in enumerate(case.rounds, start=1):
        found = list(_one_round(truth, tried, round, work, tolerance))
        yield from (Problem(case.name, round, what) for what in found)
        if found:
            return


def _one_round(truth: _Track, tried: _Track, round: int, work: Work, tolerance: float) -> Iterator[str]:
    ctx = _context(truth.case, round)
    expected = truth.call(work, ctx)
    try:
        if round == 1:
            yield from _twice(tried, work, ctx)
        outcome = tried.call(work, ctx)
        yield from _unchanged(tried)
        told = _told(outcome, tried)
        tried.advance(outcome, ctx)
    except Exception as error:
        yield f"{type(error).__name__}: {error}"
        return
    wanted = _told(expected, truth)
    truth.advance(expected, ctx)
    yield from differences(_visible(told, tried), _visible(wanted, truth), tolerance)


def _unchanged(track: _Track) -> Iterator[str]:
    """What was kept from the previous round is not changed by this one."""
    if track.kept is not None:
        kept, before = track.kept
        for place in differences(answered(kept, track.neutral()), before):
            yield f"kept contributions changed with the engine's next call: {place}"


def _twice(track: _Track, work: Work, ctx: Context) -> Iterator[str]:
    """A second call gives the same result, and inputs are not changed."""
    before = copied({"shared": track.state["shared"], "work": _fields(work)})
    first = copied(_told(track.call(work, ctx), track))
    second = track.call(work, ctx)
    for place in differences(_told(second, track), first):
        yield f"a second call gives another result: {place}"
    for place in differences({"shared": track.state["shared"], "work": _fields(work)}, before):
        yield f"the engine changed its inputs: {place}"


def _context(case: EngineCase, round: int) -> Context:
    rounds = len(case.rounds)
    lr = case.algorithm.solver.lr_at(round, rounds)
    return Context(round, case.task.population, Key.of(3).fold("round", round), lr, rounds)


def _visible(told: dict[str, Any], track: _Track) -> dict[str, Any]:
    """The results of a round; where clients keep no state, engines may omit it."""
    told = {**told, "server": track.state} | ({} if track.cross is None else {"cross": track.cross})
    return told if track.case.algorithm.stateful else {name: told[name] for name in told if name != "states"}


def _told(outcome: Outcome, track: _Track) -> dict[str, Any]:
    """What an engine returns, before the server's step."""
    return {
        **answered(outcome.cohort, track.neutral()),
        "states": {str(client): state for client, state in outcome.states.items()},
        "failures": {str(client): why for client, why in outcome.failures.items()},
    }


def _fields(work: Work) -> dict[str, Any]:
    """What an engine gets as its work, without what is kept beside it once it was asked for."""
    return {one.name: getattr(work, one.name) for one in fields(work)}
