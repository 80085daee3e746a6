"""Whether the tensors of an order fit the model that it names: said before anything is computed with them."""

from __future__ import annotations

import torch

from fedalloy.core.protocols import Objective, Shared
from fedalloy.core.types import Payload, Tree
from fedalloy.engines.flower import Refused


def check_shared(shared: Shared, objective: Objective) -> None:
    """Refuse a model whose names, shapes or types are not those of the task's model."""
    for part, expected in objective.forms.items():
        if part not in shared:
            raise Refused(f"the order has no part 'shared/{part}'")
        _check(part, shared[part], expected)


def check_cohort(payload: Payload, objective: Objective, update: str) -> int:
    """Refuse models of other clients that are none; how many there are."""
    if not payload.get(update):
        raise Refused(f"the order has no part 'cohort/{update}'")
    count = min((len(leaf) if leaf.dim() else 0) for leaf in payload[update].values())
    forms = objective.forms
    parts = {update: forms.get("params", {}), "buffers": forms.get("buffers", {})}
    for part, leaves in payload.items():
        stacked = {name: torch.empty(count, *form.shape, dtype=form.dtype, device="meta")
                   for name, form in parts.get(part, {}).items()}  # fmt: skip
        _check(part, leaves, stacked)
    if count < 1:
        raise Refused("the order has no models of other clients")
    return count


def _check(part: str, leaves: Tree, expected: Tree) -> None:
    if leaves.keys() != expected.keys():
        raise Refused(f"the tensors of '{part}' are not those of the model")
    for name, leaf in leaves.items():
        if leaf.shape != expected[name].shape or leaf.dtype != expected[name].dtype:
            raise Refused(
                f"'{name:.80}' of '{part}' is {leaf.dtype} of shape {tuple(leaf.shape)}, the model's is "
                f"{expected[name].dtype} of shape {tuple(expected[name].shape)}"
            )
