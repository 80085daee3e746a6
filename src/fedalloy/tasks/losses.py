"""Losses by name: the loss of each example, and whether it counts as a hit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedalloy.core.errors import SpecError, nearest

PerExample = Callable[[Tensor, Tensor], Tensor]
"""``(outputs [N, ...], y [N, ...]) -> [N]``."""


@dataclass(frozen=True)
class Loss:
    """A loss per example and the corresponding hits (0 or 1, NaN if undefined)."""

    losses: PerExample
    hits: PerExample


def choose(loss: str | PerExample | Loss) -> Loss:
    """A loss by name, any function of ``(outputs, y)`` that returns one value per example, or a loss of ``torch.nn``,
    which is used without its ``reduction``: class weights then scale examples without being normalised."""
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type):
        raise SpecError(f"loss is the class {loss.__name__}: give an instance, {loss.__name__}(reduction='none')")
    if callable(loss):
        return Loss(OwnLoss(_unreduced(loss)), guessed_hits)
    if not isinstance(loss, str) or loss not in LOSSES:
        raise SpecError(f"unknown loss '{loss}': {nearest(str(loss), LOSSES)}, or a function of (outputs, y)")
    return LOSSES[loss]


@dataclass(frozen=True)
class OwnLoss:
    """A user's function, which must return a loss per example; several values per example are averaged."""

    function: PerExample

    def __call__(self, outputs: Tensor, y: Tensor) -> Tensor:
        """One value per example."""
        if isinstance(self.function, nn.Module) and y.is_floating_point() and outputs.numel() == y.numel():
            outputs = outputs.reshape(y.shape)  # [N, 1] against [N] would broadcast to [N, N]
        losses = self.function(outputs, y)
        most = max(outputs.numel(), y.numel())  # more values mean that outputs and y were broadcast
        if not isinstance(losses, Tensor) or losses.dim() == 0 or len(losses) != len(outputs) or losses.numel() > most:
            got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
            raise SpecError(
                f"loss {_name(self.function)} returned {got} for {len(outputs)} examples: it must return one value per "
                "example and leave the mean to fedalloy; functions and losses of torch do with reduction='none'"
            )
        return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def _unreduced(loss: PerExample) -> PerExample:
    """A loss of ``torch.nn`` without its reduction; other functions unchanged."""
    reduction = getattr(loss, "reduction", None)
    if not isinstance(loss, nn.Module) or reduction in (None, "none"):
        return loss
    if reduction != "mean":
        raise SpecError(
            f"loss {_name(loss)} has reduction='{reduction}', so that its size depends on the batch: give it with "
            "reduction='none' (the mean over the batch is taken here)"
        )
    alone: Any = copy.copy(loss)
    alone.reduction = "none"
    return cast(PerExample, alone)


def _name(loss: PerExample) -> str:
    return type(loss).__name__ if isinstance(loss, nn.Module) else getattr(loss, "__name__", repr(loss))


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
    """NaN, because a regression has no hits; summaries skip and count these values."""
    return torch.full((outputs.shape[0],), torch.nan, dtype=outputs.dtype, device=outputs.device)


def guessed_hits(outputs: Tensor, y: Tensor) -> Tensor:
    """Hits for a user's loss: by argmax if outputs and labels look like classification, else NaN."""
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
