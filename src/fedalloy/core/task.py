"""A task: a model and the clients' data. What it must have, what it may say besides, and what holds if it does not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fedalloy.core import renamed
from fedalloy.core.declared import declared
from fedalloy.core.errors import SpecError
from fedalloy.core.objective import Objective
from fedalloy.core.types import Block, DataPart, DataSpec, Examples


class Recordable(Protocol):
    """What can be written into the folder of a run."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""


class Task(ABC):
    """A model, its loss and the clients' data. A new task inherits from this class, says ``objective`` and
    ``population`` (as attributes, fields or properties) and writes ``data``; everything else has a default."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse a class that answers a question by its old name."""
        super().__init_subclass__(**given)
        renamed.refuse_old_members(cls, renamed.TASK)

    @declared
    def objective(self) -> Objective:
        """The model as pure functions."""
        raise _lacks(self, "objective")

    @declared
    def population(self) -> int:
        """How many clients exist."""
        raise _lacks(self, "population")

    @abstractmethod
    def data(self, part: DataPart, ids: Tensor) -> Block:
        """The examples of some clients."""

    @declared
    def pools(self) -> Mapping[DataPart, Block]:
        """All examples by part, those of unseen clients too, where they are in memory; empty where they are made on
        demand."""
        return {}

    @declared
    def names(self) -> Sequence[str] | None:
        """The clients' names, where they have some."""
        return None

    @declared
    def metrics(self) -> tuple[str, ...]:
        """What the data are usually scored with, the most telling metric first; empty: what a run takes by itself."""
        return ()

    @declared
    def bounds(self) -> tuple[float, float] | None:
        """The declared lowest and highest value of the features."""
        return None

    @declared
    def notices(self) -> tuple[str, ...]:
        """What a user should know about the data; a run tells it."""
        return ()

    @declared
    def manifest(self) -> Recordable | None:
        """Who got what, for the record."""
        return None

    @declared
    def unseen_ids(self) -> Tensor:
        """Clients that never take part; ``data`` knows them by their ids."""
        return torch.zeros(0, dtype=torch.int64)

    @declared
    def global_test(self) -> Examples | None:
        """Examples that are nobody's, or everybody's, to score the global model on."""
        return None

    @declared
    def classifier(self) -> Objective | None:
        """The model that learns from synthetic samples, where it is another than ``objective``."""
        return None

    def data_spec(self) -> DataSpec | None:
        """The form of the data, for methods that make samples, where the data cannot be looked at; None: look."""
        return None

    def fingerprint(self) -> Mapping[str, Any] | None:
        """What tells this task from another, as plain values; None: its data do."""
        return None

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None = None) -> Task:
        """The same task with its data on a device, or as it is where it cannot be moved."""
        return self


@dataclass(frozen=True, eq=False)
class TaskWrapper(Task):
    """A task with other examples, or other clients, than ``task``: what is known of the federation passes through. Not
    ``pools``, ``fingerprint`` and ``to``: they speak of the examples themselves."""

    task: Task

    @property
    def objective(self) -> Objective:
        """The task's own."""
        return self.task.objective

    @property
    def population(self) -> int:
        """The task's own."""
        return self.task.population

    @property
    def names(self) -> Sequence[str] | None:
        """The task's own."""
        return self.task.names

    @property
    def metrics(self) -> tuple[str, ...]:
        """The task's own."""
        return self.task.metrics

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The task's own."""
        return self.task.bounds

    @property
    def notices(self) -> tuple[str, ...]:
        """The task's own."""
        return self.task.notices

    @property
    def manifest(self) -> Recordable | None:
        """The task's own."""
        return self.task.manifest

    @property
    def unseen_ids(self) -> Tensor:
        """The task's own."""
        return self.task.unseen_ids

    @property
    def global_test(self) -> Examples | None:
        """The task's own."""
        return self.task.global_test

    @property
    def classifier(self) -> Objective | None:
        """The task's own."""
        return self.task.classifier

    def data_spec(self) -> DataSpec | None:
        """The task's own."""
        return self.task.data_spec()


def check_task(task: object, where: str) -> None:
    """Refuse what is no task, or has a model that is none, before anything is done with it."""
    if not isinstance(task, Task):
        raise SpecError(f"{where} must be a task, {_inherit('a task', task, Task)}; fedalloy.task makes one")
    if not isinstance(task.objective, Objective):
        raise SpecError(
            f"{where} has an objective that is none, {_inherit('an objective', task.objective, Objective)}; "
            "fedalloy.tasks.objective.ModuleObjective makes one of any torch module"
        )


def _inherit(what: str, found: object, kind: type) -> str:
    return (
        f"got {type(found).__name__}: {what} of one's own inherits from {kind.__module__}.{kind.__name__}, which lists "
        "what it must have and gives the rest a default"
    )


def _lacks(task: Task, name: str) -> SpecError:
    return SpecError(f"task {type(task).__name__} does not say its '{name}': give it such an attribute or property")


if not TYPE_CHECKING:  # for one version: what has been renamed here
    __getattr__ = renamed.old_names(__name__, {"TaskAround": "TaskWrapper"})
