"""Local work in two phases, each with its own number of epochs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.types import Plan


def in_phases(plan: Plan, first: Tensor, whole: Tensor) -> Plan:
    """A plan of ``whole`` epochs ``[C]`` whose steps after the ``first`` epochs ``[C]`` are in phase 1.

    >>> steps = torch.zeros(1, 6, 2, dtype=torch.int64)
    >>> in_phases(Plan(steps, steps == 0, steps[..., 0]), torch.tensor([2]), torch.tensor([3])).phase
    tensor([[0, 0, 0, 0, 1, 1]])
    """
    per_epoch = plan.steps // whole.clamp(min=1)
    step = torch.arange(plan.index.shape[1])
    return replace(plan, phase=(step >= (per_epoch * first).unsqueeze(1)).to(plan.phase.dtype))


def chosen(flag: Tensor, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """``one`` if ``flag``, else ``other``, leaf by leaf over nested mappings: a branch that works under ``vmap``.

    >>> chosen(torch.tensor(False), {"w": {"a": torch.tensor(1)}}, {"w": {"a": torch.tensor(2)}})
    {'w': {'a': tensor(2)}}
    """
    return {
        name: chosen(flag, value, other[name])
        if isinstance(value, Mapping)
        else torch.where(flag.to(value.device), value, other[name])
        for name, value in one.items()
    }
