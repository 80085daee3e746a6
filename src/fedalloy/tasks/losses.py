"""Losses by name: what one example costs and whether it counts as a hit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fedalloy.core.errors import SpecError, nearest

PerExample = Callable[[Tensor, Tensor], Tensor]
"""``(outputs [N, ...], y [N, ...]) -> [N]``."""


@dataclass(frozen=True)
class Loss:
    """A loss per example and the hits (0 or 1, NaN where there is no such thing) that go with it."""

    losses: PerExample
    hits: PerExample


def choose(loss: str | PerExample | Loss) -> Loss:
    """A loss by name, or any function of ``(outputs, y)`` that returns one value per example."""
    if isinstance(loss, Loss):
        return loss
    if callable(loss):
        return Loss(loss, guessed_hits)
    if loss not in LOSSES:
        raise SpecError(f"unknown loss '{loss}': {nearest(loss, LOSSES)}, or a function of (outputs, y)")
    return LOSSES[loss]


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Negative log-likelihood of the class under the softmax of logits ``[N, classes]``."""
    return functional.cross_entropy(outputs, y, reduction="none")


def argmax_hits(outputs: Tensor, y: Tensor) -> Tensor:
    """Whether the largest logit is that of the class."""
    return (outputs.argmax(-1) == y).to(outputs.dtype)


def binary(outputs: Tensor, y: Tensor) -> Tensor:
    """Binary cross-entropy of one logit per example against 0 or 1."""
    logit = one_logit(outputs)
    return functional.binary_cross_entropy_with_logits(logit, y.to(logit.dtype), reduction="none")


def sign_hits(outputs: Tensor, y: Tensor) -> Tensor:
    """Whether the logit is positive exactly where the label is 1."""
    return ((one_logit(outputs) > 0) == (y > 0)).to(outputs.dtype)


def mse(outputs: Tensor, y: Tensor) -> Tensor:
    """Squared error, averaged over the outputs of an example."""
    error = outputs.reshape(y.shape) - y.to(outputs.dtype)
    return (error * error).flatten(1).mean(1) if error.dim() > 1 else error * error


def no_hits(outputs: Tensor, y: Tensor) -> Tensor:
    """A regression has no hits: NaN, which summaries skip and count."""
    return torch.full((outputs.shape[0],), torch.nan, dtype=outputs.dtype, device=outputs.device)


def guessed_hits(outputs: Tensor, y: Tensor) -> Tensor:
    """Hits for a user's own loss: classes where outputs and labels look like it, none otherwise."""
    classes = outputs.dim() == 2 and outputs.shape[1] > 1 and y.dim() == 1 and not y.is_floating_point()
    return argmax_hits(outputs, y) if classes else no_hits(outputs, y)


def one_logit(outputs: Tensor) -> Tensor:
    """The single logit of every example, ``[N]``."""
    if outputs.dim() > 1 and outputs.shape[1:].numel() != 1:
        raise SpecError(
            f"loss 'binary' needs one logit per example, the model gives {tuple(outputs.shape[1:])}: "
            "build it with classes=1, or use 'cross_entropy'"
        )
    return outputs.reshape(outputs.shape[0])


LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, argmax_hits),
    "binary": Loss(binary, sign_hits),
    "mse": Loss(mse, no_hits),
}
