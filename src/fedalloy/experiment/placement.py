"""Checks of a run's data before its first round; data and the server's state on the device of the models."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from fedalloy.core import inputs
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import Engine, Task
from fedalloy.core.wide import has_float64
from fedalloy.tasks.computing import check_device
from fedalloy.tasks.examining import examined, notices


def placed(task: Task, device: str) -> Task:
    """The task with its data on the device of the models, if it can be moved and fits there; a missing device is
    refused."""
    check_device(device)
    return task if device == "cpu" or not _fits(task, device) else task.to(device)


@contextmanager
def told_about_float64(device: str) -> Iterator[None]:
    """Say in words that a rule needs float64 where the device has none; torch's own error names neither."""
    try:
        yield
    except (TypeError, RuntimeError) as error:
        if has_float64(device) or "float64" not in str(error):
            raise
        raise SpecError(
            f"device '{device}' has no float64, which a part of this run computes in ({error}): use device = 'cpu'"
        ) from error


def _fits(task: Task, device: str) -> bool:
    """Whether the data leave room for the models; otherwise batches are copied at every step."""
    leaves = (leaf for pool in task.pools.values() for part in (pool.x, pool.y) for leaf in inputs.leaves(part))
    size = sum(leaf.numel() * leaf.element_size() for leaf in leaves)
    free, _ = torch.cuda.mem_get_info(device) if torch.device(device).type == "cuda" else (size * 2, 0)
    return size < 0.6 * free


def on_device(state: Any, device: str) -> Any:
    """A nested state with its tensors on a device; the weighting's part is not moved."""
    if isinstance(state, dict):
        return {name: value if name == "weighting" else on_device(value, device) for name, value in state.items()}
    return state.to(device) if isinstance(state, Tensor) else state


log = logging.getLogger("fedalloy")
_told: Any = WeakIdKeyDictionary()
"""What was logged about a task."""


def looked_at(task: Task, engine: Engine) -> Task:
    """The task with checked data; nodes check their own."""
    return examined(task) if engine.data_at_hand else task


def at_work(task: Task, engine: Engine, device: str) -> Task:
    """The task on the device of the models."""
    there = placed(task, device)
    return there if there is task else looked_at(there, engine)


def told(task: Task, algorithm: Algorithm) -> tuple[str, ...]:
    """Log what is unusual about the data (logger ``fedalloy``), once per task, however many runs use it; the record of
    every run keeps it."""
    found, known = notices(task, algorithm.solver), _told.setdefault(task, set())
    for notice in found:
        if notice not in known:
            log.warning(notice)
    known.update(found)
    return found
