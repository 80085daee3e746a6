"""Engines: they run the client half over a cohort, and answer what the driver must know of where the clients are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from fedalloy.core.contributions import EVERYTHING, QUESTIONS
from fedalloy.core.declared import declared
from fedalloy.core.errors import SpecError
from fedalloy.core.types import Context, Contributions, Shared, State, Work

if TYPE_CHECKING:
    from fedalloy.core.algorithm import Algorithm
    from fedalloy.core.protocols import Task

ModelName = Literal["global", "personal"] | float
"""The model that is scored: the common one, a client's own, or so much of the local one mixed in."""
Scores = list[dict[str, Tensor]]
"""One value per client, by metric, once per model."""


@dataclass(frozen=True)
class Outcome:
    """What an engine returns: the cohort, the clients' new states, and who failed and why. ``bytes_down`` is what
    really went to the clients, from engines that send something; None: what a round without trouble sends."""

    cohort: Contributions
    states: dict[int, State]
    failures: dict[int, str] = field(default_factory=dict)
    bytes_down: int | None = None


ROUND_STATS = ("bytes_up", "num_steps", "train_loss")
"""Statistics that a round looks at whatever the weighting; those that the weighting requires come besides."""


class Engine(ABC):
    """Runs the client half over a cohort; a new engine inherits from this class and writes ``__call__``.

    Everything else answers questions of the driver, for engines in one process with the data. An engine whose clients
    are somewhere else says so and answers them otherwise.
    """

    data_at_hand: ClassVar[bool] = True
    """Whether the clients' data can be read here. If not, clients look at their data and score models themselves."""
    clients_keep_states: ClassVar[bool] = False
    """Whether the clients' states stay where the clients are. What the server holds of a state is then a mark:
    ``{"round": r}`` with the round in which the state that counts was made, ``{}`` before the first."""
    answers: ClassVar[frozenset[str]] = EVERYTHING
    """What its contributions can be asked, of ``core.contributions.QUESTIONS``."""
    fixed_options: ClassVar[bool] = True
    """Whether a run must be resumed with the options it was begun with."""

    @declared
    def choice(self) -> Mapping[str, Any]:
        """What an engine that chooses has chosen; kept with the run, and told to ``restore`` when it is resumed."""
        return {}

    @abstractmethod
    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        """One round of local work."""

    def cross_score(self, algorithm: Algorithm, task: Task, shared: Shared, cohort: Contributions) -> Tensor:
        """``[C, C]``: the accuracy of every client's model on every client's validation part, NaN where unknown."""
        from fedalloy.core.cross import cross_scores  # which builds on algorithms, and those on the protocols

        with torch.no_grad():
            valid = task.data("valid", cohort.ids)
            return cross_scores(task.objective, shared, cohort, valid, algorithm.solver.update)

    def scores(
        self,
        algorithm: Algorithm,
        shared: Shared,
        states: Mapping[int, State],
        ids: Tensor,
        metrics: tuple[str, ...],
        models: Sequence[ModelName],
    ) -> Scores:
        """Every client's metrics on its own test part, ``[K]`` each, once per model; NaN for who does not answer.
        Asked only where the data are not at hand."""
        raise SpecError(
            f"engine {type(self).__name__} says that the clients' data are not at hand, so it must write 'scores'"
        )

    def notes(self) -> dict[str, Any]:
        """What has happened since the last call, for the record of a round."""
        return {}

    def restore(self, choice: Mapping[str, Any]) -> None:
        """Stay with what an earlier session of the same run chose."""
        return

    def limit_threads(self, threads: int) -> None:
        """Use no more cores than this."""
        return

    def close(self) -> None:
        """Let go of processes and memory; the next call gets new ones."""
        return


def check_answers(engine: Engine, algorithm: Algorithm) -> None:
    """Refuse, before the first round, an algorithm that asks for what the engine's contributions do not answer."""
    missing = sorted(algorithm.asks - engine.answers)
    if missing:
        answers = ", ".join(sorted(engine.answers)) or "nothing"
        raise SpecError(
            f"{_who_asks(algorithm, missing[0])} needs {QUESTIONS[missing[0]]} ('{missing[0]}'), which engine "
            f"{type(engine).__name__} does not give; it answers: {answers}"
        )


def check_engine_kind(engine: object, where: str) -> None:
    """Refuse what is no engine before anything is done with it."""
    if not isinstance(engine, Engine):
        raise SpecError(
            f"{where} must be an engine, got {type(engine).__name__}: an engine of one's own inherits from "
            f"{Engine.__module__}.{Engine.__name__}, which lists what it must have and gives the rest a default"
        )


def check_outcome(outcome: object, work: Work, engine: Engine) -> None:
    """Refuse an answer of an engine in which a client stands twice, out of order or unasked: it would be counted so."""
    name = type(engine).__name__
    if not isinstance(outcome, Outcome):
        raise SpecError(f"engine {name} must return a fedalloy.core.engine.Outcome, got {type(outcome).__name__}")
    ids, stats = outcome.cohort.ids, outcome.cohort.stats
    if len(ids) == 0:
        return
    if not bool((ids[1:] > ids[:-1]).all()) or (not torch.equal(ids, work.ids) and not _all_among(ids, work.ids)):
        raise SpecError(
            f"engine {name} returned the clients {ids.tolist()}: allowed are those that were asked, each once and in "
            f"ascending order, of {work.ids.tolist()}"
        )
    if lacking := [stat for stat in ROUND_STATS if stat not in stats]:
        raise SpecError(f"engine {name} returned no '{lacking[0]}' of its clients; needed: {', '.join(ROUND_STATS)}")


def _all_among(ids: Tensor, asked: Tensor) -> bool:
    return bool(torch.isin(ids, asked).all())


def _who_asks(algorithm: Algorithm, question: str) -> str:
    """The rule by name: what is stacked is stacked for the solver."""
    by_solver = question == "stack" and question not in algorithm.weighting.asks
    category, rule = ("solver", algorithm.solver) if by_solver else ("weighting", algorithm.weighting)
    return f"{category} '{type(rule).__name__}'"
