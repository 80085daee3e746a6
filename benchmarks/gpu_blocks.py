"""Sizes of blocks of the convolution kernels: how long each takes on the shapes of the benchmarks.

    PYTHONPATH=src python -m benchmarks.gpu_blocks [--out FILE] [--only KIND ...]

Prints microseconds a call and the error against float64 in plain torch. With ``TRITON_INTERPRET=1`` small shapes run on
a CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_federations import DEVICE
from fedalloy.engines.kernels import client_conv
from fedalloy.engines.kernels.client_conv import After, DrawnImages, has_kernels
from fedalloy.engines.kernels.conv_chain import ProductStage, Window
from fedalloy.engines.precision import products_in

SHAPES = {  # clients, batch, height, inputs, outputs, stride, padding, from a pool
    "cnn1": (50, 10, 32, 3, 32, 1, 0, True), "cnn2": (50, 10, 30, 32, 64, 1, 0, False),
    "r16 50x10": (50, 10, 32, 16, 16, 1, 1, False), "r32 50x10": (50, 10, 16, 32, 32, 1, 1, False),
    "r64 50x10": (50, 10, 8, 64, 64, 1, 1, False), "r32s 50x10": (50, 10, 32, 16, 32, 2, 1, False),
    "r16 3x64": (3, 64, 32, 16, 16, 1, 1, False), "r64 3x64": (3, 64, 8, 64, 64, 1, 1, False),
}  # fmt: skip
ROWS = 0
BLOCKS: dict[str, list[tuple[int, int, int, int, int]]] = {
    "convolve": [(128, 64, 32, 4, 3), (256, 64, 32, 8, 3), (128, 64, 32, 8, 3)],
    "by_input": [(128, 64, 32, 4, 3), (256, 64, 32, 8, 3), (256, 64, 32, 8, 4), (256, 64, 64, 8, 2)],
    "by_weight": [
        (64, 64, 64, 4, 3), (64, 32, 64, 4, 3), (64, 32, 128, 4, 3), (128, 32, 64, 4, 3), (32, 32, 128, 4, 4),
        (128, 32, 32, 4, 3), (64, 32, 32, 2, 4), (128, 64, 64, 8, 3),
    ],
}  # fmt: skip
SHARES = (400, 800, 1600)


def stage_of(name: str) -> tuple[ProductStage, int, int, bool]:
    """A convolution, the number of clients, their batch, and whether its images come from a pool."""
    clients, batch, height, inputs, outputs, stride, padding, pool = SHAPES[name]
    if DEVICE == "cpu":
        clients, batch, height = 2, 2, 8
    window = Window((3, 3), (stride, stride), (padding, padding))
    image = height, height, inputs
    return ProductStage("w", "b", (*window.over(image), outputs), image, window, None), clients, batch, pool


def microseconds(call: Callable[[], Any]) -> float:
    """The median of five replays of ten calls."""
    call()
    if DEVICE == "cpu":
        return 0.0
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            call()
    times = []
    for _ in range(6):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 100)
    return float(sorted(times)[2])


@dataclass(frozen=True)
class Given:
    """Random numbers of one shape, and what the three kernels make of them."""

    stage: ProductStage
    images: Any
    weight: Tensor
    bias: Tensor
    grad: Tensor
    before: Tensor

    def run(self, kind: str, precision: Any) -> Tensor:
        """The results of a kernel; ``by_weight`` subtracts from the weights that are given, and returns them."""
        stage = self.stage
        if kind == "convolve":
            pools = stage.reads is not None and (stage.reads[2], stage.shape[2]) == (32, 64)  # as in the CNN
            after = After(self.bias, "relu", pools)
            return client_conv.convolve(stage, self.images, self.weight, after, precision)[0]
        if kind == "by_input":
            given = stage, self.before.shape[1], self.grad, self.weight, precision
            return client_conv.by_input(*given, self.before, "relu")
        client_conv.into_weight(stage, self.images, self.grad, self.weight, self.bias, precision)
        return self.weight

    def exact(self) -> Given:
        """The same numbers in float64."""
        images, wide = self.images, {n: getattr(self, n).double() for n in ("weight", "bias", "grad", "before")}
        drawn = isinstance(images, DrawnImages)
        return replace(self, images=DrawnImages(images.pool.double(), images.rows, torch.float64) if drawn
                       else images.double(), **wide)  # fmt: skip

    def copied(self) -> Given:
        """The same with weights and biases of its own."""
        return replace(self, weight=self.weight.clone(), bias=self.bias.clone())


def given_for(stage: ProductStage, clients: int, batch: int, pool: bool, precision: Any) -> Given:
    """Random numbers for all three kernels."""
    assert stage.reads is not None
    (height, width, channels), (down, right, outputs) = stage.reads, stage.shape
    dtype, rounded = torch.bfloat16 if precision == "bf16" else torch.float32, client_conv.rounded
    weight = torch.randn(clients, outputs, stage.inputs + stage.extra, device=DEVICE) / stage.inputs**0.5
    weight[:, :, stage.inputs :] = 0
    bias = torch.randn(clients, outputs, device=DEVICE)
    images: Any = rounded(torch.randn(clients, batch, height, width, channels, device=DEVICE), precision).to(dtype)
    if pool:
        examples = torch.randn(500, channels, height, width, device=DEVICE)
        images = DrawnImages(examples, torch.randint(0, 500, (clients, batch), device=DEVICE), dtype)
    grad = rounded(torch.randn(clients, batch * down * right, outputs, device=DEVICE), precision).to(dtype)
    before = torch.randn(clients, batch, height, width, channels, device=DEVICE).to(dtype)
    return Given(stage, images, weight, bias, grad, before)


def error(given: Given, kind: str, precision: Any) -> float:
    """How far a kernel is from float64, relative to the size of the results."""
    found = given.copied().run(kind, precision).double()
    with mock.patch.object(client_conv, "has_kernels", return_value=False):
        right = given.exact().copied().run(kind, "float32")
    if kind == "by_weight":  # what was subtracted
        found, right = found - given.weight.double(), right - given.weight.double()
    return float((found - right).norm() / right.norm())


def tried(given: Given, kind: str, precision: Any) -> dict[str, float]:
    """The error and the time of a kernel, with the sizes of blocks that are set."""
    with products_in(precision):
        apart, own = error(given, kind, precision), given.copied()
        return {"us": round(microseconds(lambda: own.run(kind, precision)), 1), "error": float(f"{apart:.1e}")}


def rows_of(name: str, precision: Any) -> Iterator[dict[str, Any]]:
    """All kernels and sizes of one shape."""
    from fedalloy.engines.kernels.on_gpu import conv_launch

    torch.manual_seed(0)
    stage, clients, batch, pool = stage_of(name)
    given = given_for(stage, clients, batch, pool, precision)
    for kind in BLOCKS if not pool else ("convolve", "by_weight"):
        for block in BLOCKS[kind]:
            for programs in SHARES if kind == "by_weight" and block[ROWS] == 64 else (800,):
                row = {"shape": name, "precision": precision, "kind": kind, "block": block, "programs": programs}
                chosen = {**conv_launch.CHOSEN, kind: block}
                with mock.patch.multiple(conv_launch, CHOSEN=chosen, PROGRAMS=programs):
                    try:
                        yield {**row, **tried(given, kind, precision)}
                    except Exception as failure:
                        yield {**row, "failed": str(failure)[:200]}


def main(arguments: list[str] | None = None) -> None:
    """All shapes, kernels and sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(SHAPES), help="shapes; a _ stands for a space")
    options = parser.parse_args(arguments)
    if not has_kernels(torch.device(DEVICE)):
        parser.error("these are Triton's kernels: they need a GPU, or TRITON_INTERPRET=1, and Triton")
    for name in options.only:
        for precision in ("tf32", "bf16") if DEVICE == "cuda" else ("tf32",):
            for row in rows_of(name.replace("_", " "), precision):
                print(json.dumps(row), flush=True)
                if options.out:
                    with options.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
