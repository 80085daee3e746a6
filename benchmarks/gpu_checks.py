"""Checks that belong on a GPU: models that draw random numbers, and training in half precision, on every engine.

    PYTHONPATH=src:. python -m benchmarks.gpu_checks [--minutes 2] [--out FILE.json] [--tiny]

The models of ``examples.zoo`` (dropout everywhere, padded sequences, clients whose sizes are no multiple of the batch)
are trained in float64 by the loop engine on the CPU and by every engine on the GPU: the draws come from the clients'
keys, so that all must agree. Training in fp16 is compared with torch's own ``GradScaler``, one per client. Needs what
``benchmarks.gpu_lora`` needs; ``--tiny`` tries the script on a CPU, with fp16 where fedalloy
refuses it otherwise.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

import fedalloy
from benchmarks.gpu_lora import Report, apart, fallback_of, few
from examples.zoo.__main__ import task_of
from examples.zoo.models import BUILDERS
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Engine
from fedalloy.engines.batched import Batched
from fedalloy.engines.loop import Loop
from fedalloy.methods.solvers import descent
from fedalloy.tasks.datasets.base import Dataset

AGREE, CLOSE = 1e-9, 2e-2
SIZE, BATCH, EPOCHS, CLASSES, EACH = 14, 4, 2, 3, 3
LR, MOMENTUM = 1e-4, 0.9
MAGNITUDES = (1.0, 8.0, 32.0, 128.0)
"""The scale of every client's features: the larger, the more of its first steps overflow in fp16."""


def draws_agree(name: str, device: str) -> dict[str, Any]:
    """How far a model of the zoo is from the loop engine on the CPU, by engine; ``nudged`` is how far that one moves if
    its step size changes by 2^-50. A larger step makes some models chaotic: batch statistics of two numbers each."""
    task = task_of(name)
    algorithm, nudged = (
        fedalloy.algorithms.fedavg(lr=lr, batch_size=4, momentum=0.5) for lr in (0.01, 0.01 * (1 + 2**-50))
    )
    expected = fedalloy.fit(algorithm, task, rounds=1, engine="loop", device="cpu").model
    found: dict[str, Any] = {"nudged": apart(fedalloy.fit(nudged, task, rounds=1, engine="loop").model, expected)}
    engines = {"loop": (Loop(), 8), "streams": (Batched(kernel="mapped"), 8), "vmap": (Batched(kernel="mapped"), 0)}
    for kind, (engine, at_once) in engines.items():
        with few(at_once):
            trained = fedalloy.fit(algorithm, task, rounds=1, engine=engine, device=device).model
        found[kind] = apart(trained, expected)
        if reason := fallback_of(engine):
            found[f"{kind} fell back"] = reason[:200]
    agree = all(value <= AGREE for value in found.values() if isinstance(value, float))
    return {**found, "agree": agree}


def network() -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(EACH * len(MAGNITUDES), 16), nn.ReLU(), nn.Linear(16, CLASSES))


def scaled_data() -> Dataset:
    """Clients whose features differ in magnitude. Each has its own columns, 0 for all others, so that what it changes
    in the first layer can be told apart."""
    key, clients = Key.of(2), len(MAGNITUDES)
    owner = torch.arange(clients).repeat_interleave(SIZE)
    mine = torch.arange(clients).repeat_interleave(EACH) == owner.unsqueeze(1)
    x = key.normal(len(owner), EACH * clients) * torch.tensor(MAGNITUDES)[owner].unsqueeze(1) * mine
    return Dataset(x, (key.fold("y").bits(len(owner)) & 0xFFFF) % CLASSES, CLASSES, owner)


def by_grad_scaler(module: nn.Module, data: Dataset, device: str) -> tuple[dict[str, Tensor], list[int]]:
    """One round by hand: every client with an optimizer and a ``GradScaler`` of torch; and how many steps it skips."""
    module = module.to(device)
    server = {name: leaf.detach().clone() for name, leaf in module.named_parameters()}
    mean = {name: torch.zeros_like(leaf) for name, leaf in server.items()}
    skipped = []
    for client in range(len(MAGNITUDES)):
        module.load_state_dict(server)
        optimizer = torch.optim.SGD(module.parameters(), lr=LR, momentum=MOMENTUM)
        scaler, mine = torch.amp.GradScaler(device, init_scale=65536.0), slice(client * SIZE, (client + 1) * SIZE)
        x, y = data.x[mine].to(device), data.y[mine].to(device)
        for rows in [part for _ in range(EPOCHS) for part in torch.arange(SIZE).split(BATCH)]:
            with torch.autocast(device, torch.float16):
                loss = functional.cross_entropy(module(x[rows]), y[rows])
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        skipped.append(round(float((65536.0 / torch.tensor(scaler.get_scale())).log2())))
        for name, leaf in module.named_parameters():
            mean[name] += leaf.detach() / len(MAGNITUDES)
    return mean, skipped


def half_precision(precision: Literal["bf16", "fp16"], engine: Engine, at_once: int, device: str) -> dict[str, Any]:
    """A round in half precision against torch's scaler (fp16) or the loop engine (bf16), client by client, relative to
    the client's update."""
    data, module = scaled_data(), network()
    start = dict(module.named_parameters())["0.weight"].detach().clone()
    task = fedalloy.task(data, model=module, test_fraction=0.0)
    named: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "epochs": EPOCHS, "batch_size": BATCH, "shuffle": False}
    algorithm = fedalloy.algorithms.fedavg(precision=precision, **named)
    with few(at_once):
        found = fedalloy.fit(algorithm, task, rounds=1, engine=engine, device=device).model
    if precision == "fp16":
        expected, skipped = by_grad_scaler(module, data, device)
    else:
        expected = dict(fedalloy.fit(algorithm, task, rounds=1, engine="loop", device=device).model)
        skipped = []
    shares = _by_client(found["0.weight"].cpu(), expected["0.weight"].cpu(), start)
    told = {"relative": shares, "agree": max(shares) <= CLOSE, "fallback": fallback_of(engine)}
    return {**told, "skipped": skipped} if skipped else told


def _by_client(found: Tensor, expected: Tensor, start: Tensor) -> list[float]:
    """The largest difference in every client's columns, relative to their largest change."""
    apart, moved = ((one - other).abs().amax(0).split(EACH) for one, other in ((found, expected), (expected, start)))
    return [float(f"{float(one.max() / other.max()):.2e}") for one, other in zip(apart, moved, strict=True)]


def main() -> None:
    """Every model, then both precisions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="nothing is begun after so many minutes")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, three models")
    asked = parser.parse_args()
    report, device = Report(asked.out, asked.minutes), "cpu" if asked.tiny else "cuda"
    engines = {"loop": (Loop(), 8), "streams": (Batched(kernel="mapped"), 8), "vmap": (Batched(kernel="mapped"), 0)}
    half: tuple[Literal["fp16", "bf16"], ...] = ("fp16", "bf16")
    with mock.patch.object(descent, "_check_precision") if asked.tiny else nullcontext():
        for (kind, (engine, at_once)), precision in product(engines.items(), half):
            report.attempt(f"{precision}, {kind}", partial(half_precision, precision, engine, at_once, device))
    # MLP is made from a frame, and such a machine has no pandas.
    names = [name for name in BUILDERS if name != "MLP"]
    for name in names[:3] if asked.tiny else names:
        report.attempt(f"draws of {name}", partial(draws_agree, name, device))


if __name__ == "__main__":
    main()
