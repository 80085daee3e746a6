"""Optional interfaces of solvers: personalised, generative, fusible, ... A solver inherits from those it implements.

Callers use the functions below, which return the default for solvers without the interface.
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
    """Clients have a personal model, on which they are scored."""

    @declared
    def mixable(self) -> bool:
        """Whether ``personal`` takes a mixing coefficient in [0, 1]."""
        return False

    def personal(self, shared: Shared, mine: State, mix: float | None = None) -> Model:
        """The parameters and buffers of a client's personal model. Pure and vmappable. ``mix`` is for ``mixable``
        solvers: ``(1 - mix)`` federated plus ``mix`` local; None is the method's default."""
        return shared["params"], shared["buffers"]


class PartlyLocal:
    """Some leaves of the model, buffers included, never leave the client; its state holds their values."""

    @declared
    def local_leaves(self) -> Names:
        """The names of those leaves."""
        return NO_NAMES

    def keep_local_buffers(self, mine: State, buffers: Tree) -> State:
        """The state with those of the trained ``buffers`` that stay at the client."""
        return mine


class OwnStart:
    """Clients may start a round from another model than the received one."""

    @declared
    def needs_fresh(self) -> bool:
        """Whether ``init_client`` needs a fresh model drawn for this client, which it gets as the part ``fresh``. For
        stateless clients it is drawn again in every round."""
        return False

    def start_model(self, shared: Shared, mine: State) -> Model:
        """The parameters and buffers from which a client starts its round; ``loss_before`` is measured on them. Pure
        and vmappable."""
        return shared["params"], shared["buffers"]


class Generative:
    """The trained model, or the trained samples, can generate examples."""

    @declared
    def capabilities(self) -> frozenset[str]:
        """Capabilities that the model needs besides ``classify``: ``generate``, ``judge``, ``reconstruct``, ..."""
        return frozenset()

    @declared
    def models(self) -> tuple[str, ...]:
        """Built-in models with these capabilities, for the error message about a model without them."""
        return ()

    @declared
    def receives(self) -> frozenset[str] | None:
        """The shared parts that are sent to the clients; None: all of them."""
        return None

    @declared
    def holds_per_class(self) -> int:
        """How many examples of every class exist already; callers that ask for fewer still use all of them."""
        return 0

    def post_train(self, carry: Carry, shared: Shared, outputs: Outputs) -> Carry:
        """Work with the trained model that needs no batch; called between the last step and ``end``."""
        return carry

    def synthesise(self, shared: Shared, key: Key, per_class: int, objective: Objective) -> tuple[Tensor, Tensor]:
        """Labelled synthetic examples ``(x, y)``, about ``per_class`` of every class, from the shared parts."""
        raise NotImplementedError(f"{type(self).__name__} is Generative and must implement 'synthesise'")


class Describes:
    """The solver adds statistics to those of the engine."""

    @declared
    def provides(self) -> frozenset[str]:
        """The names of these statistics."""
        return frozenset()

    @declared
    def statistics(self) -> Mapping[str, Statistic]:
        """Their meanings and ranges; a statistic without a declaration may be any finite number."""
        return {}

    def describe(self, steps: Tensor, ctx: Context) -> Stats:
        """The statistics named in ``provides``, from the planned steps of a block ``[C]``."""
        return {}


class CountsSteps:
    """The solver has a formula for its number of steps. The server recounts the steps of every client, also of remote
    ones, and without a formula it has to build the plan for whatever size a client claims."""

    def count_steps(self, sizes: Tensor, epochs: Tensor) -> Tensor:
        """How many steps ``plan`` makes for each client, ``[C]``."""
        raise NotImplementedError(f"{type(self).__name__} is CountsSteps and must implement 'count_steps'")


class BindsToData:
    """The solver depends on the form of the data."""

    @declared
    def needs_data_spec(self) -> bool:
        """Whether ``bind`` is called for every model. If not, it is called only if the target is not ``params`` or if
        examples of a batch affect each other (BatchNorm). The data spec costs a forward pass of the model."""
        return True

    def bind(self, data_spec: DataSpec) -> Self:
        """The same solver, bound to a data spec. Refuses data that it does not support."""
        return self


@dataclass(frozen=True)
class Fusing:
    """The ``kind`` of a local program that engines may have a kernel for, and its numbers.
    :mod:`fedalloy.engines.kinds` lists the kinds and what a solver of each guarantees."""

    kind: str
    numbers: Mapping[str, float] = field(default_factory=dict)


