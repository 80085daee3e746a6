"""Features of a frozen backbone, computed once instead of in every step."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.types import Examples
from fedalloy.tasks.dropout import Dropout
from fedalloy.tasks.federation import FederatedTask, Pool
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.tasks.preparing import Preparation

_CHUNK = 256


def cached_features(task: FederatedTask, upto: str) -> FederatedTask:
    """The same task after the layer ``upto``: examples are replaced by the outputs of the frozen part.

    The model must be an ``nn.Sequential`` in which nothing up to and including ``upto`` is trained. The remaining
    layers keep their names and initial values, so a run gives the same model as without the cache, up to rounding, at
    the cost of the head only.
    """
    objective = task.objective
    if not isinstance(objective, ModuleObjective):
        raise SpecError(f"the features of a {type(objective).__name__} cannot be cached: the model must be a module")
    if objective.augmentation is not None:
        raise SpecError("features of augmented examples change in every step and cannot be cached: leave augment out")
    body = _cut(objective.structure, upto)[0]
    _check_frozen(objective, body)
    frozen = copy.deepcopy(body).eval()
    train, valid, test = (_through(frozen, pool, objective.dtype) for pool in (task.train, task.valid, task.test))
    common = task.global_test
    if common is not None:
        common = Examples(_features(frozen, common.x, objective.dtype), common.y)
    head = objective.remodelled(lambda model: _cut(model, upto)[1]).to(task.train.x.device)
    steps = Preparation(unknown=f"features up to '{upto}' were computed beforehand (cached_features)")
    return replace(task, objective=head, train=train, valid=valid, test=test, global_test=common, prepared=steps)


def _cut(model: nn.Module, upto: str) -> tuple[nn.Sequential, nn.Sequential]:
    """The layers up to and including ``upto``, and the rest, with their names."""
    layers = dict(model.named_children())
    if not isinstance(model, nn.Sequential):
        raise SpecError(f"only an nn.Sequential can be cut after '{upto}', the model is a {type(model).__name__}")
    if upto not in list(layers)[:-1]:
        raise SpecError(
            f"features up to '{upto}': the model has no such layer before its last; {nearest(upto, layers)}"
        )
    place = list(layers).index(upto) + 1
    named = list(layers.items())
    return nn.Sequential(OrderedDict(named[:place])), nn.Sequential(OrderedDict(named[place:]))


def _check_frozen(objective: ModuleObjective, body: nn.Sequential) -> None:
    """Refuse to cache layers whose output can change: trained leaves, running statistics, dropout."""
    changing = {name for leaves in objective.init(Key.of(0)) for name in leaves}
    inside = {name for name, _ in [*body.named_parameters(), *body.named_buffers()]}
    if moving := sorted(changing & inside):
        raise SpecError(
            f"'{moving[0]}' is trained or exchanged, so its features change: freeze it (trainable = ['head.*']) "
            "or cut earlier"
        )
    if any(isinstance(layer, Dropout) and layer.training for layer in body.modules()):
        raise SpecError("the part to be cached has Dropout: move Dropout behind the cut")


def _through(frozen: nn.Module, pool: Pool, dtype: torch.dtype) -> Pool:
    return replace(pool, x=_features(frozen, pool.x, dtype))


@torch.no_grad()
def _features(frozen: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The outputs of the frozen part, computed on the device of the data."""
    frozen = frozen.to(x.device)
    parts = [part.to(dtype) if part.is_floating_point() else part for part in x.split(_CHUNK)]
    return torch.cat([frozen(part) for part in parts])
