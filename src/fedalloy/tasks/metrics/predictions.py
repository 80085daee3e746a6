"""What a model predicts and what is true, for metrics over classes."""

from __future__ import annotations

import torch
from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import Objective
from fedalloy.tasks.losses.classes import CrossEntropy
from fedalloy.tasks.losses.layout import classes_last
from fedalloy.tasks.losses.loss import Loss
from fedalloy.tasks.losses.model_loss import ModelLoss

MOST_CLASSES = 1000
"""Classes of tokens or pixels that are counted one by one: the words of a language are not meant."""


def ignored_by(objective: Objective) -> int | None:
    """The target that does not count, None if all count."""
    rule = objective.loss_rule
    return rule.ignored if isinstance(rule, Loss) else None


def aligned(objective: Objective, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and targets of several targets per example, place by place, and which targets count. For a loss of the
    next token the output at one place belongs to the target of the next."""
    rule = objective.loss_rule
    rule = rule.rule(y) if isinstance(rule, ModelLoss) else rule
    shift = rule.shift if isinstance(rule, CrossEntropy) else 0
    logits, ignored = classes_last(outputs, y), ignored_by(objective)
    if shift:
        logits, y = logits[:, :-shift], y[:, shift:]
    return logits, y, torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored


def predicted_class(outputs: Tensor, y: Tensor) -> Tensor:
    """The class that the model picks for every target, in the shape of the targets: by the largest logit, or by the
    sign of the only one."""
    if outputs.numel() == y.numel():
        return (outputs.reshape(y.shape) > 0).long()
    return outputs.argmax(-1) if y.dim() == 1 else classes_last(outputs, y).argmax(-1)


def class_counts(objective: Objective, outputs: Tensor, y: Tensor) -> Tensor:
    """Evidence about classes. With one class per example ``[N, 2]``: the predicted one and the true one. Otherwise
    ``[N, 4 C]``: how many targets of every class were found, predicted, true, and possible. A label of several is
    always possible; a class of pixels is if it was predicted or true."""
    if y.dim() == 1:
        truth = (y > 0.5).long() if outputs.numel() == y.numel() else y
        return torch.stack([predicted_class(outputs, y), truth], 1)
    if outputs.numel() == y.numel():
        guess, truth = predicted_class(outputs, y).bool().unsqueeze(-1), (y > 0.5).unsqueeze(-1)
        ignored = ignored_by(objective)
        counted = torch.ones_like(y, dtype=torch.bool) if ignored is None else y != ignored
    else:
        logits, y_now, counted = aligned(objective, outputs, y)
        _check_few(logits.shape[-1])
        labels = torch.arange(logits.shape[-1], device=y.device)
        guess, truth = (part.unsqueeze(-1) == labels for part in (logits.argmax(-1), y_now))
    if y.dim() == 2 and outputs.numel() == y.numel():  # several labels: every label is a class
        parts = (guess & truth, guess, truth, torch.ones_like(guess))
        return torch.cat([part.squeeze(-1).double() for part in parts], 1)
    guess, truth = guess & counted.unsqueeze(-1), truth & counted.unsqueeze(-1)
    found, said, true = (part.flatten(1, -2).sum(1).double() for part in (guess & truth, guess, truth))
    return torch.cat([found, said, true, said + true], 1)


def _check_few(classes: int) -> None:
    if classes > MOST_CLASSES:
        raise SpecError(
            f"scores by class are for at most {MOST_CLASSES} classes of tokens or pixels, and these are {classes}: "
            "choose accuracy, top_k or perplexity"
        )


def one_against_rest(outputs: Tensor, y: Tensor) -> Tensor:
    """The score of every class or label, and whether it is the true one, ``[N, 2 C]``. Two classes are one pair: the
    single logit, or the difference of two."""
    if y.dim() > 2 or (y.dim() == 2 and outputs.shape != y.shape):
        raise SpecError("a metric of ranked scores is for one class, or for several labels, per example")
    if y.dim() == 2:
        return torch.cat([outputs.double(), (y > 0.5).double()], 1)
    if outputs.dim() == 1 or outputs.shape[1] <= 2:
        return torch.stack([positive_score(outputs).double(), (y > 0).double()], 1)
    truth = y.unsqueeze(1) == torch.arange(outputs.shape[1], device=y.device)
    return torch.cat([outputs.double().softmax(1), truth.double()], 1)


def positive_score(outputs: Tensor) -> Tensor:
    """The evidence for class 1: the single logit, or the difference of two."""
    if outputs.dim() == 1 or outputs.shape[1] == 1:
        return outputs.reshape(outputs.shape[0])
    return outputs[:, 1] - outputs[:, 0]
