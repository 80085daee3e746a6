"""Engines run the client half over a cohort, and tell the driver where clients and data are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from fedalloy.core.contributions import EVERYTHING, QUESTIONS
from fedalloy.core.declared import declared
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.core.gathering import Storage
from fedalloy.core.store import Kept, StoredStates
from fedalloy.core.types import Context, Contributions, Shared, State, Work

if TYPE_CHECKING:
    from fedalloy.core.algorithm import Algorithm
    from fedalloy.core.protocols import Task

ModelName = Literal["global", "personal"] | float
"""The model that is scored: the shared one, the client's personal one, or a mix with this share of the local one."""
Scores = list[dict[str, Tensor]]
"""One value per client, by metric, once per model."""


@dataclass(frozen=True)
class Outcome:
    """The result of an engine: the cohort, the clients' new states, and the failed clients with reasons. ``bytes_down``
    is the measured download, from engines that send something; None: that of a round without failures."""

    cohort: Contributions
    states: dict[int, State]
    failures: dict[int, str] = field(default_factory=dict)
    bytes_down: int | None = None


ROUND_STATS = ("bytes_up", "num_steps", "train_loss")
"""Statistics that every round needs, in addition to those that the weighting requires."""


class Engine(ABC):
    """Runs the client half over a cohort; a new engine inherits from this class and implements ``__call__``.

    The other members have defaults for engines in the same process as the data. An engine with remote clients overrides
    them.
    """

    data_at_hand: ClassVar[bool] = True
    """Whether the clients' data can be read in this process. If not, clients score models themselves."""
    clients_keep_states: bool = False
    """Whether the clients' states are kept elsewhere. The server then holds a marker instead of a state:
    ``{"round": r}`` with the round in which the valid state was made; none, or ``{}``, before the first."""
    trains_here: ClassVar[bool] = True
    """Whether clients train in this process or in processes that share its memory. If not, the data of a cohort are
    read elsewhere, and a client without a state gets ``{"new": key}``: its first state is made where it trains."""
    answers: ClassVar[frozenset[str]] = EVERYTHING
    """Which of ``core.contributions.QUESTIONS`` its contributions answer."""
    fixed_options: ClassVar[bool] = True
    """Whether a run must be resumed with the options it was started with."""
    free_options: ClassVar[frozenset[str]] = frozenset()
    """Options that may change when a run is resumed all the same, because no number depends on them."""
    uses_storage: ClassVar[bool] = True
    """Whether ``storage`` says where its contributions are kept."""

    storage: Storage | None = None
    """Where its contributions are kept, for engines in this process; None: in memory."""

    @declared
    def choice(self) -> Mapping[str, Any]:
        """The choices of an engine that makes some; stored with the run and passed to ``restore`` on resume."""
        return {}

    @abstractmethod
    def __call__(
        self, algorithm: Algorithm, task: Task, shared: Shared, states: Mapping[int, State], work: Work, ctx: Context
    ) -> Outcome:
        """One round of local work."""

    def cross_score(self, algorithm: Algorithm, task: Task, shared: Shared, cohort: Contributions) -> Tensor:
        """``[C, C]``: the accuracy of every client's model on every client's validation part, NaN where unknown."""
        from fedalloy.core.cross import cross_scores  # imports algorithms, which import this module

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
        """Every client's metrics on its own test part, ``[K]`` each, once per model; NaN for a client that does not
        answer. Called only if ``data_at_hand`` is false."""
        raise SpecError(
            f"engine {type(self).__name__} declares that the clients' data are not at hand: it must implement 'scores'"
        )

    def test_sizes(self, ids: Tensor) -> Tensor:
        """How many targets of every client's test part count, ``[K]``, as told with the latest ``scores``; NaN: not
        told."""
        return torch.full((len(ids),), torch.nan, dtype=torch.float64)

    def notes(self) -> dict[str, Any]:
        """Events since the last call, for the record of a round."""
        return {}

    def incidents(self) -> dict[str, Any]:
        """What happened to processes and machines since the last call, for the timings of a round: these alone may
        differ between two runs of one seed."""
        return {}

    def check_place(self) -> None:
        """Refuse a place for states that cannot be used; called before the folder of a run is made or changed."""
        return

    def claim_states(self, run: str) -> None:
        """Keep states for this run only; called before the first round where ``clients_keep_states``."""
        return

    def read_states(self, markers: Mapping[int, State]) -> dict[int, State]:
        """The states that markers stand for; called only where both ``clients_keep_states`` and ``data_at_hand``."""
        raise SpecError(f"engine {type(self).__name__} keeps the clients' states: it must implement 'read_states'")

    def check_states(self, kept: Kept) -> None:
        """Refuse, by a ``CheckpointError``, what a checkpoint holds of the clients if this engine cannot continue from
        it; called before a run is resumed where clients keep states."""
        markers = [_is_marker(state) for state in kept.values() if state]
        if any(markers) and not self.clients_keep_states:
            raise CheckpointError(
                "the states of this run's clients are not in its folder, but where the engine kept them that it began "
                "with (the folder 'states' of engine 'ray', or the nodes of a federation): resume it with that engine "
                "and its options"
            )
        here = isinstance(kept, StoredStates) or (not all(markers) and not self.data_at_hand)
        if here and self.clients_keep_states:
            raise CheckpointError(
                f"the states of this run's clients are in its folder, and engine {type(self).__name__} keeps them "
                "elsewhere: resume it with the engine and the options that it began with"
            )

    def checkpointed(self, round: int, markers: Mapping[int, State]) -> None:
        """A checkpoint with these markers was written; called only where ``clients_keep_states``."""
        return

    def restore(self, choice: Mapping[str, Any]) -> None:
        """Keep the choices of an earlier session of the same run."""
        return

    def keep_contributions(self, storage: Storage) -> None:
        """Keep contributions in memory or on disk, as ``storage`` says."""
        object.__setattr__(self, "storage", storage)  # an engine may be frozen

    def limit_threads(self, threads: int) -> None:
        """Use at most this many threads."""
        return

    def close(self) -> None:
        """Release processes and memory; the next call starts new ones."""
        return


