"""One local step, put together from its parts: precision, accumulation, clipping, the optimizer. Pure and vmappable.

Solvers call ``descend_start`` in ``begin`` and, in ``step``, ``gradient`` instead of ``grad_at`` and ``descend``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.errors import SpecError
from fedalloy.core.protocols import Carry, GradAt
from fedalloy.core.types import Context, Tree

if TYPE_CHECKING:
    from fedalloy.methods.solvers.training import LocalTraining

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_GROWTH_INTERVAL = 2000
_TINY = 1e-6
"""What torch adds to a norm before dividing by it."""


def descend_start(training: LocalTraining, params: Tree) -> Carry:
    """The memory of local steps at the start of a round."""
    first, memory = next(iter(params.values())), training.rule.start(params)
    if training.accumulate > 1:
        memory |= {"sum": tree.zeros_like(params), "held": torch.zeros((), dtype=first.dtype, device=first.device)}
    if training.precision == "fp16":
        scale = torch.full((), training.loss_scale, dtype=torch.float32, device=first.device)
        memory |= {"scale": scale, "good": torch.zeros_like(scale)}
    return memory


def gradient(training: LocalTraining, grad_at: GradAt, params: Tree, memory: Carry, **asked: Any) -> Tree:
    """``grad_at(params, **asked)`` in the precision of the training; with fp16 the loss is scaled, the gradient not."""
    if training.precision == "full":
        return grad_at(params, **asked)
    first = next(iter(params.values()))
    _check_precision(training.precision, first)
    # Without a cache: a captured CUDA graph and vmap must not reuse a cast parameter of another call.
    with torch.autocast(first.device.type, _AUTOCAST[training.precision], cache_enabled=False):
        if training.precision == "bf16":
            return grad_at(params, **asked)
        scale, of = memory["scale"], asked.pop("of", None)
        grads = grad_at(params, of=lambda loss: scale * (loss if of is None else of(loss)), **asked)
    return tree.map_leaves(lambda leaf: leaf / scale.to(leaf.dtype), grads)


def descend(
    training: LocalTraining, params: Tree, grads: Tree, memory: Carry, draws: Tree, ctx: Context, scale: float = 1.0
) -> tuple[Tree, Carry]:
    """One local step: ``w <- w - lr * direction``. ``draws`` are those of the step, ``scale`` multiplies its size."""
    lr = ctx.local_lr if "lr_factor" not in draws else ctx.local_lr * draws["lr_factor"]
    lr = lr if scale == 1.0 else scale * lr
    if not training.composed:
        return training.rule.move(params, grads, memory, lr)
    now, finite = _accumulated(training, grads, memory)
    moved, new = training.rule.move(params, clipped(training, now["grads"]), memory, lr)
    # Not taken: a step whose gradients overflowed, and one that only adds to the sum.
    taken = _both(finite, draws["flush"] if training.accumulate > 1 else None)
    if taken is None:
        return moved, new
    moved, new = _chosen(taken, moved, params), _chosen(taken, new, memory)
    return moved, {**new, **_held(now, taken), **_scaled(memory, finite)}


def clipped(training: LocalTraining, grads: Tree) -> Tree:
    """The gradients within ``clip_value`` in every element, then within ``clip_norm`` as one vector."""
    if training.clip_value is not None:
        limit = training.clip_value
        grads = tree.map_leaves(lambda leaf: leaf.clamp(-limit, limit), grads)
    if training.clip_norm is None:
        return grads
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(leaf) for leaf in grads.values()]))
    share = (training.clip_norm / (norm + _TINY)).clamp(max=1.0)
    return tree.map_leaves(lambda leaf: leaf * share.to(leaf.dtype), grads)


def _accumulated(training: LocalTraining, grads: Tree, memory: Carry) -> tuple[dict[str, Any], Tensor | None]:
    """The mean of the gradients since the last step, and whether those of this batch are finite (None: not asked)."""
    finite = torch.stack([leaf.isfinite().all() for leaf in grads.values()]).all() if "scale" in memory else None
    if training.accumulate == 1:
        return {"grads": grads}, finite
    summed, held = tree.add(memory["sum"], grads), memory["held"] + 1
    if finite is not None:
        summed, held = _chosen(finite, summed, memory["sum"]), torch.where(finite, held, memory["held"])
    count = held.clamp(min=1)
    return {"grads": tree.map_leaves(lambda leaf: leaf / count, summed), "sum": summed, "held": held}, finite


def _held(now: dict[str, Any], taken: Tensor) -> Carry:
    """The sum of gradients after the step: empty if it was taken."""
    if "sum" not in now:
        return {}
    empty = _chosen(taken, tree.zeros_like(now["sum"]), now["sum"])
    return {"sum": empty, "held": torch.where(taken, torch.zeros_like(now["held"]), now["held"])}


def _scaled(memory: Carry, finite: Tensor | None) -> Carry:
    """The loss scale after the step: half after an overflow, double after many steps without one."""
    if finite is None:
        return {}
    good = torch.where(finite, memory["good"] + 1, torch.zeros_like(memory["good"]))
    grown = torch.where(good >= _GROWTH_INTERVAL, 2 * memory["scale"], memory["scale"])
    scale = torch.where(finite, grown, memory["scale"] / 2)
    return {"scale": scale, "good": torch.where(good >= _GROWTH_INTERVAL, torch.zeros_like(good), good)}


def _both(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other.to(one.device)


def _chosen(flag: Tensor, one: Carry, other: Carry) -> Carry:
    """``one`` if ``flag``, else ``other``, leaf by leaf; what ``one`` lacks is left out."""
    return {
        name: _chosen(flag, value, other[name])
        if isinstance(value, dict)
        else torch.where(flag.to(value.device), value, other[name])
        for name, value in one.items()
    }


def _check_precision(precision: str, leaf: Tensor) -> None:
    if leaf.dtype != torch.float32:
        raise SpecError(f"precision = '{precision}' is for models in float32, and this one is in {leaf.dtype}")
    if precision == "fp16" and not leaf.is_cuda:
        raise SpecError("precision = 'fp16' is for models on a CUDA device: choose 'bf16', which every device has")
