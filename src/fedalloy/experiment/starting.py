"""The model before round 1: as it is drawn, with the leaves that somebody gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.types import Tree


def given_leaves(params: Tree, buffers: Tree, initial: Any) -> tuple[Tree, Tree]:
    """Parameters and buffers with those of ``initial`` in their places; what does not fit the model is refused.

    >>> given_leaves({"w": torch.zeros(2)}, {}, {"w": torch.ones(2)})
    ({'w': tensor([1., 1.])}, {})
    """
    if initial is None:
        return params, buffers
    if not isinstance(initial, Mapping):
        hint = ": give its state_dict()" if isinstance(initial, torch.nn.Module) else ""
        raise SpecError(f"initial must be a table of tensors by name, got a {type(initial).__name__}{hint}")
    known = {**params, **buffers}
    made = {name: _fitting(name, leaf, known) for name, leaf in initial.items()}
    return {name: made.get(name, leaf) for name, leaf in params.items()}, {
        name: made.get(name, leaf) for name, leaf in buffers.items()
    }


def _fitting(name: str, leaf: Any, known: Tree) -> Tensor:
    if name not in known:
        raise SpecError(f"initial: the model learns no '{name}': {nearest(str(name), known)}")
    if not isinstance(leaf, Tensor) or leaf.shape != known[name].shape:
        got = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        raise SpecError(f"initial: '{name}' must be a tensor of shape {tuple(known[name].shape)}, got {got}")
    if not bool(leaf.isfinite().all()):
        raise SpecError(f"initial: '{name}' holds NaN or infinity")
    return leaf.detach().to(known[name])
