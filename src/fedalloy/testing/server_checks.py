"""Checks of server optimizers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fedalloy.core import tree
from fedalloy.core.keys import Key
from fedalloy.core.protocols import ServerOptimizer
from fedalloy.core.types import Context, Tree
from fedalloy.testing.comparing import broken, copied, differences
from fedalloy.testing.problems import small_objective

CTX = Context(1, 5, Key.of(0), local_lr=0.1, rounds=10)


def nobody_moved(rule: ServerOptimizer) -> Iterator[str]:
    """From the initial state, an update of zero does not change the target."""
    target = _tree("target")
    moved, _, _ = rule.apply(tree.zeros_like(target), rule.init(target), target, CTX)
    yield from differences(moved, target)


def same_again(rule: ServerOptimizer) -> Iterator[str]:
    """Inputs are not changed, and the same inputs give the same target and state."""
    target, update = _tree("target"), _tree("update")
    _, state, _ = rule.apply(copied(update), rule.init(target), copied(target), CTX)
    before = copied({"target": target, "update": update, "state": state})
    first, second = rule.apply(update, state, target, CTX), rule.apply(update, state, target, CTX)
    yield from differences({"target": target, "update": update, "state": state}, before)
    for name, one, other in zip(("target", "state", "info"), second, first, strict=True):
        yield from differences(one, other, 0.0, f"a second call differs: {name}")


def kept_form(rule: ServerOptimizer) -> Iterator[str]:
    """Names, shapes and dtypes of target and state do not change, in both precisions, and every number is finite."""
    for dtype in (torch.float32, torch.float64):
        target, update = _tree("target", dtype), _tree("update", dtype)
        start = rule.init(target)
        moved, state, _ = rule.apply(update, start, target, CTX)
        yield from differences(_form(moved), _form(target), 0.0, f"target in {dtype}")
        yield from differences(_form(state), _form(start), 0.0, f"state in {dtype}")
        yield from broken({"target": moved, "state": state})


CHECKS = {"nobody moved": nobody_moved, "same again": same_again, "kept form": kept_form}


def _tree(name: str, dtype: torch.dtype = torch.float64) -> Tree:
    key = Key.of(7).fold(name)
    params, _ = small_objective("mlp").init(key)
    return {leaf: key.fold(leaf).normal(*value.shape, dtype=dtype) for leaf, value in params.items()}


def _form(value: object) -> object:
    """A nested value without its numbers."""
    if isinstance(value, dict):
        return {name: _form(inner) for name, inner in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value).__name__
