"""How the kernels of :mod:`conv_triton` are called: shapes, and the sizes of their blocks."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedalloy.engines.kernels.client_conv import After, DrawnImages, nearly_exact, wide
from fedalloy.engines.kernels.conv_chain import ProductStage
from fedalloy.engines.kernels.on_gpu import conv_triton
from fedalloy.engines.precision import Precision

PROGRAMS = 1600
"""About twelve for each multiprocessor of a large GPU."""
CHOSEN: dict[str, tuple[int, int, int, int, int]] = {}
"""Sizes of blocks by kernel, instead of those below; to try them."""
_EXACT = {"float32": "ieee", "tf32": "tf32", "bf16": "ieee", "tf32x3": "tf32x3"}


def convolve(
    stage: ProductStage,
    images: Tensor | DrawnImages,
    weight: Tensor,
    after: After,
    precision: Precision,
    *,
    loads: bool,
) -> tuple[Tensor, Tensor | None]:
    """See :func:`client_conv.convolve`; ``loads`` rounds what is read."""
    clients, batch = images.rows.shape if isinstance(images, DrawnImages) else images.shape[:2]
    (down, right, outputs), scale = stage.shape, 2 if after.pools else 1
    form = clients, batch, down // scale, right // scale, outputs
    out = torch.empty(form, dtype=images.dtype, device=weight.device)
    chosen = torch.empty(form if after.pools else (1,), dtype=torch.int8, device=weight.device)
    assert stage.reads is not None
    block = _blocks("convolve", outputs, stage.inputs if stage.reads[2] < 16 else stage.reads[2], precision)
    grid = triton.cdiv(batch * down * right, block["BM"]), clients, triton.cdiv(outputs, block["BN"])
    bias = weight if after.bias is None else after.bias
    conv_triton.convolve[grid](
        *_source(images), weight, bias, out, chosen, **_strides(stage, images), **_weights(weight),
        **_shape(stage, batch),
        BIAS=after.bias is not None, ACT=after.activation, POOL=after.pools, SUM=_sum(weight), PREC=_EXACT[precision],
        ROUND=_stored(precision, loads), LOADS=loads, **block,
    )  # fmt: skip
    return out, chosen if after.pools else None


def by_input(
    stage: ProductStage,
    batch: int,
    grad: Tensor,
    turned: Tensor,
    precision: Precision,
    before: Tensor | None,
    activation: str,
    *,
    loads: bool,
) -> Tensor:
    """See :func:`client_conv.by_input`; the weights are ``[C, taps, inputs, outputs]``."""
    assert stage.reads is not None
    (height, width, channels), outputs, clients = stage.reads, stage.shape[2], len(grad)
    out = torch.empty(clients, batch, height, width, channels, dtype=grad.dtype, device=grad.device)
    block = _blocks("by_input", channels, outputs, precision)
    grid = triton.cdiv(batch * height * width, block["BM"]), clients, triton.cdiv(channels, block["BN"])
    conv_triton.by_input[grid](
        grad, turned, grad if before is None else before, out, **_shape(stage, batch), ACT=activation, SUM=_sum(turned),
        PREC=_EXACT[precision],
        ROUND=_stored(precision, loads), LOADS=loads, **block,
    )  # fmt: skip
    return out


def by_weight(
    stage: ProductStage,
    images: Tensor | DrawnImages,
    grad: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    precision: Precision,
    *,
    into: bool,
    loads: bool,
) -> None:
    """See :func:`client_conv.by_weight`; writes into ``weight`` and ``bias``."""
    clients, batch = images.rows.shape if isinstance(images, DrawnImages) else images.shape[:2]
    (down, right, outputs), inputs = stage.shape, stage.inputs
    block = _blocks("by_weight", outputs, inputs, precision)
    tiles = triton.cdiv(inputs, block["BK"]) * clients * triton.cdiv(outputs, block["BN"])
    each = _share(batch * down * right, block["BM"], tiles)
    shares = triton.cdiv(batch * down * right, each)
    part = weight.new_empty(shares, clients, outputs, inputs)
    summed = weight.new_empty(shares, clients, outputs)
    grid = triton.cdiv(inputs, block["BK"]), clients, triton.cdiv(outputs, block["BN"]) * shares
    conv_triton.by_weight[grid](
        *_source(images), grad, part, summed, **_strides(stage, images), **_shape(stage, batch), CLIENTS=clients,
        SUM=_sum(weight), PREC=_EXACT[precision], EACH=each, LOADS=loads, **block,
    )  # fmt: skip
    count, biases = clients * outputs * inputs, clients * outputs
    conv_triton.subtract[(triton.cdiv(count, 1024),)](
        part, summed, weight, weight if bias is None else bias, count, biases, SHARES=shares, K=inputs,
        WO=weight.stride(1), BIAS=bias is not None, INTO=into, BLOCK=1024,
    )  # fmt: skip


def _share(results: int, step: int, tiles: int) -> int:
    """How many results a program adds up: so many that all multiprocessors have work, and at least eight steps."""
    shares = max(1, min(PROGRAMS // max(1, tiles), results // (8 * step)))
    return int(triton.cdiv(triton.cdiv(results, shares), step) * step)


def unpool(
    stage: ProductStage, grad: Tensor, pooled: Tensor, chosen: Tensor, activation: str, precision: Precision
) -> Tensor:
    """See :func:`client_conv.unpool`."""
    clients, batch = grad.shape[:2]
    down, right, channels = stage.shape
    out = torch.empty(clients, batch * down * right, channels, dtype=grad.dtype, device=grad.device)
    grid = (triton.cdiv(out.numel(), 1024),)
    conv_triton.unpool[grid](
        grad.contiguous(),
        pooled,
        chosen,
        out,
        out.numel(),
        DOWN=down,
        RIGHT=right,
        OUT=channels,
        ACT=activation,
        SUM=_sum(out),
        ROUND=precision,
        BLOCK=1024,
    )
    return out


def inner_products(one: Tensor, other: Tensor, precision: str) -> Tensor:
    """See :func:`client_conv.inner_products`."""
    (clients, rows, length), columns = one.shape, other.shape[1]
    block = {"BM": _power(rows, 16, 64), "BN": _power(columns, 16, 64), "BK": 64}
    places = triton.cdiv(rows, block["BM"]) * triton.cdiv(columns, block["BN"])
    each = _share(length, block["BK"], places * clients)
    shares = triton.cdiv(length, each)
    out = torch.empty(shares, clients, rows, columns, dtype=wide(one), device=one.device)
    conv_triton.inner_products[(shares, clients, places)](
        one, other, out, ONE=one.stride(0), OTHER=other.stride(0), CLIENTS=clients, ROWS=rows, COLUMNS=columns,
        N=length, EACH=each, SUM=_sum(out), PREC=_EXACT[precision], num_warps=4, num_stages=3, **block,
    )  # fmt: skip
    return out[0] if shares == 1 else out.sum(0)


def subtract_product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """See :func:`client_conv.subtract_product`."""
    clients, rows, length = out.shape
    block = {"BM": _power(rows, 16, 64), "BN": 128, "BK": _power(right.shape[1], 16, 64)}
    grid = triton.cdiv(length, block["BN"]), clients, triton.cdiv(rows, block["BM"])
    conv_triton.subtract_product[grid](
        left.contiguous(), right, out, RIGHT=right.stride(0), ROWS=rows, DEPTH=right.shape[1], N=length,
        SUM=_sum(left), PREC=_EXACT[nearly_exact(left)], num_warps=4, num_stages=2, **block,
    )  # fmt: skip


def rounded(value: Tensor, precision: Precision) -> Tensor:
    """See :func:`client_conv.rounded`."""
    if precision != "tf32" or value.dtype != torch.float32:
        return value
    value = value.contiguous()
    out = torch.empty_like(value)
    conv_triton.round_all[(triton.cdiv(value.numel(), 1024),)](value, out, value.numel(), BLOCK=1024)
    return out


def _stored(precision: Precision, loads: bool) -> Precision:
    """The precision of what is stored: what is rounded when it is read need not be when it is written."""
    return "float32" if loads else precision


def _power(count: int, least: int, most: int) -> int:
    """The next power of two within limits."""
    return int(max(least, min(most, triton.next_power_of_2(count))))


def _source(images: Tensor | DrawnImages) -> tuple[Tensor, Tensor]:
    """Where images are, and which; a kernel that does not ask which gets any tensor."""
    return (
        (images.pool.contiguous(), images.rows.contiguous())
        if isinstance(images, DrawnImages)
        else (images.contiguous(), images)
    )


def _strides(stage: ProductStage, images: Tensor | DrawnImages) -> dict[str, Any]:
    """Steps from one image, row, column and channel to the next. A pool has its channels first."""
    assert stage.reads is not None
    height, width, channels = stage.reads
    if isinstance(images, DrawnImages):
        return {"XN": height * width * channels, "XY": width, "XX": 1, "XC": height * width, "GATHER": True}
    return {"XN": height * width * channels, "XY": width * channels, "XX": channels, "XC": 1, "GATHER": False}


def _weights(weight: Tensor) -> dict[str, int]:
    return {"WN": weight.stride(0), "WO": weight.stride(1)}


def _shape(stage: ProductStage, batch: int) -> dict[str, int]:
    window, reads, (down, right, outputs) = stage.window, stage.reads, stage.shape
    assert window is not None
    assert reads is not None
    return {
        "BATCH": batch, "H": reads[0], "W": reads[1], "IN": reads[2], "OUT": outputs, "DOWN": down, "RIGHT": right,
        "KH": window.size[0], "KW": window.size[1], "SH": window.stride[0], "SW": window.stride[1],
        "PH": window.padding[0], "PW": window.padding[1],
    }  # fmt: skip


def _sum(weight: Tensor) -> Any:
    """The type of sums."""
    return tl.float64 if weight.dtype == torch.float64 else tl.float32


def _blocks(kernel: str, columns: int, depth: int, precision: Precision) -> dict[str, int]:
    """The sizes of blocks: rows and columns of a result, and how much of the depth is added up at a time; of weights'
    gradients results at a time, outputs and inputs."""
    rows, wide, deep, warps, stages = CHOSEN.get(kernel) or _usual(kernel, columns, precision)
    sizes = {"BM": rows, "BN": _power(columns, 16, wide), "BK": _power(depth, 16, deep)}
    return {**sizes, "num_warps": warps, "num_stages": stages}


def _usual(kernel: str, columns: int, precision: Precision) -> tuple[int, int, int, int, int]:
    """Sizes that ``benchmarks.gpu_blocks`` found to be fast: rows, columns, depth, warps and stages."""
    if kernel != "by_weight":
        return 128, 64, 32, 4, 3
    if columns <= 16:
        return 64, 16, 32, 2, 4
    return (64, 64, 64, 4, 3) if precision == "bf16" and columns > 32 else (64, 32, 128, 4, 3)
