"""How a function of one client is applied to a block of clients, whose trees have a leading client axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from fedalloy.core.types import State


class Applied(Protocol):
    """One way to do it. What clients keep gets its leading axis by ``stack`` and loses it by ``unstack``."""

    def __call__(self, function: Callable[..., Any], clients: int, *trees: Any) -> Any:
        """``function`` of every client's part of the trees; the results with a leading axis."""

    def stack(self, states: list[State]) -> State:
        """One stacked state from one per client."""

    def unstack(self, stacked: State, clients: int) -> list[State]:
        """One state per client from a stacked one."""


@dataclass(frozen=True)
class Plain:
    """A block of one: the axis is taken off, the function is called, the axis is put back. Whatever is no tensor passes
    as it is."""

    def __call__(self, function: Callable[..., Any], clients: int, *trees: Any) -> Any:
        return led(function(*map(alone, trees)))

    def stack(self, states: list[State]) -> State:
        (state,) = states
        stacked: State = led(state)
        return stacked

    def unstack(self, stacked: State, clients: int) -> list[State]:
        return [alone(stacked)]


@dataclass(frozen=True)
class Vmapped:
    """Any number of clients at once, by ``torch.func.vmap``."""

    def __call__(self, function: Callable[..., Any], clients: int, *trees: Any) -> Any:
        def call(_: Tensor, *given: Any) -> Any:
            return function(*given)

        # The first argument tells vmap how many clients there are where the trees have no leaves.
        return vmap(call)(torch.zeros(clients), *trees)

    def stack(self, states: list[State]) -> State:
        """Plain scalars cannot be stacked and are refused."""
        first = states[0]
        if not _has_leaves(first):  # costs nothing, which small rounds of clients without a state are glad of
            return first
        stacked: State = tree_map(lambda *leaves: torch.stack(leaves), first, *states[1:])
        return stacked

    def unstack(self, stacked: State, clients: int) -> list[State]:
        return [tree_map(lambda leaf, row=row: leaf[row], stacked) for row in range(clients)]


plain, vmapped = Plain(), Vmapped()


def alone(value: Any) -> Any:
    """The only client's part of trees with a leading axis."""
    if isinstance(value, Tensor):
        return value[0]
    if isinstance(value, dict):
        return {name: leaf[0] if isinstance(leaf, Tensor) else alone(leaf) for name, leaf in value.items()}
    return tuple(map(alone, value)) if type(value) is tuple else value


def led(value: Any) -> Any:
    """The same trees with a leading axis for one client. Written out, as is ``alone``: torch's own tree functions would
    cost small models a tenth of their time."""
    if isinstance(value, Tensor):
        return value.unsqueeze(0)
    if isinstance(value, dict):
        return {name: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else led(leaf) for name, leaf in value.items()}
    return tuple(map(led, value)) if type(value) is tuple else value


def _has_leaves(state: State) -> bool:
    return any(_has_leaves(value) if isinstance(value, dict) else True for value in state.values())
