"""What the packages promise each other: the four kinds of rule, and the engine, task and store around them.

Rules are frozen dataclasses that hold configuration only. Methods that are not abstract are *hooks*
whose default does nothing; filling one in is the only kind of overriding there is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from fedalloy.core import renamed
from fedalloy.core.declared import declared
from fedalloy.core.engine import Engine as Engine
from fedalloy.core.engine import Outcome as Outcome
from fedalloy.core.keys import Key
from fedalloy.core.length import AnyLength
from fedalloy.core.objective import ApplyCapability as ApplyCapability
from fedalloy.core.objective import Fresh as Fresh
from fedalloy.core.objective import GradAt as GradAt
from fedalloy.core.objective import Objective as Objective
from fedalloy.core.objective import Outputs as Outputs
from fedalloy.core.packing import Packings
from fedalloy.core.solver import LocalSolver as LocalSolver
from fedalloy.core.statistics import STATISTICS
from fedalloy.core.store import ClientStore as ClientStore
from fedalloy.core.task import Task as Task
from fedalloy.core.types import Carry as Carry
from fedalloy.core.types import (
    Context,
    Contributions,
    DataSpec,
    Info,
    Payload,
    State,
    Tree,
    Weights,
)
from fedalloy.core.types import DataPart as DataPart
from fedalloy.core.types import Shared as Shared
from fedalloy.core.weighting import ElementRound as ElementRound
from fedalloy.core.weighting import ElementWeighting as ElementWeighting
from fedalloy.core.weighting import Weighting as Weighting

ENGINE_STATS = frozenset(STATISTICS) - {"step_norm", "effective_steps"}
"""What every federation can provide by itself (:mod:`fedalloy.core.statistics` says what each is and its range).
``cross_score`` is no statistic of one client but a matrix, ``Cohort.cross``, from an exchange of its own
(``core.cross``). Losses and scores besides ``train_loss`` are measured only for rules that require them."""


class ServerOptimizer(AnyLength, ABC):
    """What the server does with the combined update."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse a class that answers a question by its old name."""
        super().__init_subclass__(**given)
        renamed.refuse_old_members(cls, renamed.SERVER)

    def bind(self, data_spec: DataSpec) -> ServerOptimizer:
        """The same optimizer knowing what it must know of the data, where samples are its target."""
        return self

    def init(self, target: Tree) -> State:
        """The optimizer's state before the first round."""
        return {}

    @abstractmethod
    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        """The moved target, the new state, and what was computed on the way."""


class Wire(AnyLength, ABC):
    """What happens to a contribution on its way: a client half and a server half of one idea."""

    @declared
    def stateful(self) -> bool:
        """Whether clients keep something between rounds (an error memory, say)."""
        return False

    @declared
    def needs_weight_bound(self) -> bool:
        """Whether the transform means something only when no client's weight can grow without bound."""
        return False

    @declared
    def changes(self) -> frozenset[str] | None:
        """The sent parts that the transform works on; None: whatever is sent."""
        return None

    @declared
    def clips(self) -> bool:
        """Whether what leaves the transform has a known greatest length."""
        return False

    @declared
    def needs_clipping(self) -> bool:
        """Whether the transform means something only directly behind one that ``clips``, on every part that is sent."""
        return False

    def init_client(self, shared: Shared, key: Key) -> State:
        """What the client half keeps before its first round."""
        return {}

    def draws(self, shared: Shared, keys: Key) -> Tree:
        """Random inputs of the client half, ``[C, ...]`` each."""
        return {}

    @abstractmethod
    def encode(self, payload: Payload, mine: State, draws: Tree) -> tuple[Payload, State]:
        """The client half: what is sent instead, and what is kept. Pure and vmappable."""

    def after(self, aggregate: Payload, cohort: Contributions, weights: Weights, ctx: Context) -> Payload:
        """The server half, on the combined parts; transforms are undone in reverse order."""
        return aggregate

    def packings(self, before: Packings) -> Packings:
        """How parts lie on the wire after this transform, where they lay there as ``before``. A transform that says
        nothing may have changed any number: then plain tensors travel."""
        return {}
