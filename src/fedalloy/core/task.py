"""A task: a model and the clients' data, with its required members and the defaults of the optional ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
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
    """Something that can be written into a run's folder."""

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""


class Task(ABC):
    """A model, its loss and the clients' data. A new task inherits from this class, declares ``objective`` and
    ``population`` (as attributes, fields or properties) and implements ``data``; everything else has a default."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse a class that defines a member by its old name."""
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
        """All examples by part, with those of unseen clients, if they are in memory; empty if made on demand."""
        return {}

    @declared
    def names(self) -> Sequence[str] | None:
        """The clients' names, if they have any."""
        return None

    @declared
    def encoding(self) -> Mapping[str, tuple[str, ...]] | None:
        """What the numbers of encoded columns mean, if columns were encoded."""
        return None

    @declared
    def kind(self) -> str | None:
        """What the targets are: ``classification``, ``multilabel``, ``regression``, ``segmentation`` or ``tokens``;
        None if it is not known."""
        return None

    @declared
    def metrics(self) -> tuple[str, ...]:
        """The usual metrics for the data, the most important one first; empty: the defaults of a run."""
        return ()

    @declared
    def bounds(self) -> tuple[float, float] | None:
        """The declared lowest and highest value of the features."""
        return None

    @declared
    def notices(self) -> tuple[str, ...]:
        """Notices about the data, which a run shows to the user."""
        return ()

    @declared
    def manifest(self) -> Recordable | None:
        """Which client got which examples, for the records."""
        return None

    @declared
    def unseen_ids(self) -> Tensor:
        """Ids of clients that never take part; ``data`` accepts them too."""
        return torch.zeros(0, dtype=torch.int64)

    @declared
    def global_test(self) -> Examples | None:
        """A common test set on which the global model is scored."""
        return None

    @declared
    def classifier(self) -> Objective | None:
        """The model that is trained on synthetic samples, if it is not ``objective``."""
        return None

    def data_spec(self) -> DataSpec | None:
        """The form of the data, for methods that make samples, if the data cannot be read here; None: read it from the
        data."""
        return None

    def fingerprint(self) -> Mapping[str, Any] | None:
        """Plain values that identify this task; None: its data identify it."""
        return None

    def prefetch(self, ids: Callable[[], Tensor]) -> None:  # noqa: B027 (an optional hook)
        """A hint that the clients ``ids()`` are needed soon; a task that reads its data can do so in the background."""

    def to(self, device: torch.device | str | None, dtype: torch.dtype | None = None) -> Task:
        """The same task with its data on a device; unchanged if the data cannot be moved."""
        return self


@dataclass(frozen=True, eq=False)
class TaskWrapper(Task):
    """A task with other examples or other clients than ``task``. Everything else is passed through, except ``pools``,
    ``fingerprint`` and ``to``, which depend on the examples."""

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
    def encoding(self) -> Mapping[str, tuple[str, ...]] | None:
        """The task's own."""
        return self.task.encoding

    @property
    def kind(self) -> str | None:
        """The task's own."""
        return self.task.kind

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
    """Refuse an object that is not a task, or whose objective is not an ``Objective``."""
    if not isinstance(task, Task):
        raise SpecError(f"{where} must be a task, {_inherit('task', task, Task)}; fedalloy.task makes one")
    renamed.refuse_old_attributes(task, renamed.TASK)
    if not isinstance(task.objective, Objective):
        raise SpecError(
            f"{where} must have an objective, {_inherit('objective', task.objective, Objective)}; "
            "fedalloy.tasks.objective.ModuleObjective makes one from any torch module"
        )


def _inherit(what: str, found: object, kind: type) -> str:
    return (
        f"got {type(found).__name__}: a custom {what} inherits from {kind.__module__}.{kind.__name__}, which lists its "
        "required members and has defaults for the rest"
    )


def _lacks(task: Task, name: str) -> SpecError:
    return SpecError(f"task {type(task).__name__} has no '{name}': give it such an attribute or property")


if not TYPE_CHECKING:  # old names, kept for one version
    __getattr__ = renamed.old_names(__name__, {"TaskAround": "TaskWrapper"})
