"""Shared by the solvers of generative models: keys for their noise, and sampling from the shared model."""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core.keys import Key
from fedalloy.core.objective import Objective
from fedalloy.core.protocols import Shared
from fedalloy.core.types import Plan, Tree

_AT_ONCE = 256


def noise_keys(plan: Plan, keys: Key) -> Tree:
    """One 64-bit key per client and step, from which the model draws its noise, ``[C, S]``."""
    state = keys.fold("noise").each(torch.arange(plan.index.shape[1])).state
    assert isinstance(state, Tensor)
    return {"noise": state}


@torch.no_grad()
def generated(shared: Shared, key: Key, per_class: int, objective: Objective) -> tuple[Tensor, Tensor]:
    """``per_class`` examples of every class from the shared model's capability ``generate``, sorted by class."""
    params, buffers = shared["params"], shared["buffers"]
    device = next(iter(params.values())).device
    y = torch.arange(objective.classes, device=device).repeat_interleave(per_class)
    parts = []
    for number, labels in enumerate(y.split(_AT_ONCE)):
        draw = torch.as_tensor(key.fold("generate").each(torch.tensor(number)).state).to(device)
        parts.append(objective.apply_capability("generate", params, buffers, (draw, labels), None, training=False)[0])
    return torch.cat(parts), y
