"""The precision of products and convolutions on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Precision = Literal["float32", "tf32", "bf16"]


@contextmanager
def precise(precision: Precision) -> Iterator[None]:
    """Matrix products and convolutions in float32, in tf32 (the same range, ten bits of mantissa), or in bf16."""
    autocast = torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)
    with products_in(precision), autocast:
        yield


@contextmanager
def products_in(precision: Precision) -> Iterator[None]:
    """The same, except that tensors in float32 are not converted to bf16."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """While a step is warmed up and captured, cuDNN times its algorithms for every convolution and takes the fastest.
    Two runs may then differ by rounding, so it does not where the user asked torch for deterministic algorithms."""
    cudnn = torch.backends.cudnn
    before, repeatable = cudnn.benchmark, cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
    cudnn.benchmark = before or not repeatable
    try:
        yield
    finally:
        cudnn.benchmark = before