class Fusible:
    """Engines may replace the solver's steps by a fused kernel. A wrapper never inherits this from its inner solver."""

    @declared
    def fusing(self) -> Fusing | None:
        """The description for the kernel; None if there is no kernel for these settings."""
        return None


ASPECTS = (Personalised, PartlyLocal, OwnStart, Generative, Describes, CountsSteps, BindsToData, Fusible)


def local_leaves(solver: LocalSolver) -> Names:
    """The leaves of the model that never leave the client."""
    found = solver.aspect(PartlyLocal)
    return NO_NAMES if found is None else found.local_leaves


def keep_local_buffers(solver: LocalSolver, mine: State, buffers: Tree) -> State:
    """The state with those of the trained buffers that stay at the client."""
    found = solver.aspect(PartlyLocal)
    return mine if found is None else found.keep_local_buffers(mine, buffers)


def needs_fresh(solver: LocalSolver) -> bool:
    """Whether a client's first state needs a fresh model drawn for this client."""
    found = solver.aspect(OwnStart)
    return found is not None and found.needs_fresh


def start_model(solver: LocalSolver, shared: Shared, mine: State) -> Model:
    """The parameters and buffers from which a client starts its round."""
    found = solver.aspect(OwnStart)
    return (shared[solver.target], shared["buffers"]) if found is None else found.start_model(shared, mine)


def personal_model(solver: LocalSolver, shared: Shared, mine: State, mix: float | None = None) -> Model:
    """The parameters and buffers on which a client is scored: its personal model, or else the shared one."""
    found = solver.aspect(Personalised)
    return (shared["params"], shared["buffers"]) if found is None else found.personal(shared, mine, mix)


def is_personalised(solver: LocalSolver) -> bool:
    """Whether clients have personal models."""
    return solver.aspect(Personalised) is not None


def is_mixable(solver: LocalSolver) -> bool:
    """Whether the mixing coefficient of personal models can be chosen."""
    found = solver.aspect(Personalised)
    return found is not None and found.mixable


def is_generative(solver: LocalSolver) -> bool:
    """Whether the solver can generate examples."""
    return solver.aspect(Generative) is not None


def post_train(solver: LocalSolver, carry: Carry, shared: Shared, outputs: Outputs) -> Carry:
    """The solver's work between the last step and ``end``."""
    found = solver.aspect(Generative)
    return carry if found is None else found.post_train(carry, shared, outputs)


def receives(solver: LocalSolver) -> frozenset[str] | None:
    """The shared parts that are sent to the clients; None: all of them."""
    found = solver.aspect(Generative)
    return None if found is None else found.receives


def provides(solver: LocalSolver) -> frozenset[str]:
    """Statistics that the solver adds to those of the engine."""
    found = solver.aspect(Describes)
    return frozenset() if found is None else found.provides


def statistics(solver: LocalSolver) -> Mapping[str, Statistic]:
    """Meanings and ranges of the solver's statistics."""
    found = solver.aspect(Describes)
    return {} if found is None else found.statistics


def describe(solver: LocalSolver, steps: Tensor, ctx: Context) -> Stats:
    """The solver's statistics, from the planned steps of a block ``[C]``."""
    found = solver.aspect(Describes)
    return {} if found is None else found.describe(steps, ctx)


def count_steps(solver: LocalSolver, sizes: Tensor, epochs: Tensor) -> Tensor:
    """How many steps each client takes, ``[C]``: by the solver's formula, or else from its plan."""
    found = solver.aspect(CountsSteps)
    return planned_steps(solver, sizes, epochs) if found is None else found.count_steps(sizes, epochs)


def planned_steps(solver: LocalSolver, sizes: Tensor, epochs: Tensor) -> Tensor:
    """How many steps the plan of each client has, ``[C]``."""
    return solver.plan(sizes, epochs, Key.of(0).each(torch.arange(len(sizes)))).steps


def needs_data_spec(solver: LocalSolver) -> bool:
    """Whether the solver needs a data spec for every model."""
    found = solver.aspect(BindsToData)
    return found is not None and found.needs_data_spec


def bind(solver: LocalSolver, data_spec: DataSpec) -> LocalSolver:
    """The same solver, bound to a data spec."""
    found = solver.aspect(BindsToData)
    return solver if found is None else cast("LocalSolver", found.bind(data_spec))


def fusing(solver: LocalSolver) -> Fusing | None:
    """The solver's description for fused kernels, if it has one."""
    found = solver.aspect(Fusible)
    return None if found is None else found.fusing


if not TYPE_CHECKING:  # old names, kept for one version
    __getattr__ = renamed.old_names(__name__, {"FitsData": "BindsToData"})
