"""The interfaces between the packages: the four kinds of rule, and engine, task and store.

Rules are frozen dataclasses that hold configuration only. Methods that are not abstract are *hooks*
whose default does nothing; subclasses override hooks and nothing else.
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
"""Statistics that every engine can provide (:mod:`fedalloy.core.statistics` has their meanings and ranges).
``cross_score`` is not one number per client but a matrix, ``Cohort.cross``, from a separate exchange
(``core.cross``). Losses and scores besides ``train_loss`` are measured only for rules that require them."""


class ServerOptimizer(AnyLength, ABC):
    """What the server does with the combined update."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse a class that defines a member by its old name."""
        super().__init_subclass__(**given)
        renamed.refuse_old_members(cls, renamed.SERVER)

    def bind(self, data_spec: DataSpec) -> ServerOptimizer:
        """The same optimizer, bound to a data spec, for optimizers whose target is samples."""
        return self

    def init(self, target: Tree) -> State:
        """The optimizer's state before the first round."""
        return {}

    @abstractmethod
    def apply(self, update: Tree, state: State, target: Tree, ctx: Context) -> tuple[Tree, State, Info]:
        """The updated target, the new state, and info for the records."""


class Wire(AnyLength, ABC):
    """A transform of contributions between client and server, with a client half and a server half."""

    @declared
    def stateful(self) -> bool:
        """Whether clients keep state between rounds (such as the residual of error feedback)."""
        return False

    @declared
    def needs_weight_bound(self) -> bool:
        """Whether the transform only makes sense with a weighting that bounds one client's weight."""
        return False

    @declared
    def changes(self) -> frozenset[str] | None:
        """The sent parts that the transform works on; None: all of them."""
        return None

    @declared
    def clips(self) -> bool:
        """Whether the transform bounds the length of its output."""
        return False

    @declared
    def needs_clipping(self) -> bool:
        """Whether the transform only makes sense directly after one that ``clips``, on every part that is sent."""
        return False

    def init_client(self, shared: Shared, key: Key) -> State:
        """The client half's state before its first round."""
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
        """The packed forms of parts after this transform, given those ``before`` it. By default none: a transform may
        have changed any number, so plain tensors are sent."""
        return {}