def _is_marker(state: State) -> bool:
    return state.keys() == {"round"}


def check_answers(engine: Engine, algorithm: Algorithm) -> None:
    """Refuse, before the first round, an algorithm that asks for something the engine's contributions do not answer."""
    missing = sorted(algorithm.asks - engine.answers)
    if missing:
        answers = ", ".join(sorted(engine.answers)) or "nothing"
        raise SpecError(
            f"{_who_asks(algorithm, missing[0])} needs {QUESTIONS[missing[0]]} ('{missing[0]}'), which engine "
            f"{type(engine).__name__} does not provide; it answers: {answers}"
        )


def check_engine_kind(engine: object, where: str) -> None:
    """Refuse an object that is not an engine."""
    if not isinstance(engine, Engine):
        raise SpecError(
            f"{where} must be an engine, got {type(engine).__name__}: a custom engine inherits from "
            f"{Engine.__module__}.{Engine.__name__}, which lists its required members and has defaults for the rest"
        )


def check_outcome(outcome: object, work: Work, engine: Engine) -> None:
    """Refuse an outcome with duplicate, unsorted or unexpected clients, which would be counted wrongly."""
    name = type(engine).__name__
    if not isinstance(outcome, Outcome):
        raise SpecError(f"engine {name} must return a fedalloy.core.engine.Outcome, got {type(outcome).__name__}")
    ids, stats = outcome.cohort.ids, outcome.cohort.stats
    if len(ids) == 0:
        return
    in_order = ids is work.ids and work.ascending
    if not in_order and not _some_of(ids, work.ids):
        raise SpecError(
            f"engine {name} returned the clients {ids.tolist()}: allowed are those of {work.ids.tolist()}, each at "
            "most once and in ascending order"
        )
    if lacking := [stat for stat in ROUND_STATS if stat not in stats]:
        raise SpecError(f"engine {name} returned no '{lacking[0]}' for its clients; needed: {', '.join(ROUND_STATS)}")


def _some_of(ids: Tensor, asked: Tensor) -> bool:
    """Whether ids are in ascending order and among those that were asked."""
    ascending = bool((ids[1:] > ids[:-1]).all())
    return ascending and (torch.equal(ids, asked) or bool(torch.isin(ids, asked).all()))


def _who_asks(algorithm: Algorithm, question: str) -> str:
    """The rule that asks, by category and name; parts are stacked for the solver unless the weighting asks for them."""
    by_solver = question == "stack" and question not in algorithm.weighting.asks
    category, rule = ("solver", algorithm.solver) if by_solver else ("weighting", algorithm.weighting)
    return f"{category} '{type(rule).__name__}'"
