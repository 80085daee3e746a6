"""Outputs and targets side by side: where the classes are, and which targets count."""

from __future__ import annotations

from torch import Tensor

from fedalloy.core.errors import SpecError


def classes_last(outputs: Tensor, y: Tensor) -> Tensor:
    """The outputs with their classes as the last axis, ``[*y.shape, classes]``.

    Models of sequences put the classes last, ``[N, T, classes]``, models of images second, ``[N, classes, H, W]``. If
    the shapes fit both, targets of shape ``[N, T]`` are sequences.

    >>> import torch
    >>> classes_last(torch.zeros(2, 5, 4, 4), torch.zeros(2, 4, 4)).shape
    torch.Size([2, 4, 4, 5])
    """
    last = outputs.shape[:-1] == y.shape
    second = outputs.dim() == y.dim() + 1 and (outputs.shape[0], *outputs.shape[2:]) == tuple(y.shape)
    if not last and not second:
        raise SpecError(
            f"the model gives outputs of shape {tuple(outputs.shape[1:])} for targets of shape {tuple(y.shape[1:])}: "
            "a loss over classes needs one more axis than the targets, last (sequences) or first (images)"
        )
    return outputs if last and (y.dim() == 2 or not second) else outputs.movedim(1, -1)


def like_targets(outputs: Tensor, y: Tensor, loss: str) -> Tensor:
    """The outputs in the shape of the targets, one value for each."""
    if outputs.numel() != y.numel():
        raise SpecError(
            f"loss '{loss}' needs one output per target: the model gives {tuple(outputs.shape[1:])} for targets of "
            f"shape {tuple(y.shape[1:])}"
        )
    return outputs.reshape(y.shape)


def per_example(values: Tensor) -> Tensor:
    """The mean of every example's values, ``[N]``."""
    return values.flatten(1).mean(1) if values.dim() > 1 else values


def mean_of_counted(values: Tensor, counted: Tensor) -> Tensor:
    """The mean of every example's values that count, ``[N]``; 0 where none does."""
    kept = values.where(counted, values.new_zeros(())).flatten(1).sum(1)
    return kept / counted.flatten(1).sum(1).clamp(min=1)
