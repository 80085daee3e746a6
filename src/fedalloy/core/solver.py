"""The local solver of a client. Optional interfaces of solvers are in :mod:`fedalloy.core.aspects`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedalloy.core import renamed
from fedalloy.core.aspects import ASPECTS
from fedalloy.core.declared import declared
from fedalloy.core.keys import Key
from fedalloy.core.length import AnyLength
from fedalloy.core.objective import GradAt
from fedalloy.core.types import Carry, Context, Contributions, Part, Payload, Plan, Shared, State, Tree

Kind = TypeVar("Kind")


class LocalSolver(AnyLength, ABC):
    """What a client does with the received parts and its data. Pure and vmappable.

    A solver implements ``begin``, ``step`` and ``end``; gradients come only through ``grad_at``. It may also be
    ``Personalised``, ``Generative``, ... (:mod:`fedalloy.core.aspects`): then it inherits from those classes too.
    """

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse a class with a member of an aspect that it does not inherit from: the member would be ignored."""
        super().__init_subclass__(**given)
        renamed.refuse_old_members(cls, renamed.SOLVER)
        written = _written(cls)
        for kind in ASPECTS:
            said = sorted(name for name in vars(kind) if not name.startswith("_") and name in written)
            if said and not issubclass(cls, kind):
                raise TypeError(
                    f"solver {cls.__name__} defines '{said[0]}', which is used only for solvers that inherit from "
                    f"{kind.__module__}.{kind.__name__}: inherit from it too, or choose another name"
                )

    @declared
    def parts(self) -> Mapping[str, Part]:
        """The parts that a client sends, by name."""
        return {"delta": Part()}

    @declared
    def target(self) -> str:
        """The shared part that the server optimizer updates."""
        return "params"

    @declared
    def update(self) -> str:
        """The sent part that updates the target."""
        return "delta"

    @declared
    def stateful(self) -> bool:
        """Whether clients keep state between rounds."""
        return False

    def aspect(self, kind: type[Kind]) -> Kind | None:
        """This solver as an object of an aspect class, None if it is not one; wrappers also ask their inner solver."""
        return self if isinstance(self, kind) else None

    def lr_at(self, round: int, rounds: int | None = None) -> float:
        """The local step size in a round; rounds count from 1."""
        return 1.0

    def plan(self, sizes: Tensor, epochs: Tensor, keys: Key) -> Plan:
        """The local steps of a block of clients: ``sizes`` and ``epochs`` are ``[C]``, ``keys`` a batch of C. The
        default is one step with all examples per epoch; -1 epochs means the solver's own number, here 1."""
        turns, places = torch.where(epochs < 0, 1, epochs), torch.arange(max(1, int(sizes.max())))
        steps = torch.arange(max(1, int(turns.max())))
        mask = (steps < turns.unsqueeze(1)).unsqueeze(2) & (places < sizes.reshape(-1, 1, 1))
        return Plan(torch.where(mask, places, 0), mask, torch.zeros(mask.shape[:2], dtype=torch.int64))

    def draws(self, plan: Plan, keys: Key, shared: Shared) -> Tree:
        """Random inputs of the program, ``[C, S, ...]`` each."""
        return {}

    def init_shared(self, params: Tree) -> Shared:
        """Further shared parts, besides ``params`` and ``buffers``."""
        return {}

    def init_client(self, shared: Shared, key: Key) -> State:
        """A client's state before its first round."""
        return {}

    @abstractmethod
    def begin(self, shared: Shared, mine: State, ctx: Context) -> Carry:
        """The carry before the first step. Its ``params`` are the model being trained, on which ``accuracy_after`` is
        measured."""

    @abstractmethod
    def step(self, carry: Carry, grad_at: GradAt, draws: Tree, phase: Tensor, ctx: Context) -> Carry:
        """One local step."""

    @abstractmethod
    def end(self, carry: Carry, shared: Shared, mine: State, steps: Tensor, ctx: Context) -> tuple[Payload, State]:
        """What is sent and what is kept, after ``steps`` steps (a float scalar tensor, possibly 0)."""

    def absorb(self, shared: Shared, aggregate: Payload, cohort: Contributions, ctx: Context) -> Shared:
        """The shared parts after the round; the target has already been updated."""
        return shared


def _written(cls: type) -> set[str]:
    """The names of all members of a class and its bases, with fields without a default, but without the aspects'."""
    own = [kind for kind in cls.__mro__ if kind not in ASPECTS]
    return {name for kind in own for name in (*vars(kind), *vars(kind).get("__annotations__", {}))}
