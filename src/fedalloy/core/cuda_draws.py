"""Keyed draws on a CUDA device, in one kernel; :mod:`fedalloy.core.keys` uses it for batches of keys.

With torch's own operations a draw takes more than a dozen kernels, each over all its numbers: for a model with dropout
that is most of the memory traffic of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

_CODE = """template <typename T> T drawn(T key, T counter) {
    unsigned long long value = (unsigned long long)key + (unsigned long long)counter * 0x9E3779B97F4A7C15ULL;
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
    value = value ^ (value >> 31);
    return (T)(value >> SHIFT);
}"""
_checked: set[int] = set()
"""Devices, by index, on which the kernel gives the right numbers."""
_refused: set[int] = set()
"""Those on which it does not, or does not compile."""


def usable(keys: Tensor, plain: Callable[[Tensor, Tensor, int], Tensor]) -> bool:
    """Whether the draws of a batch of keys can be made by the kernel. The first call on a device compares it with
    ``plain``, the same function in torch's operations. What is being traced or compiled keeps these operations, which
    a compiler merges with others."""
    if not keys.is_cuda or torch.compiler.is_compiling() or _len_torch_dispatch_stack() > 0:
        return False
    device = keys.device.index
    if device in _refused or device in _checked:
        return device in _checked
    if torch.cuda.is_current_stream_capturing():  # a kernel must not be compiled, nor a result read, in a capture
        return False
    (_checked if _agrees(keys.device, plain) else _refused).add(device)
    return device in _checked


def drawn(keys: Tensor, counter: Tensor, digits: int) -> Tensor:
    """The first ``digits`` bits of number ``counter`` of every key; the shapes are broadcast."""
    made: Tensor = _operation()(keys, counter, digits)
    return made


def _agrees(device: torch.device, plain: Callable[[Tensor, Tensor, int], Tensor]) -> bool:
    """Whether the kernel compiles and gives the right numbers. Outside of ``vmap`` and ``grad``, in which even a new
    tensor is one of theirs."""
    with torch._C._DisableFuncTorch():
        keys = torch.tensor([[0], [-1], [1 << 62], [0x123456789ABCDEF]], device=device)
        counter = torch.arange(1, 34, device=device)
        try:
            return all(torch.equal(_kernel(one)(keys, counter), plain(keys, counter, one)) for one in (64, 53, 24))
        except Exception:  # no compiler on this machine, or another failure of it: torch's operations do the same
            return False


@cache
def _kernel(digits: int) -> Callable[[Tensor, Tensor], Tensor]:
    made: Callable[[Tensor, Tensor], Tensor] = torch.cuda.jiterator._create_jit_fn(code(digits))
    return made


def code(digits: int) -> str:
    """The function of the kernel, in C++."""
    return _CODE.replace("SHIFT", str(64 - digits))


@cache
def _operation() -> Any:
    """The kernel as an operation of torch, so that ``vmap`` can call it."""

    @torch.library.custom_op("fedalloy::drawn", mutates_args=())
    def operation(keys: Tensor, counter: Tensor, digits: int) -> Tensor:
        return _kernel(digits)(keys, counter)

    @operation.register_vmap
    def _(info: Any, dims: tuple[Any, ...], keys: Tensor, counter: Tensor, digits: int) -> tuple[Tensor, int]:
        keys, counter = (_front(value, dim, info) for value, dim in zip((keys, counter), dims[:2], strict=True))
        axes = max(keys.dim(), counter.dim())
        made: Tensor = operation(*(_widened(value, axes) for value in (keys, counter)), digits)
        return made, 0

    return operation


def _front(value: Tensor, dim: int | None, info: Any) -> Tensor:
    return value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)


def _widened(value: Tensor, axes: int) -> Tensor:
    """The value with axes of length 1 after the first, so that the others are broadcast from the last."""
    return value.reshape(value.shape[0], *[1] * (axes - value.dim()), *value.shape[1:])
