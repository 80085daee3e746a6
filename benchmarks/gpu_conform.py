"""The GPU kernels against the loop, in float64 on one card, and faults that this comparison must find."""

from __future__ import annotations

import traceback
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_federations import DEVICE, FOUND, apart, federation, images, note
from fedalloy.algorithms import fedavg, fedprox, scaffold
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import client_conv, conv_sgd
from fedalloy.engines.loop import Loop
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.partitions.power_law import PowerLaw


def small_chain() -> nn.Module:
    """A convolutional chain with padding, a stride, both kinds of pooling and blank regions."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 6, 3, stride=2, padding=1), nn.Tanh(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, 10),
    )  # fmt: skip


def small_normed() -> nn.Module:
    """A convolutional model with GroupNorm."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, stride=2), nn.GroupNorm(2, 8),
        nn.SiLU(), nn.Flatten(), nn.Linear(392, 10),
    )  # fmt: skip


CHAIN_CASES = {
    "fedavg": fedavg(lr=0.1, batch_size=7, epochs=2), "momentum": fedavg(lr=0.1, batch_size=7, momentum=0.9),
    "decay": fedavg(lr=0.1, batch_size=7, weight_decay=0.01), "prox": fedprox(0.1, lr=0.1, batch_size=7),
}  # fmt: skip
OTHER_CASES = {
    "adam": fedavg(lr=0.01, batch_size=7, optimizer="adam"), "scaffold": scaffold(lr=0.1, batch_size=7),
    "fedavg": fedavg(lr=0.1, batch_size=7),
}  # fmt: skip


def _shifted(kernel: Any, *given: Any) -> Any:
    return kernel(*given).roll(1, 2)


def _without_bias(kernel: Any, stage: Any, images: Any, grad: Any, weight: Any, bias: Any, precision: Any) -> Any:
    return kernel(stage, images, grad, weight, None, precision)


def _other_place(kernel: Any, stage: Any, grad: Any, pooled: Any, chosen: Any, *rest: Any) -> Any:
    return kernel(stage, grad, pooled, 3 - chosen, *rest)


KERNEL_FAULTS: dict[str, tuple[str, Any]] = {
    "images' gradient one row too low": ("by_input", _shifted), "bias kept": ("into_weight", _without_bias),
    "another place of a window": ("unpool", _other_place),
}  # fmt: skip


def conform() -> bool:
    """The kernels against the loop, in float64 on the card, with clients of different sizes; whether all is well."""
    begin = len(FOUND)
    data = images(400, (3, 16, 16), torch.float64)
    data.x[:, :, :6] = 0.5
    cases = [("chain", small_chain, name, CHAIN_CASES[name], Batched()) for name in ("fedavg", "prox")]
    cases += [("chain uncompiled", small_chain, name, a, Batched(compiled=False)) for name, a in CHAIN_CASES.items()]
    cases += [
        ("sequential uncompiled", small_normed, name, a, Batched(kernel="sequential", compiled=False))
        for name, a in OTHER_CASES.items()
    ]
    cases += [("sequential", small_normed, "adam", OTHER_CASES["adam"], Batched(kernel="sequential"))]
    cases += [
        ("mapped", small_normed, name, OTHER_CASES[name], Batched(kernel="mapped")) for name in ("fedavg", "scaffold")
    ]
    mapped = Batched(kernel="mapped", compiled=False)
    cases += [("mapped uncompiled", small_normed, "scaffold", OTHER_CASES["scaffold"], mapped)]
    for kernel, model, name, algorithm, engine in cases:
        try:
            fed = federation(algorithm, data, model, 9, 9, PowerLaw(1.0), torch.float64)
            gap = max(apart(fed.round(engine, number), fed.round(Loop(), number)) for number in (1, 2, 3))
            used = "conv" if engine._conv_graphs else "sequential" if engine._client_graphs else "mapped"
            note(part="conform", kernel=kernel, algorithm=name, largest=gap, ok=gap < 1e-9, used=used,
                 graphs=graphs_of(engine), fallback=engine._unbatchable or engine._uncaptured)  # fmt: skip
        except Exception:
            note(part="conform", kernel=kernel, algorithm=name, failed=traceback.format_exc()[-1500:])
    factored(data)
    planted(data)
    return all(row.get("ok", row.get("found", False)) for row in FOUND[begin:])


def graphs_of(engine: Batched) -> int:
    """How many graphs the engine captured."""
    kept = (engine._conv_graphs, "_captured"), (engine._client_graphs, "_lanes"), (engine._cuda_graphs, "_captured")
    return sum(len(getattr(graphs, name)) for graphs, name in kept if graphs is not None)


def factored(data: Dataset) -> None:
    """The same with a dense layer whose updates stay factors: sums, norms and updates."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 200), nn.ReLU(),
            nn.Linear(200, 10),
        )  # fmt: skip

    fed = federation(fedavg(lr=0.1, batch_size=7), data, model, 9, 9, dtype=torch.float64)
    engine = Batched()
    for number in (1, 2, 3):
        found, right = fed.round(engine, number).cohort, fed.round(Loop(), number).cohort
        weights = torch.rand(9, dtype=torch.float64, device=DEVICE)
        sums, expected = found.combine("delta", weights), right.combine("delta", weights)
        gap = max(float((sums[name] - leaf).abs().max()) for name, leaf in expected.items())
        norms = float((found.norms("delta") - right.norms("delta")).abs().max())
        whole = max(float((found.payload["delta"][n] - v).abs().max()) for n, v in right.payload["delta"].items())
        kind = type(found.payload["delta"]).__name__
        note(
            part="conform",
            kernel="factored",
            sums=gap,
            norms=norms,
            whole=whole,
            ok=max(gap, norms, whole) < 1e-9,
            kept=kind,
        )


def planted(data: Dataset) -> None:
    """Faults that the comparison must find: padding that counts, the second of two equal maxima, a lost update."""
    fed = federation(CHAIN_CASES["fedavg"], data, small_chain, 9, 9, PowerLaw(1.0), torch.float64)
    right = fed.round(Loop())
    kept = conv_sgd.Batches.of
    try:
        faulty = staticmethod(
            lambda block, everybody: replace(kept(block, everybody), mask=torch.ones_like(block.mask))
        )
        conv_sgd.Batches.of = faulty  # type: ignore[method-assign]
        note(part="conform", fault="padding counts", found=apart(fed.round(Batched()), right) > 1e-9)
    finally:
        conv_sgd.Batches.of = staticmethod(kept)  # type: ignore[method-assign]
    for name, (function, wrong) in KERNEL_FAULTS.items():
        right_one = getattr(client_conv, function)
        setattr(client_conv, function, partial(wrong, right_one))
        try:
            note(part="conform", fault=name, found=apart(fed.round(Batched()), right) > 1e-9)
        except Exception:
            note(part="conform", fault=name, failed=traceback.format_exc()[-800:])
        finally:
            setattr(client_conv, function, right_one)
    graphs = Batched()
    fed.round(graphs)
    captured = next(iter(graphs._conv_graphs._captured.values()), None) if graphs._conv_graphs else None
    if captured is not None:
        captured.graph.replay = lambda: None  # type: ignore[method-assign]
        note(part="conform", fault="graph not replayed", found=apart(fed.round(graphs, 2), fed.round(Loop(), 2)) > 1e-9)
