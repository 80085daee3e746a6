"""What only some solvers are: personal, generative, fusible, ... A solver inherits from the classes that fit it.

Whoever runs solvers asks through the functions below, whose answers hold for solvers that are none of it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor

from fedalloy.core import renamed
from fedalloy.core.declared import declared
from fedalloy.core.keys import Key
from fedalloy.core.names import NO_NAMES, Names
from fedalloy.core.objective import Objective, Outputs
from fedalloy.core.statistics import Statistic
from fedalloy.core.types import Carry, Context, DataSpec, Shared, State, Stats, Tree

if TYPE_CHECKING:
    from fedalloy.core.solver import LocalSolver

Model = tuple[Tree, Tree]
"""Parameters and buffers."""


class Personalised:
    """Clients have a model of their own, outside of training: they are scored with it."""

    @declared
    def mixable(self) -> bool:
        """Whether ``personal`` takes a mixing coefficient in [0, 1]."""
        return False

    def personal(self, shared: Shared, mine: State, mix: float | None = None) -> Model:
        """The parameters and buffers a client itself uses. Pure and vmappable. ``mix`` is for ``mixable`` solvers:
        ``(1 - mix)`` federated plus ``mix`` local; None is the method's own choice."""
        return shared["params"], shared["buffers"]


class PartlyLocal:
    """Some leaves of the model, buffers included, never leave the client; its state holds their values."""

    @declared
    def local_leaves(self) -> Names:
        """Those leaves."""
        return NO_NAMES

    def keep_local_buffers(self, mine: State, buffers: Tree) -> State:
        """The state with the trained ``buffers`` that stay in it."""
        return mine


class OwnStart:
    """Clients do not all begin a round with the model that was received."""

    @declared
    def needs_fresh(self) -> bool:
        """Whether ``init_client`` needs a model drawn for this client alone: the part ``fresh`` it then receives. For
        clients that keep nothing it is drawn again in every round."""
        return False

    def start_model(self, shared: Shared, mine: State) -> Model:
        """The parameters and buffers a client begins its round with; ``loss_before`` is measured on them. Pure and
        vmappable."""
        return shared["params"], shared["buffers"]


class Generative:
    """What is learned makes examples."""

    @declared
    def capabilities(self) -> frozenset[str]:
        """What the model must do besides ``classify``, by name: ``generate``, ``judge``, ``reconstruct``, ..."""
        return frozenset()

    @declared
    def models(self) -> tuple[str, ...]:
        """Models of the house that can do it, for whoever brought another."""
        return ()

    @declared
    def receives(self) -> frozenset[str] | None:
        """The shared parts that travel to the clients; None: all of them."""
        return None

    @declared
    def holds_per_class(self) -> int:
        """How many examples of every class it holds already and hands out whoever asks for fewer."""
        return 0

    def post_train(self, carry: Carry, shared: Shared, outputs: Outputs) -> Carry:
        """Work with the trained model that needs no batch, between the last step and ``end``."""
        return carry

    def synthesise(self, shared: Shared, key: Key, per_class: int, objective: Objective) -> tuple[Tensor, Tensor]:
        """Labelled synthetic examples ``(x, y)``, about ``per_class`` of every class, from what everybody knows."""
        raise NotImplementedError(f"{type(self).__name__} says that it is generative and must write 'synthesise'")


class Describes:
    """It adds statistics of its own to those of the engine."""

    @declared
    def provides(self) -> frozenset[str]:
        """Their names."""
        return frozenset()

    @declared
    def statistics(self) -> Mapping[str, Statistic]:
        """What is true of them; one that is not declared is any finite number."""
        return {}

    def describe(self, steps: Tensor, ctx: Context) -> Stats:
        """The statistics named in ``provides``, from the planned steps of a block ``[C]``."""
        return {}


class CountsSteps:
    """It knows a formula for the number of its steps: the server counts them itself, wherever the data are. Worth
    having, because a client far away may claim any size."""

    def count_steps(self, sizes: Tensor, epochs: Tensor) -> Tensor:
        """How many steps ``plan`` makes for each client, ``[C]``."""
        raise NotImplementedError(f"{type(self).__name__} says that it counts its steps and must write 'count_steps'")


class BindsToData:
    """It must know something of the data."""

    @declared
    def needs_data_spec(self) -> bool:
        """Whether it is asked for every model that clients train; if not, only where they train something else, or
        where examples of a batch see each other. Looking at the data costs a pass through the model."""
        return True

    def bind(self, data_spec: DataSpec) -> Self:
        """The same solver knowing it. Refuses data it cannot work on."""
        return self


