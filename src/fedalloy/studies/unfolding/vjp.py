"""Vector-Jacobian products of functions from state to state: nested dicts, of which floating-point tensors are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.protocols import ServerOptimizer
from fedalloy.core.types import Context, State, Tree


def floats(state: Mapping[str, Any], prefix: str = "") -> Tree:
    """The floating-point tensors of a nested state by path.

    >>> floats({"m": {"w": torch.ones(1)}, "steps": 3})
    {'m/w': tensor([1.])}
    """
    found: Tree = {}
    for name, value in state.items():
        if isinstance(value, Mapping):
            found |= floats(value, f"{prefix}{name}/")
        elif isinstance(value, Tensor) and value.is_floating_point():
            found[f"{prefix}{name}"] = value
    return found


def replaced(state: Mapping[str, Any], leaves: Mapping[str, Tensor], prefix: str = "") -> State:
    """The state with the tensors at these paths replaced.

    >>> replaced({"m": {"w": 1}, "steps": 3}, {"m/w": 2})
    {'m': {'w': 2}, 'steps': 3}
    """
    return {
        name: replaced(value, leaves, f"{prefix}{name}/")
        if isinstance(value, Mapping)
        else leaves.get(f"{prefix}{name}", value)
        for name, value in state.items()
    }


def pull(function: Callable[[Tree], Tree], inputs: Tree, by_outputs: Tree) -> Tree:
    """The gradient by the inputs of ``sum <function(inputs), by_outputs>``; zero where nothing depends on them."""
    with torch.enable_grad():
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in inputs.items()}
        outputs = function(leaves)
        joined = [(value, by_outputs[name]) for name, value in outputs.items() if value.requires_grad]
        values, gradients = [one for one, _ in joined], [other.to(one) for one, other in joined]
        found: Any = (
            torch.autograd.grad(values, list(leaves.values()), gradients, allow_unused=True)
            if values
            else [None] * len(leaves)
        )
    return {
        name: torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(inputs.items(), found, strict=True)
    }


def pull_server(
    server: ServerOptimizer, state: State, target: Tree, update: Tree, ctx: Context, by_model: Tree, by_state: Tree
) -> tuple[Tree, Tree, Tree]:
    """Back through one step of a server: the gradients by the combined update, the server's state and the model."""

    def step(leaves: Tree) -> Tree:
        given = [_named(leaves, f"{part}:") for part in ("update", "state", "model")]
        moved, kept, _ = server.apply(given[0], replaced(state, given[1]), given[2], ctx)
        return {**_with(moved, "model:"), **_with(floats(kept), "state:")}

    inputs = {**_with(update, "update:"), **_with(floats(state), "state:"), **_with(target, "model:")}
    found = pull(step, inputs, {**_with(by_model, "model:"), **_with(by_state, "state:")})
    return _named(found, "update:"), _named(found, "state:"), _named(found, "model:")


def no_gradient(state: Mapping[str, Any]) -> Tree:
    """A zero gradient for every tensor of a state."""
    return tree.zeros_like(floats(state))


def _with(leaves: Mapping[str, Tensor], prefix: str) -> Tree:
    return {f"{prefix}{name}": leaf for name, leaf in leaves.items()}


def _named(leaves: Mapping[str, Tensor], prefix: str) -> Tree:
    return {name.removeprefix(prefix): leaf for name, leaf in leaves.items() if name.startswith(prefix)}
