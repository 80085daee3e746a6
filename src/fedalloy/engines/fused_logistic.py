"""Plain SGD of a block of clients on one linear layer with cross-entropy, in one call of a compiled kernel.

It does what :func:`fedalloy.engines.fused.descend` does, client by client with everything in the first caches, where
that function calls torch a dozen times per step. Not differentiable.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.blocks import Prepared
from fedalloy.core.types import Context, Tree
from fedalloy.engines.kinds import PlainSgd
from fedalloy.core.native import library

DIFFERENTIABLE = False
MOST_WEIGHTS = 1 << 16
"""Larger layers are left to torch: two of them and a batch must fit into the second cache."""
_NUMBERS = ("clients", "steps", "batch", "features", "classes", "examples")
_POINTERS = ("x", "weight", "bias", "y", "rows", "running", "seen", "full", "mask", "weights", "biases", "losses")
_NAMES = {torch.float32: "logistic_float", torch.float64: "logistic_double"}


class _Job(ctypes.Structure):
    """``struct block`` of ``native.c``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_double) for name in ("lr", "decay", "pull")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    )


def descend(
    weight: str, bias: str | None, sgd: PlainSgd, params: Tree, block: Prepared, ctx: Context
) -> tuple[Tree, Tensor] | None:
    """The clients' deltas and the sums of their losses; None where the kernel cannot be used, and where torch would
    raise an error."""
    kernel = _kernel_for(params[weight], sgd)
    x, y = block.data.x, block.data.y
    if kernel is None or not _fits(x, y, params, block):
        return None
    clients, (classes, features) = len(block), params[weight].shape
    deltas = {name: leaf.new_empty((clients, *leaf.shape)) for name, leaf in params.items()}
    losses = torch.empty(clients, 2, dtype=torch.float64)
    steps = len(block.running)
    running, full = (ctypes.c_int64 * steps)(*block.running), (ctypes.c_uint8 * steps)(*block.full)
    job = _Job(
        clients, steps, block.rows.shape[2], features, classes, len(y), ctx.local_lr, sgd.weight_decay, sgd.pull,
        x.data_ptr(), params[weight].data_ptr(), params[bias].data_ptr() if bias else None, y.data_ptr(),
        block.rows.data_ptr(), ctypes.addressof(running), block.seen.data_ptr(), ctypes.addressof(full),
        block.mask.data_ptr(), deltas[weight].data_ptr(), deltas[bias].data_ptr() if bias else None, losses.data_ptr(),
    )  # fmt: skip
    return (deltas, losses) if kernel(ctypes.byref(job)) == 0 else None


def _kernel_for(weight: Tensor, sgd: PlainSgd) -> Any:
    compiled = library()
    small = weight.device.type == "cpu" and weight.numel() <= MOST_WEIGHTS and weight.dtype in _NAMES
    return getattr(compiled, _NAMES[weight.dtype]) if compiled is not None and small and not sgd.momentum else None


def _fits(x: Tensor, y: Tensor, params: Tree, block: Prepared) -> bool:
    """Whether everything is laid out as the kernel reads it."""
    first = next(iter(params.values()))
    return (
        x.dtype == first.dtype
        and y.dtype == torch.int64
        and x.is_contiguous()
        and y.is_contiguous()
        and all(leaf.is_contiguous() and leaf.dtype == first.dtype for leaf in params.values())
        and block.rows.is_contiguous()
        and block.mask.is_contiguous()
        and block.seen.is_contiguous()
        and block.rows.dtype == block.seen.dtype == torch.int64
        and len(x) == len(y)
    )
