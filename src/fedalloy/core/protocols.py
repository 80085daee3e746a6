"""What the rooms promise each other: the four kinds of rule, and the engine, task and store around them.

Rules are frozen dataclasses that hold configuration only. Methods that are not abstract are *hooks*
whose default does nothing; filling one in is the only kind of overriding there is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from fedalloy.core.engine import Engine as Engine
from fedalloy.core.engine import Outcome as Outcome
from fedalloy.core.keys import Key
from fedalloy.core.length import AnyLength
from fedalloy.core.names import NO_NAMES, Names
from fedalloy.core.objective import Act as Act
from fedalloy.core.objective import Fresh as Fresh
from fedalloy.core.objective import GradAt as GradAt
from fedalloy.core.objective import Objective as Objective
from fedalloy.core.objective import Outputs as Outputs
from fedalloy.core.packing import Packings
from fedalloy.core.statistics import STATISTICS, Statistic
from fedalloy.core.store import ClientStore as ClientStore
from fedalloy.core.task import Task as Task
from fedalloy.core.types import Carry as Carry
from fedalloy.core.types import (
    Context,
    Contributions,
    Descent,
    Facts,
    Info,
    Mixture,
    Part,
    Payload,
    Plan,
    State,
    Stats,
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


class LocalSolver(AnyLength, ABC):
    """What a client does with the received parts and its data. Pure and vmappable.

    A solver writes ``begin``, ``step`` and ``end``; gradients come only through ``grad_at``.
    """

    @property
    def parts(self) -> Mapping[str, Part]:
        """What is sent, by name."""
        return {"delta": Part()}

    @property
    def target(self) -> str:
        """The shared part that the server optimizer moves."""
        return "params"

    @property
    def update(self) -> str:
        """The sent part that moves the target."""
        return "delta"

    @property
    def provides(self) -> frozenset[str]:
        """Statistics this solver adds to those of the engine (see ``describe``)."""
        return frozenset()

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        """What is true of the statistics of its own that it provides; one that is not declared is any finite number."""
        return {}

    @property
    def counts_idle(self) -> bool:
        """Whether a client that took no step counts as far as this solver is concerned (see ``Weighting``). Not where
        a part that it sends is averaged over clients whoever they are."""
        return all(part.reduce != "mean" for part in self.parts.values())

    @property
    def stateful(self) -> bool:
        """Whether clients keep something between rounds."""
        return False

    @property
    def personalised(self) -> bool:
        """Whether clients have a model of their own (see ``personal``)."""
        return False

    @property
    def mixable(self) -> bool:
        """Whether ``personal`` takes a mixing coefficient in [0, 1]."""
        return False

    @property
    def stays(self) -> Names:
        """Leaves of the model, buffers included, that never leave the client; its state holds their values."""
        return NO_NAMES

    @property
    def own_start(self) -> bool:
        """Whether ``init_client`` needs a model drawn for this client alone: the part ``fresh`` it then receives. For
        clients that keep nothing it is drawn anew in every round."""
        return False

    @property
    def receives(self) -> frozenset[str] | None:
        """The shared parts that travel to the clients; None: all of them."""
        return None

    def fitted(self, facts: Facts) -> LocalSolver:
        """The same solver knowing what it must know of the data, for methods that exchange no parameters. Refuses data
        it cannot work on."""
        return self

    @property
    def roles(self) -> frozenset[str]:
        """What the model must do besides ``classify``, by name: ``generate``, ``judge``, ``reconstruct``, ..."""
        return frozenset()

    @property
    def descent(self) -> Descent | None:
        """What this solver's program is made of, if it is plain descent (then engines may fuse it)."""
        return None

    @property
    def mixture(self) -> Mixture | None:
        """The same for descent on a federated and a local model at once."""
        return None

    @abstractmethod
    def lr_at(self, round: int, rounds: int | None = None) -> float:
        """The local step size in force in a round (counted from 1)."""

    @abstractmethod
    def plan(self, sizes: Tensor, epochs: Tensor, keys: Key) -> Plan:
        """The local steps of a block of clients: ``sizes`` and ``epochs`` are ``[C]``, ``keys`` a batch of C."""

    def count_steps(self, sizes: Tensor, epochs: Tensor) -> Tensor:
        """How many steps ``plan`` makes for each client, ``[C]``: the server counts them itself, wherever the data are.
        A formula is worth having, because a client far away may claim any size."""
        return self.plan(sizes, epochs, Key.of(0).each(torch.arange(len(sizes)))).steps

    def draws(self, plan: Plan, keys: Key, shared: Shared) -> Tree:
        """Random inputs of the program, ``[C, S, ...]`` each."""
        return {}

    def init_shared(self, params: Tree) -> Shared:
        """Further shared parts, besides ``params`` and ``buffers``."""
        return {}

    def init_client(self, shared: Shared, key: Key) -> State:
        """What a client keeps before its first round."""
        return {}

    def start_model(self, shared: Shared, mine: State) -> tuple[Tree, Tree]:
        """The parameters and buffers a client begins its round with: what was received, its own leaves in place.
        ``loss_before`` is measured on them. Pure and vmappable, like ``personal``."""
        return shared[self.target], shared["buffers"]

    def personal(self, shared: Shared, mine: State, mix: float | None = None) -> tuple[Tree, Tree]:
        """The parameters and buffers a client itself uses, outside of training.

        ``mix`` is for ``mixable`` solvers: ``(1 - mix)`` federated plus ``mix`` local; None is the method's own choice.
        """
        return shared["params"], shared["buffers"]

    @abstractmethod
    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        """The carry before the first step."""

    @abstractmethod
    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        """One local step."""

    def conclude(self, carry: Carry, shared: Shared, outputs: Outputs) -> Carry:
        """Work with the trained model that needs no batch, between the last step and ``end``."""
        return carry

    @abstractmethod
    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        """What is sent and what is kept, after ``steps`` steps (a float scalar tensor, possibly 0)."""

    def settle(self, mine: State, buffers: Tree) -> State:
        """The state with the trained ``buffers`` that stay in it."""
        return mine

    def describe(self, steps: Tensor, ctx: Context) -> Stats:
        """The statistics named in ``provides``, from the planned steps of a block ``[C]``."""
        return {}

    def absorb(self, shared: Shared, aggregate: Payload, cohort: Contributions, ctx: Context) -> Shared:
        """The shared parts after the round; the target has been moved already."""
        return shared

    def synthesise(
        self, shared: Shared, key: Key, per_class: int, objective: Objective
    ) -> tuple[Tensor, Tensor] | None:
        """Labelled synthetic examples ``(x, y)``, about ``per_class`` of every class, from what everybody knows; None
        where the method makes none."""
        return None

    def trained(self, carry: Carry) -> Tree:
        """The client's model after local training, on which ``accuracy_after`` is measured."""
        model: Tree = carry["params"]
        return model


class ServerOptimizer(AnyLength, ABC):
    """What the server does with the combined update."""

    def fitted(self, facts: Facts) -> ServerOptimizer:
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

    @property
    def stateful(self) -> bool:
        """Whether clients keep something between rounds (an error memory, say)."""
        return False

    @property
    def needs_weight_bound(self) -> bool:
        """Whether the transform means something only when no client's weight can grow without bound."""
        return False

    @property
    def changes(self) -> frozenset[str] | None:
        """The sent parts that the transform works on; None: whatever is sent."""
        return None

    @property
    def clips(self) -> bool:
        """Whether what leaves the transform has a known greatest length."""
        return False

    @property
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
