"""Kinds of task: what the targets are. The kind follows from loss and targets, or is given where it does not."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import Tensor

from fedalloy.core.errors import SpecError, nearest

if TYPE_CHECKING:
    from fedalloy.tasks.losses.loss import Loss

TaskKind = Literal["classification", "multilabel", "regression", "segmentation", "tokens"]
KINDS: tuple[TaskKind, ...] = get_args(TaskKind)

LOSSES: dict[str, str] = {
    "classification": "cross_entropy",
    "multilabel": "binary",
    "regression": "mse",
    "segmentation": "cross_entropy",
    "tokens": "cross_entropy",
}
"""The loss of a kind unless another one is given."""
METRICS: dict[str, tuple[str, ...]] = {
    "classification": ("accuracy", "loss"),
    "multilabel": ("f1_macro", "auroc", "loss"),
    "regression": ("mae", "r2", "loss"),
    "segmentation": ("iou", "accuracy", "loss"),
    "tokens": ("perplexity", "accuracy", "loss"),
}
"""The metrics of a kind unless others are given, the most important one first."""
_WORDS = {
    "multilabel": "several labels per example",
    "regression": "quantities",
    "segmentation": "a class for every pixel",
    "tokens": "a class for every token",
}


def kind_of(y: Any, loss: Loss | None, said: str | None = None) -> TaskKind | None:
    """The kind of a task with these targets; ``loss`` is None if none is given, ``said`` the kind if it is.

    Refused are targets that could be of two kinds, and a loss that is for others. None: the targets are a dict, which
    only a user's own loss understands.

    >>> import torch
    >>> kind_of(torch.tensor([0, 1]), None), kind_of(torch.zeros(2, 3) + 0.5, None)
    ('classification', 'regression')
    """
    allowed: tuple[TaskKind, ...] = KINDS if loss is None or not loss.kinds else loss.kinds
    if said is not None:
        return _checked(said, allowed)
    if not isinstance(y, Tensor):
        return None
    likely, others = _possible(y)
    possible = [kind for kind in likely if kind in allowed] or [kind for kind in others if kind in allowed][:1]
    if len(possible) == 1:
        return possible[0]
    shape = f"{y.dtype} targets of shape {tuple(y.shape[1:])}"
    if not possible:
        raise SpecError(f"{shape} are none for this loss, which is for {_either(allowed)}: choose another loss")
    raise SpecError(
        f"{shape} could be {_either(possible)}: give the kind of the task, kind = '{possible[0]}' or "
        f"'{possible[1]}', or a loss that only one of them has"
    )


def told(kind: TaskKind | None, y: Any) -> tuple[str, ...]:
    """A notice about a kind that was inferred, unless it is the usual one."""
    if kind is None or kind == "classification":
        return ()
    return (f"kind of task: {kind} ({_WORDS[kind]}), from {y.dtype} targets of shape {tuple(y.shape[1:])}",)


def outputs_for(kind: TaskKind | None, loss: Loss, y_shape: tuple[int, ...], classes: int) -> int:
    """How many outputs a model needs: one per class, label or quantity; ``y_shape`` is that of an example's targets."""
    if kind in ("multilabel", "regression"):
        return math.prod(y_shape)
    return 1 if loss.one_logit else max(1, classes)


def _possible(y: Tensor) -> tuple[list[TaskKind], list[TaskKind]]:
    """The kinds that targets are by their type, shape and values, and those that they are only if the loss says so."""
    flags = bool(((y == 0) | (y == 1)).all())
    if y.dim() == 1:
        return (["regression"], ["classification"]) if y.is_floating_point() else (["classification"], ["regression"])
    marked: TaskKind = "multilabel" if y.dim() == 2 else "segmentation"
    if y.is_floating_point():
        return ([marked, "regression"], []) if flags else (["regression"], [marked])
    if y.dim() > 2:
        return ["segmentation"], ["regression"]
    return (["multilabel", "tokens"] if flags else ["tokens"]), ["regression"]


def _checked(said: str, allowed: tuple[TaskKind, ...]) -> TaskKind:
    if said not in KINDS:
        raise SpecError(f"unknown kind of task '{said}': {nearest(said, KINDS)}")
    kind = next((kind for kind in allowed if kind == said), None)
    if kind is None:
        raise SpecError(f"kind = '{said}' does not fit the loss, which is for {_either(allowed)}: choose another loss")
    return kind


def _either(kinds: Any) -> str:
    return " or ".join(f"'{kind}'" for kind in kinds)
