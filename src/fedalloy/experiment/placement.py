"""Where things lie during a run: the data and the server's state on the device of the models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.protocols import Task
from fedalloy.tasks.computing import check_device


def placed(task: Task, device: str) -> Task:
    """The task with its data where the models are, when it can be moved and fits there; a device that is not there is
    refused."""
    check_device(device)
    return task if device == "cpu" or not _fits(task, device) else task.to(device)


def _fits(task: Task, device: str) -> bool:
    """Whether the data leave room for the models; otherwise batches are copied when their step comes."""
    leaves = (leaf for pool in task.pools.values() for part in (pool.x, pool.y) for leaf in inputs.leaves(part))
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    free, _ = torch.cuda.mem_get_info(device) if torch.device(device).type == "cuda" else (size * 2, 0)
    return size < 0.6 * free


def on_device(state: Any, device: str) -> Any:
    """A nested state with its floating-point parts on a device; what belongs to the weighting stays where it is."""
    if isinstance(state, dict):
        return {name: value if name == "weighting" else on_device(value, device) for name, value in state.items()}
    return state.to(device) if isinstance(state, Tensor) else state
