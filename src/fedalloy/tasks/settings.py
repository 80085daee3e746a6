"""The further settings of ``fedalloy.task``, by name and type, for editors and type checkers: the arguments of
:func:`fedalloy.tasks.assembly.make_task`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypedDict

import torch
from torch import nn

from fedalloy.core.buckets import Buckets
from fedalloy.tasks.assembly import Precision, Spec, Unit
from fedalloy.tasks.augmentation import Augmentation
from fedalloy.tasks.datasets.base import Standardise
from fedalloy.tasks.kinds import TaskKind
from fedalloy.tasks.losses.loss import Loss, PerExample
from fedalloy.tasks.noise import LabelNoise
from fedalloy.tasks.synthetic_part import SyntheticPart


class TaskSettings(TypedDict, total=False):
    """What a task of any source takes."""

    test_fraction: float
    valid_fraction: float
    seed: int
    loss: str | Spec | PerExample | Loss | None
    kind: TaskKind | None
    unit: Unit
    standardise: Standardise | None
    noise: LabelNoise | Spec | None
    newcomers: int
    augment: Augmentation | Spec | None
    buckets: Buckets | Sequence[int] | None
    trainable: tuple[str, ...] | None
    classifier: str | Spec | Callable[..., nn.Module] | None
    synthetic: str | Spec | SyntheticPart | None
    dtype: Precision | torch.dtype
    device: str | torch.device | None
