"""Plain SGD of a block of clients on one linear layer with cross-entropy, in one call of a compiled kernel.

It does what :func:`fused.descend` does, client by client with everything in the first caches, where
that function calls torch a dozen times per step. Not differentiable.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.blocks import Prepared
from fedalloy.core.contributions import Notes
from fedalloy.core.native import library, tracing
from fedalloy.core.program import TrainingResult
from fedalloy.core.types import Context, Tree
from fedalloy.engines.kinds import PlainSgd

DIFFERENTIABLE = False
MOST_WEIGHTS = 1 << 16
"""Larger layers are left to torch: two of them, with momentum three, and a batch must fit into the second cache."""
_NUMBERS = ("clients", "steps", "planned", "batch", "features", "classes", "examples")
_POINTERS = (
    "x", "weight", "bias", "shift", "bias_shift", "y", "start", "index", "running", "seen", "full", "mask", "weights",
    "biases", "losses", "weight_squares", "bias_squares",
)  # fmt: skip
_DONE, _NOT_FINITE = 0, 3
_NAMES = {torch.float32: "logistic_float", torch.float64: "logistic_double"}


class _Job(ctypes.Structure):
    """``struct block`` of ``native.c``."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_double) for name in ("lr", "decay", "pull", "momentum")),
        *((name, ctypes.c_void_p) for name in _POINTERS),
    )


def train(
    weight: str, bias: str | None, sgd: PlainSgd, params: Tree, block: Prepared, ctx: Context, shift: Tree | None = None
) -> TrainingResult | None:
    """The steps of a block; None where the kernel cannot be used, and where torch would raise an error. ``shift`` is
    added to every gradient of a client."""
    kernel = _kernel_for(params[weight], sgd)
    if kernel is None or not _fits(params, block, params[weight].shape[1]):
        return None
    shift = {name: leaf.contiguous() for name, leaf in (shift or {}).items()}
    clients = len(block)
    deltas = {name: torch.empty((clients, *leaf.shape), dtype=leaf.dtype) for name, leaf in params.items()}
    losses = torch.empty(clients, 2, dtype=torch.float64)
    squares = torch.empty(len(params), clients, dtype=torch.float64)
    job = _job(weight, bias, sgd, params, block, ctx.local_lr, shift, deltas, losses, squares)
    answer = kernel(ctypes.byref(job))
    if answer not in (_DONE, _NOT_FINITE):
        return None
    # What is not finite is looked at more closely when it is gathered.
    return TrainingResult({}, {}, losses, {"delta": deltas}, _notes(params, squares) if answer == _DONE else None)


def _job(
    weight: str, bias: str | None, sgd: PlainSgd, params: Tree, block: Prepared, lr: float, shift: Tree,
    deltas: Tree, losses: Tensor, squares: Tensor,
) -> _Job:  # fmt: skip
    x, y, index, steps = block.data.x, block.data.y, block.plan.index, len(block.running)
    classes, features = params[weight].shape
    running, full = (ctypes.c_int64 * steps)(*block.running), (ctypes.c_uint8 * steps)(*block.full)
    rows = dict(zip(params, range(0, squares.numel() * 8, squares.shape[1] * 8), strict=True))
    first = squares.data_ptr()
    job = _Job(
        len(block), steps, *index.shape[1:], features, classes, y.shape[0], lr, sgd.weight_decay, sgd.pull,
        sgd.momentum, x.data_ptr(), params[weight].data_ptr(), params[bias].data_ptr() if bias else None,
        shift[weight].data_ptr() if shift else None, shift[bias].data_ptr() if shift and bias else None, y.data_ptr(),
        block.data.start.data_ptr(), index.data_ptr(), ctypes.addressof(running), block.seen.data_ptr(),
        ctypes.addressof(full), block.mask.data_ptr(), deltas[weight].data_ptr(),
        deltas[bias].data_ptr() if bias else None, losses.data_ptr(), first + rows[weight],
        first + rows[bias] if bias else None,
    )  # fmt: skip
    job.kept = running, full, shift  # the job holds only their addresses
    return job


def _notes(params: Tree, squares: Tensor) -> Notes:
    """The notes of what the clients send, from the kernel's squared lengths, which are all finite."""
    named = tuple([("delta", name) for name in params])
    return Notes(named, squares, *_fine(*squares.shape), clean=True)


@lru_cache(8)
def _fine(leaves: int, clients: int) -> tuple[Tensor, Tensor]:
    """That all are finite and none is negative; expanded, so that nobody can write into them."""
    return torch.tensor(True).expand(leaves, clients), torch.tensor(False).expand(leaves, clients)


def _kernel_for(weight: Tensor, sgd: PlainSgd) -> Any:
    compiled = library()
    if compiled is None or tracing() or sgd.nesterov or not weight.is_cpu or weight.numel() > MOST_WEIGHTS:
        return None
    return getattr(compiled, _NAMES[weight.dtype]) if weight.dtype in _NAMES else None


def _fits(params: Tree, block: Prepared, features: int) -> bool:
    """Whether everything is laid out as the kernel reads it."""
    x, y, real = block.data.x, block.data.y, next(iter(params.values())).dtype
    if not (x.dtype == real and x.shape[0] == y.shape[0] and x.is_contiguous() and block.mask.is_contiguous()):
        return False
    if x.shape[1:].numel() != features:
        return False
    for leaf in params.values():
        if leaf.dtype != real or not leaf.is_contiguous():
            return False
    for one in (y, block.data.start, block.plan.index, block.seen):
        if one.dtype != torch.int64 or not one.is_contiguous():
            return False
    return True
