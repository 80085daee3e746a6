"""Parts of the model that stay at the client: FedPer, LG-FedAvg, FedRep, FedBN and local training as one wrapper.

Leaves are selected by name. FedPer keeps the head (Arivazhagan et al. 2019, arXiv:1912.00818), LG-FedAvg
the body (Liang et al. 2020, arXiv:2001.01523), FedRep the head with a phase for each (Collins et al. 2021,
arXiv:2102.07078), FedBN the normalisation (Li et al. 2021, arXiv:2102.07623); keeping everything is local training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from fedalloy.core import aspects
from fedalloy.core.aspects import CountsSteps, Describes, OwnStart, PartlyLocal, Personalised
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.names import Names
from fedalloy.core.protocols import Carry, GradAt, LocalSolver, Shared
from fedalloy.core.registry import register
from fedalloy.core.statistics import Statistic
from fedalloy.core.types import Context, DataSpec, Part, Payload, Plan, State, Stats, Tree
from fedalloy.core.wrappers import WrapperBase
from fedalloy.methods.solvers.phases import in_phases
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.solvers.training import LocalTraining

HEAD = ("classifier.*", "head.*", "output.*", "fc.*")
"""Names of a model's last block, in fedalloy's models and most others."""
NORM = ("*norm*", "*bn*")
"""Names of normalisation layers."""


@register("solver", "personal")
@dataclass(frozen=True)
class Personal(WrapperBase, Personalised, PartlyLocal, OwnStart, Describes, CountsSteps):
    """A plain solver with some leaves of the model, and their buffers, kept at the client.

    ``keep`` = ``named`` keeps the leaves that match ``names`` (patterns such as ``classifier.*``), ``others`` all the
    rest. Kept leaves are not sent, averaged or changed by the server: its copies keep their initial values, which a
    client that never took part uses. ``shared_epochs`` trains the two parts one after the other: first the solver's
    ``epochs`` on the kept leaves, then ``shared_epochs`` on the shared ones.
    When to use it: clients that agree on features and differ in labels (keep the head), or the other way round.
    """

    stateful: ClassVar[bool] = True

    solver: LocalSolver = Sgd()  # noqa: RUF009 (a frozen value)
    names: tuple[str, ...] = HEAD
    keep: Literal["named", "others"] = "named"
    shared_epochs: int | None = None

    def __post_init__(self) -> None:
        inner = self.solver
        if inner.aspect(Personalised) is not None or len(inner.parts) > 1:
            raise ValueError(
                f"'{type(inner).__name__}' cannot keep parts of its model at the client: allowed are solvers that send "
                "one update and keep no personal model, such as 'sgd' and 'prox'"
            )
        if self.shared_epochs is not None and self.shared_epochs < 0:
            raise ValueError(f"shared_epochs must be 0 or more, got {self.shared_epochs}")
        if self.shared_epochs is not None and not _trains_by_leaf(inner):
            raise ValueError(
                "shared_epochs needs a solver that trains by epochs with the optimizer 'sgd', without dampening, "
                "clipping, accumulation or precision 'fp16', whose memory belongs to no leaf"
            )

    @property
    def inner(self) -> LocalSolver:
        return self.solver

    @property
    def local_leaves(self) -> Names:
        return Names(self.names, others=self.keep == "others")

    @property
    def parts(self) -> Mapping[str, Part]:
        return {name: replace(part, without=self.local_leaves) for name, part in self.solver.parts.items()}

    @property
    def provides(self) -> frozenset[str]:
        """Empty with two phases, where only some of the steps change what is sent."""
        return aspects.provides(self.solver) if self.shared_epochs is None else frozenset()

    @property
    def statistics(self) -> Mapping[str, Statistic]:
        return aspects.statistics(self.solver)

    def describe(self, steps: Tensor, ctx: Context) -> Stats:
        return aspects.describe(self.solver, steps, ctx)

    def bind(self, data_spec: DataSpec) -> Self:
        return replace(self, solver=aspects.bind(self.solver, data_spec))

    def plan(self, sizes: Tensor, epochs: Tensor, keys: Key) -> Plan:
        if self.shared_epochs is None or not isinstance(self.solver, LocalTraining):
            return self.solver.plan(sizes, epochs, keys)
        first, whole = self._epochs(self.solver.epochs, epochs)
        return in_phases(self.solver.plan(sizes, whole, keys), first, whole)

    def count_steps(self, sizes: Tensor, epochs: Tensor) -> Tensor:
        if self.shared_epochs is None or not isinstance(self.solver, LocalTraining):
            return aspects.count_steps(self.solver, sizes, epochs)
        return aspects.count_steps(self.solver, sizes, self._epochs(self.solver.epochs, epochs)[1])

    def _epochs(self, defaults: int, epochs: Tensor) -> tuple[Tensor, Tensor]:
        """The epochs on the kept leaves, and those of both phases together."""
        first = torch.where(epochs < 0, torch.full_like(epochs, defaults), epochs)
        return first, torch.where(first > 0, first + (self.shared_epochs or 0), first)

    def init_shared(self, params: Tree) -> Shared:
        if not self.local_leaves.split(params)[0]:
            meant = f"keep = '{self.keep}' with names = {', '.join(self.names) or '(none)'}"
            raise SpecError(
                f"no parameter stays local: {meant} matches none of {', '.join(params)}; patterns look like 'head.*'"
            )
        return self.solver.init_shared(params)

    def init_client(self, shared: Shared, key: Key) -> State:
        return {
            "params": self.local_leaves.split(shared["params"])[0],
            "buffers": self.local_leaves.split(shared["buffers"])[0],
            "solver": self.solver.init_client(shared, key),
        }

    def start_model(self, shared: Shared, mine: State) -> tuple[Tree, Tree]:
        return {**shared["params"], **mine["params"]}, {**shared["buffers"], **mine["buffers"]}

    def personal(self, shared: Shared, mine: State, mix: float | None = None) -> tuple[Tree, Tree]:
        return self.start_model(shared, mine)

    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        return self.solver.begin(self._whole(shared, mine), mine["solver"], ctx)

    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        moved = self.solver.step(carry, grad_at, draws, phase, ctx)
        return moved if self.shared_epochs is None else self._thawed(moved, carry, phase == 0)

    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        payload, kept = self.solver.end(carry, self._whole(shared, mine), mine["solver"], steps, ctx)
        sent = {part: self.local_leaves.split(leaves)[1] for part, leaves in payload.items()}
        own = self.local_leaves.split(carry["params"])[0]
        return sent, {"params": own, "buffers": mine["buffers"], "solver": kept}

    def keep_local_buffers(self, mine: State, buffers: Tree) -> State:
        return {**mine, "buffers": self.local_leaves.split(buffers)[0]}

    def _whole(self, shared: Shared, mine: State) -> Shared:
        """The received parts, with the client's kept leaves put in."""
        params, buffers = self.start_model(shared, mine)
        return {**shared, "params": params, "buffers": buffers}

    def _thawed(self, new: Mapping[str, Any], old: Mapping[str, Any], own_turn: Tensor) -> dict[str, Any]:
        """Keep values named after a leaf (parameters, momenta) unchanged outside the phase of that leaf."""
        return {
            name: self._thawed(value, old[name], own_turn)
            if isinstance(value, Mapping)
            else torch.where((own_turn if name in self.local_leaves else ~own_turn).to(value.device), value, old[name])
            for name, value in new.items()
        }


def _trains_by_leaf(solver: LocalSolver) -> bool:
    """Whether every leaf is trained by itself, so that some can be kept as they are."""
    return (
        isinstance(solver, LocalTraining) and solver.optimizer == "sgd" and not solver.dampening and not solver.composed
    )