@dataclass(frozen=True)
class Fusing:
    """What a local program is made of, if it is of a ``kind`` that engines may have a kernel for, and its numbers.
    :mod:`fedalloy.engines.kinds` says which kinds there are and what a solver of each promises."""

    kind: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class Fusible:
    """Engines may use a kernel of their own in place of its steps. One around another is never so by its inside."""

    @declared
    def fusing(self) -> Fusing | None:
        """What the program is made of; None where these settings have no kernel."""
        return None


ASPECTS = (Personalised, PartlyLocal, OwnStart, Generative, Describes, CountsSteps, BindsToData, Fusible)


def local_leaves(solver: LocalSolver) -> Names:
    """Leaves of the model that never leave the client."""
    found = solver.aspect(PartlyLocal)
    return NO_NAMES if found is None else found.local_leaves


def keep_local_buffers(solver: LocalSolver, mine: State, buffers: Tree) -> State:
    """The state with the trained buffers that stay in it."""
    found = solver.aspect(PartlyLocal)
    return mine if found is None else found.keep_local_buffers(mine, buffers)


def needs_fresh(solver: LocalSolver) -> bool:
    """Whether a client's first state needs a model drawn for it alone."""
    found = solver.aspect(OwnStart)
    return found is not None and found.needs_fresh


def start_model(solver: LocalSolver, shared: Shared, mine: State) -> Model:
    """The parameters and buffers a client begins its round with."""
    found = solver.aspect(OwnStart)
    return (shared[solver.target], shared["buffers"]) if found is None else found.start_model(shared, mine)


def personal_model(solver: LocalSolver, shared: Shared, mine: State, mix: float | None = None) -> Model:
    """The parameters and buffers a client itself uses: its own, or the common ones."""
    found = solver.aspect(Personalised)
    return (shared["params"], shared["buffers"]) if found is None else found.personal(shared, mine, mix)


def is_personalised(solver: LocalSolver) -> bool:
    """Whether clients have a model of their own."""
    return solver.aspect(Personalised) is not None


def is_mixable(solver: LocalSolver) -> bool:
    """Whether clients' own models are mixed in a share that can be chosen."""
    found = solver.aspect(Personalised)
    return found is not None and found.mixable


def is_generative(solver: LocalSolver) -> bool:
    """Whether what is learned makes examples."""
    return solver.aspect(Generative) is not None


def post_train(solver: LocalSolver, carry: Carry, shared: Shared, outputs: Outputs) -> Carry:
    """Work with the trained model between the last step and ``end``."""
    found = solver.aspect(Generative)
    return carry if found is None else found.post_train(carry, shared, outputs)


def receives(solver: LocalSolver) -> frozenset[str] | None:
    """The shared parts that travel to the clients; None: all of them."""
    found = solver.aspect(Generative)
    return None if found is None else found.receives


def provides(solver: LocalSolver) -> frozenset[str]:
    """Statistics that the solver adds to those of the engine."""
    found = solver.aspect(Describes)
    return frozenset() if found is None else found.provides


def statistics(solver: LocalSolver) -> Mapping[str, Statistic]:
    """What is true of the statistics of the solver's own."""
    found = solver.aspect(Describes)
    return {} if found is None else found.statistics


def describe(solver: LocalSolver, steps: Tensor, ctx: Context) -> Stats:
    """The statistics of the solver's own, from the planned steps of a block ``[C]``."""
    found = solver.aspect(Describes)
    return {} if found is None else found.describe(steps, ctx)


def count_steps(solver: LocalSolver, sizes: Tensor, epochs: Tensor) -> Tensor:
    """How many steps each client takes, ``[C]``: by the solver's formula, or by making its plan."""
    found = solver.aspect(CountsSteps)
    return planned_steps(solver, sizes, epochs) if found is None else found.count_steps(sizes, epochs)


def planned_steps(solver: LocalSolver, sizes: Tensor, epochs: Tensor) -> Tensor:
    """How many steps the plan of each client has, ``[C]``."""
    return solver.plan(sizes, epochs, Key.of(0).each(torch.arange(len(sizes)))).steps


def needs_data_spec(solver: LocalSolver) -> bool:
    """Whether the data must be looked at for the solver's sake, whatever the model."""
    found = solver.aspect(BindsToData)
    return found is not None and found.needs_data_spec


def bind(solver: LocalSolver, data_spec: DataSpec) -> LocalSolver:
    """The same solver knowing what it must know of the data."""
    found = solver.aspect(BindsToData)
    return solver if found is None else cast("LocalSolver", found.bind(data_spec))


def fusing(solver: LocalSolver) -> Fusing | None:
    """What the solver's program is made of, if engines may have a kernel for it."""
    found = solver.aspect(Fusible)
    return None if found is None else found.fusing


if not TYPE_CHECKING:  # for one version: what has been renamed here
    __getattr__ = renamed.old_names(__name__, {"FitsData": "BindsToData"})
