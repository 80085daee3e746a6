"""Sizes of blocks of the convolution kernels: how long each takes on the shapes of the benchmarks.

    PYTHONPATH=src python -m benchmarks.gpu_blocks [--out FILE] [--only KIND ...]

Prints microseconds a call and the error against float64. With ``TRITON_INTERPRET=1`` small shapes run on a CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_federations import DEVICE
from fedalloy.engines.kernels import client_conv
from fedalloy.engines.kernels.client_conv import After, Drawn
from fedalloy.engines.kernels.conv_chain import ProductStage, Window
from fedalloy.engines.kernels.on_gpu import conv_launch
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
    return sorted(times)[2]


def calls(stage: ProductStage, clients: int, batch: int, pool: bool, precision: Any) -> dict[str, Callable[[], Tensor]]:
    """The three kernels on random numbers."""
    assert stage.reads is not None
    (height, width, channels), (down, right, outputs) = stage.reads, stage.shape
    dtype, rounded = torch.bfloat16 if precision == "bf16" else torch.float32, client_conv.rounded
    weight = torch.randn(clients, outputs, stage.inputs + stage.extra, device=DEVICE) / stage.inputs**0.5
    weight[:, :, stage.inputs :] = 0
    bias = torch.randn(clients, outputs, device=DEVICE)
    images: Any = rounded(torch.randn(clients, batch, height, width, channels, device=DEVICE), precision).to(dtype)
    if pool:
        examples = torch.randn(500, channels, height, width, device=DEVICE)
        images = Drawn(examples, torch.randint(0, 500, (clients, batch), device=DEVICE), dtype)
    grad = rounded(torch.randn(clients, batch * down * right, outputs, device=DEVICE), precision).to(dtype)
    before = torch.randn(clients, batch, height, width, channels, device=DEVICE).to(dtype)
    pools, moved = not pool and channels == 32 and outputs == 64, weight.clone()

    def into() -> Tensor:
        client_conv.into_weight(stage, images, grad, moved, bias, precision)
        return moved

    found: dict[str, Callable[[], Tensor]] = {
        "convolve": lambda: client_conv.convolve(stage, images, weight, After(bias, "relu", pools), precision)[0],
        "by_weight": into,
    }
    if not pool:
        found["by_input"] = lambda: client_conv.by_input(stage, batch, grad, weight, precision, before, "relu")
    return found


def main() -> None:
    """All shapes, kernels and sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=list(SHAPES))
    options = parser.parse_args()

    def say(**row: Any) -> None:
        print(json.dumps(row), flush=True)
        if options.out:
            with options.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    for name in options.only:
        name = name.replace("_", " ")
        for precision in ("tf32", "bf16") if DEVICE == "cuda" else ("tf32",):
            torch.manual_seed(0)
            stage, *given = stage_of(name)
            for kind, call in calls(stage, *given, precision).items():
                for block in BLOCKS[kind]:
                    for programs in SHARES if kind == "by_weight" and block[ROWS] == 64 else (800,):
                        conv_launch.CHOSEN[kind], conv_launch.PROGRAMS = block, programs
                        try:
                            with products_in(precision):
                                took = microseconds(call)
                            say(
                                shape=name,
                                precision=precision,
                                kind=kind,
                                block=block,
                                programs=programs,
                                us=round(took, 1),
                            )
                        except Exception as error:
                            say(shape=name, precision=precision, kind=kind, block=block, failed=str(error)[:200])
                conv_launch.CHOSEN.clear()


if __name__ == "__main__":
    main()
