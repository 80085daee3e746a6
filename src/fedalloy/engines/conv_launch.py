"""How the kernels of :mod:`fedalloy.engines.conv_triton` are called: shapes, and the sizes of their blocks."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedalloy.engines import conv_triton
from fedalloy.engines.client_conv import After, Drawn
from fedalloy.engines.conv_chain import ProductStage
from fedalloy.engines.cuda_graphs import Precision

_PROGRAMS = 800
"""About six for each multiprocessor of a large GPU."""
ROUNDED = 0x1000, -0x2000
_EXACT = {"float32": "ieee", "tf32": "tf32", "bf16": "ieee"}


def convolve(
    stage: ProductStage, images: Tensor | Drawn, weight: Tensor, after: After, precision: Precision
) -> tuple[Tensor, Tensor | None]:
    """See :func:`fedalloy.engines.client_conv.convolve`."""
    clients, batch = images.rows.shape if isinstance(images, Drawn) else images.shape[:2]
    (down, right, outputs), scale = stage.shape, 2 if after.pools else 1
    form = clients, batch, down // scale, right // scale, outputs
    out = torch.empty(form, dtype=images.dtype, device=weight.device)
    chosen = torch.empty(form if after.pools else (1,), dtype=torch.int8, device=weight.device)
    block = _blocks(outputs, stage.inputs if (stage.reads or (0,))[-1] < 16 else (stage.reads or (0,))[-1])
    grid = triton.cdiv(batch * down * right, block["BM"]), clients, triton.cdiv(outputs, block["BN"])
    bias = weight if after.bias is None else after.bias
    conv_triton.convolve[grid](
        *_source(images), rounded(weight, precision), bias, out, chosen, **_strides(stage, images), **_weights(weight),
        **_shape(stage, batch),
        BIAS=after.bias is not None, ACT=after.activation, POOL=after.pools, SUM=_sum(weight), PREC=_EXACT[precision],
        ROUND=precision, **block,
    )  # fmt: skip
    return out, chosen if after.pools else None


def by_input(
    stage: ProductStage, batch: int, grad: Tensor, weight: Tensor, precision: Precision, before: Tensor | None, act: str
) -> Tensor:
    """See :func:`fedalloy.engines.client_conv.by_input`."""
    assert stage.reads is not None
    (height, width, channels), clients = stage.reads, len(grad)
    out = torch.empty(clients, batch, height, width, channels, dtype=grad.dtype, device=grad.device)
    block = _blocks(channels, stage.shape[2])
    grid = triton.cdiv(batch * height * width, block["BM"]), clients, triton.cdiv(channels, block["BN"])
    conv_triton.by_input[grid](
        grad, rounded(weight, precision), grad if before is None else before, out, **_weights(weight), **_shape(stage, batch),
        ACT=act, SUM=_sum(weight), PREC=_EXACT[precision], ROUND=precision, **block,
    )  # fmt: skip
    return out


def by_weight(
    stage: ProductStage,
    images: Tensor | Drawn,
    grad: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    precision: Precision,
    *,
    into: bool,
) -> None:
    """See :func:`fedalloy.engines.client_conv.by_weight`; writes into ``weight`` and ``bias``."""
    clients, batch = images.rows.shape if isinstance(images, Drawn) else images.shape[:2]
    (down, right, outputs), inputs = stage.shape, stage.inputs
    block = _blocks(outputs, 64) | {"BM": 64, "BK": 32 if inputs <= 32 else 64}
    tiles = triton.cdiv(inputs, block["BK"]) * clients * triton.cdiv(outputs, block["BN"])
    each = _share(batch * down * right, block["BM"], tiles)
    shares = triton.cdiv(batch * down * right, each)
    part = weight.new_empty(shares, clients, outputs, inputs)
    summed = weight.new_empty(shares, clients, outputs)
    grid = triton.cdiv(inputs, block["BK"]), clients, triton.cdiv(outputs, block["BN"]) * shares
    conv_triton.by_weight[grid](
        *_source(images), grad, part, summed, **_strides(stage, images), **_shape(stage, batch), CLIENTS=clients,
        SUM=_sum(weight), PREC=_EXACT[precision], EACH=each, **block,
    )  # fmt: skip
    count, biases = clients * outputs * inputs, clients * outputs
    conv_triton.subtract[(triton.cdiv(count, 1024),)](
        part, summed, weight, weight if bias is None else bias, count, biases, SHARES=shares, K=inputs,
        WO=weight.stride(1), BIAS=bias is not None, INTO=into, BLOCK=1024,
    )  # fmt: skip


def _share(results: int, step: int, tiles: int) -> int:
    """How many results a program adds up: so many that all multiprocessors have work, and at least eight steps."""
    shares = max(1, min(_PROGRAMS // max(1, tiles), results // (8 * step)))
    return int(triton.cdiv(triton.cdiv(results, shares), step) * step)


def unpool(
    stage: ProductStage, grad: Tensor, pooled: Tensor, chosen: Tensor, act: str, precision: Precision
) -> Tensor:
    """See :func:`fedalloy.engines.client_conv.unpool`."""
    clients, batch = grad.shape[:2]
    down, right, channels = stage.shape
    out = torch.empty(clients, batch * down * right, channels, dtype=grad.dtype, device=grad.device)
    grid = (triton.cdiv(out.numel(), 1024),)
    conv_triton.unpool[grid](
        grad.contiguous(), pooled, chosen, out, out.numel(), DOWN=down, RIGHT=right, O=channels, ACT=act, ROUND=precision,
        BLOCK=1024,
    )
    return out


def rounded(value: Tensor, precision: Precision) -> Tensor:
    """The nearest numbers with the ten bits of tf32, see ``conv_triton._rounded``; another precision changes nothing.

    >>> rounded(torch.tensor([1 + 2**-11 + 2**-20, -1 - 2**-12, float("nan")]), "tf32").tolist()
    [1.0009765625, -1.0, nan]
    """
    if precision != "tf32" or value.dtype != torch.float32:
        return value
    bits = (value.view(torch.int32) + ROUNDED[0]) & ROUNDED[1]
    return torch.where(value == value, bits.view(torch.float32), value)


def _source(images: Tensor | Drawn) -> tuple[Tensor, Tensor]:
    """Where images are, and which; a kernel that does not ask which gets any tensor."""
    return (
        (images.pool.contiguous(), images.rows.contiguous())
        if isinstance(images, Drawn)
        else (images.contiguous(), images)
    )


def _strides(stage: ProductStage, images: Tensor | Drawn) -> dict[str, Any]:
    """Steps from one image, row, column and channel to the next. A pool has its channels first."""
    assert stage.reads is not None
    height, width, channels = stage.reads
    if isinstance(images, Drawn):
        return {"XN": height * width * channels, "XY": width, "XX": 1, "XC": height * width, "GATHER": True}
    return {"XN": height * width * channels, "XY": width * channels, "XX": channels, "XC": 1, "GATHER": False}


def _weights(weight: Tensor) -> dict[str, int]:
    return {"WN": weight.stride(0), "WO": weight.stride(1)}


def _shape(stage: ProductStage, batch: int) -> dict[str, int]:
    window, reads, (down, right, outputs) = stage.window, stage.reads, stage.shape
    assert window is not None
    assert reads is not None
    return {
        "BATCH": batch, "H": reads[0], "W": reads[1], "I": reads[2], "O": outputs, "DOWN": down, "RIGHT": right,
        "KH": window.size[0], "KW": window.size[1], "SH": window.stride[0], "SW": window.stride[1],
        "PH": window.padding[0], "PW": window.padding[1],
    }  # fmt: skip


def _sum(weight: Tensor) -> Any:
    """The type of sums."""
    return tl.float64 if weight.dtype == torch.float64 else tl.float32


def _blocks(columns: int, depth: int) -> dict[str, int]:
    """The sizes of blocks of results, and how much of the depth is added up at a time."""
    wide = max(16, min(64, triton.next_power_of_2(columns)))
    deep = max(16, min(32, triton.next_power_of_2(depth)))
    return {"BM": 128, "BN": wide, "BK": deep, "num_warps": 4, "num_stages": 3}
