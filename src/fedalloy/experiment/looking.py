"""Before a run: its data are looked at, and what a user should know of them is said once."""

from __future__ import annotations

import logging

from fedalloy.core.algorithm import Algorithm
from fedalloy.core.protocols import Engine, Task
from fedalloy.experiment.placement import placed
from fedalloy.tasks.examining import examined, notices

log = logging.getLogger("fedalloy")


def looked_at(task: Task, engine: Engine) -> Task:
    """The task with data that can be learned from; nodes look at their own."""
    return examined(task) if engine.data_at_hand else task


def at_work(task: Task, engine: Engine, device: str) -> Task:
    """The task where the models are."""
    there = placed(task, device)
    return there if there is task else looked_at(there, engine)


def told(task: Task, algorithm: Algorithm) -> tuple[str, ...]:
    """Say through the logger ``fedalloy`` what is unusual about the data; the record keeps it too."""
    found = notices(task, algorithm.solver)
    for notice in found:
        log.warning(notice)
    return found
