"""On one GPU: LoRA adapters of a GPT-2, trained by fedalloy's ``fit`` against a hand-written sequential loop.

    PYTHONPATH=src python -m benchmarks.gpu_lora [--minutes 2] [--out FILE.json] [--tiny]

GPT-2 small's shape (124 M parameters, random values) with PEFT adapters of rank 8, eight clients a round, padded
sequences of tokens. The loop is what one would write by hand: the same adapters and batches, client after client, with
torch's own attention, dropout and optimizer. Without dropout both must give the same adapters; that is checked first.
For every shape a profile says which kernels the time of a round goes to. What matters most runs first.
Needs ``transformers`` and ``peft`` (``scripts/wheels.py`` for a machine that cannot install them). ``--tiny`` is a
model of one layer on a CPU, to try the script itself.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

import fedalloy
from fedalloy.core import cuda_draws
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Engine
from fedalloy.engines.batched import Batched
from fedalloy.engines.kernels import cuda_graphs
from fedalloy.tasks.datasets.base import Dataset
from fedalloy.tasks.federation import FederatedTask

LR, CLIENTS, RANK, IGNORED = 0.1, 8, 8, -100
Precision = Any
KINDS = {"vmap": 0, "streams": CLIENTS}
"""How many clients run in parallel streams of a CUDA graph before ``vmap`` is used."""
SHOWN = 30
"""Kernels in a profile."""


@dataclass(frozen=True)
class Shape:
    """A model and the data of every client."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    words: int = 50257
    length: int = 64
    rows: int = 16
    batch: int = 4
    dropout: float = 0.1

    @property
    def steps(self) -> int:
        """Local steps of a client in a round."""
        return self.rows // self.batch

    @property
    def name(self) -> str:
        """Batch and length, in which the shapes differ."""
        return f"batch {self.batch} x {self.length} tokens, {self.steps} steps"


TINY = Shape(layers=1, width=16, heads=2, words=50, length=8, rows=8, batch=4)


def adapters(shape: Shape) -> Any:
    """GPT-2 with adapters in its attention; both matrices start at random, so that both are trained from the start."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), shape.dropout)
    sizes = {"n_embd": shape.width, "n_layer": shape.layers, "n_head": shape.heads, "n_positions": 1024}
    config = GPT2Config(vocab_size=shape.words, bos_token_id=1, eos_token_id=1, pad_token_id=0, **sizes, **dropout)
    chosen = LoraConfig(r=RANK, lora_alpha=RANK, lora_dropout=shape.dropout, target_modules=["c_attn"],
                        fan_in_fan_out=True, init_lora_weights=False)  # fmt: skip
    torch.manual_seed(0)
    return get_peft_model(GPT2LMHeadModel(config), chosen)


def sequences(shape: Shape) -> Dataset:
    """Random tokens, of which a quarter or more are no padding; the targets are the tokens."""
    count, key = CLIENTS * shape.rows, Key.of(1)
    lengths = shape.length // 4 + (key.fold("lengths").bits(count) & 0xFFFF) % (shape.length * 3 // 4 + 1)
    real = torch.arange(shape.length) < lengths.unsqueeze(1)
    tokens = torch.where(real, 2 + (key.bits(count, shape.length) & 0xFFFFFF) % (shape.words - 2), 0)
    owner = torch.arange(CLIENTS).repeat_interleave(shape.rows)
    x = {"input_ids": tokens, "attention_mask": real.long()}
    return Dataset(x, torch.where(real, tokens, IGNORED), shape.words, owner)


def task_of(
    shape: Shape, module: Any, data: Dataset, dtype: Literal["float32", "float64"] = "float32"
) -> FederatedTask:
    """Every client's rows in their order, without a test part."""
    made = fedalloy.task(data, model=module, loss="next_token", kind="tokens", test_fraction=0.0, dtype=dtype)
    assert isinstance(made, FederatedTask)
    return made


def sequential(
    shape: Shape, module: Any, data: Dataset, rounds: int, device: str, precision: Precision = "float32"
) -> tuple[list[float], dict[str, Tensor]]:
    """The loop by hand: seconds of every round, and the adapters after the last."""
    module = module.to(device).train()
    trained = {name: leaf for name, leaf in module.named_parameters() if leaf.requires_grad}
    server = {name: leaf.detach().clone() for name, leaf in trained.items()}
    x, y = {name: leaf.to(device) for name, leaf in data.x.items()}, data.y.to(device)
    times = []
    for _ in range(rounds):
        began, mean = _now(device), {name: torch.zeros_like(leaf) for name, leaf in server.items()}
        for client in range(CLIENTS):
            with torch.no_grad():
                for name, leaf in trained.items():
                    leaf.copy_(server[name])
            optimizer = torch.optim.SGD(trained.values(), lr=LR)
            for step in range(shape.steps):
                some = slice(client * shape.rows + step * shape.batch, client * shape.rows + (step + 1) * shape.batch)
                with _autocast(device, precision):
                    logits = module(**{name: leaf[some] for name, leaf in x.items()}).logits
                    loss = functional.cross_entropy(
                        logits[:, :-1].flatten(0, 1), y[some][:, 1:].flatten(), ignore_index=IGNORED
                    )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            with torch.no_grad():
                for name, leaf in trained.items():
                    mean[name].add_(leaf, alpha=1 / CLIENTS)
        server = mean
        times.append(_now(device) - began)
    return times, server


def ours(
    task: FederatedTask, shape: Shape, engine: Engine, rounds: int, device: str, watch: Callable[[int], object] = id
) -> tuple[list[float], dict[str, Tensor], int]:
    """``fit``: seconds of every round but the first, the adapters after the last, and bytes that a client sends.
    ``watch`` is called with the number of rounds after each."""
    stamps: list[float] = []

    def watcher(_: Any) -> None:
        stamps.append(_now(device))
        watch(len(stamps))

    algorithm = fedalloy.algorithms.fedavg(lr=LR, batch_size=shape.batch, shuffle=False)
    with tempfile.TemporaryDirectory() as folder:
        result = fedalloy.fit(
            algorithm, task, rounds=rounds, seed=1, device=device, engine=engine, folder=f"{folder}/run",
            evaluate_every=10 * rounds, checkpoint_every=1e9, watcher=watcher,
        )  # fmt: skip
        sent = int(next(result.rounds())["bytes_up"]) // CLIENTS
    return [after - before for before, after in itertools.pairwise(stamps)], result.model, sent


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def _autocast(device: str, precision: Precision) -> Iterator[None]:
    """The precision of products in the loop by hand."""
    torch.backends.cuda.matmul.allow_tf32 = precision != "float32"
    try:
        with torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext():
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


@contextmanager
def few(clients: int) -> Iterator[None]:
    """Let the batched engine run up to so many clients in parallel streams, and more of them under ``vmap``; less than
    0: as it decides itself."""
    decided = cuda_graphs.in_streams if clients < 0 else lambda count, *_: count <= clients
    with mock.patch.object(cuda_graphs, "in_streams", decided):
        yield


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between two sets of leaves."""
    return max(float((leaf.double().cpu() - other[name].double().cpu()).abs().max()) for name, leaf in one.items())


class Report:
    """Rows that are printed and written as soon as they exist; what fails or comes too late is recorded as such."""

    def __init__(self, out: Path | None, minutes: float) -> None:
        self.out, self.end, self.rows = out, time.monotonic() + 60 * minutes, list[dict[str, Any]]()

    def add(self, **row: Any) -> None:
        """One row."""
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps(self.rows, indent=1))

    def attempt(self, name: str, function: Callable[[], dict[str, Any]]) -> None:
        """The row that a function returns; its error, and the next one, if it raises."""
        if time.monotonic() > self.end:
            self.add(what=name, skipped="no time left")
            return
        began = time.perf_counter()
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
                made = function()
        except Exception as error:  # one variant that fails must not hide the others
            traceback.print_exc()
            made = {"failed": f"{type(error).__name__}: {error}"[:500]}
        self.add(what=name, **made, took_s=round(time.perf_counter() - began, 1))


def fallback_of(engine: Engine) -> str:
    """Why an engine ran clients one by one, or without a CUDA graph; empty if it did neither."""
    return getattr(engine, "_unbatchable", "") or getattr(engine, "_uncaptured", "")


def check_equal(
    shape: Shape, engine: Engine, device: str, dtype: Literal["float32", "float64"], at_once: int = 8
) -> dict[str, Any]:
    """How far the adapters of ``fit`` are from those of the loop by hand after one round without dropout, beside the
    length of the round's update."""
    still, exact = replace(shape, dropout=0.0), dtype == "float64"
    module, data = adapters(still).to(getattr(torch, dtype)), sequences(still)
    start = {name: leaf.detach().clone() for name, leaf in module.named_parameters() if leaf.requires_grad}
    task = task_of(still, module, data, dtype)
    with few(at_once):
        _, found, _ = ours(task, still, engine, 1, device)
    _, expected = sequential(still, module, data, 1, device)
    moved = apart(expected, start)
    far, limit = apart(found, expected), 1e-9 if exact else 1e-2 * moved
    fallback = fallback_of(engine)
    return {"apart": far, "moved": moved, "equal": far <= limit < moved, "fallback": fallback}


def timed(task: FederatedTask, shape: Shape, engine: Engine, rounds: int, device: str, at_once: int) -> dict[str, Any]:
    """Seconds a round by ``fit``, peak memory and bytes."""
    _forget(device)
    with few(at_once):
        gaps, _, sent = ours(task, shape, engine, rounds + 2, device)
    return {**_seconds(gaps[1:]), **_memory(device), "bytes_up": sent, "fallback": fallback_of(engine)}


def profiled(task: FederatedTask, shape: Shape, engine: Engine, device: str) -> dict[str, Any]:
    """Two rounds after two others, as the engine decides to run them: milliseconds a round in kernels, by kernel."""
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profile = torch.profiler.profile(activities=kinds[1:] if device == "cuda" else kinds[:1])

    def watch(done: int) -> None:
        if done == 2:
            profile.__enter__()
        if done == 4:
            profile.__exit__(None, None, None)

    with few(-1):
        gaps, _, _ = ours(task, shape, engine, 5, device, watch)
    field = f"self_{'device' if device == 'cuda' else 'cpu'}_time_total"
    rows = sorted((getattr(one, field) / 2e3, one.count // 2, one.key[:110]) for one in profile.key_averages())[::-1]
    shown = [f"{spent:8.3f} ms {count:6d} x {name}" for spent, count, name in rows[:SHOWN]]
    total, calls = sum(row[0] for row in rows), sum(row[1] for row in rows)
    wall = [round(1e3 * gap, 1) for gap in gaps]
    told = {"kernels_ms": round(total, 1), "calls": calls, "wall_ms": wall, "fallback": fallback_of(engine)}
    return {**told, "by_kernel": shown}


def timed_by_hand(shape: Shape, data: Dataset, rounds: int, device: str, precision: Precision) -> dict[str, Any]:
    """Seconds a round by hand."""
    _forget(device)
    times, _ = sequential(shape, adapters(shape), data, rounds + 1, device, precision)
    return {**_seconds(times[1:]), **_memory(device)}


def _forget(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _memory(device: str) -> dict[str, Any]:
    """The peak of what tensors occupied, and of what torch reserved for them and for captured graphs."""
    if device != "cuda":
        return {}
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak_gb": round(peaks[0] / 1e9, 2), "reserved_gb": round(peaks[1] / 1e9, 2)}


def _seconds(times: list[float]) -> dict[str, Any]:
    spread = [round(1e3 * value, 2) for value in (min(times), max(times))]
    return {"ms": round(1e3 * statistics.median(times), 2), "spread_ms": spread, "rounds": len(times)}


def compare(report: Report, shape: Shape, rounds: int, device: str, precisions: tuple[Precision, ...]) -> None:
    """One shape: by hand and by ``fit``, in every precision, and the kernels of a round."""
    if time.monotonic() > report.end:  # building the model takes seconds too
        report.add(what=shape.name, skipped=f"no time left for {', '.join(precisions)}")
        return
    data = sequences(shape)
    task = task_of(shape, adapters(shape), data)
    for precision in precisions:
        name = f"{shape.name}, {precision}"
        report.attempt(f"{name}: by hand", partial(timed_by_hand, shape, data, rounds, device, precision))
        for kind, at_once in KINDS.items():
            engine = Batched(precision=precision)
            report.attempt(f"{name}: fit, {kind}", partial(timed, task, shape, engine, rounds, device, at_once))
        engine = Batched(precision=precision)
        report.attempt(f"{name}: kernels of a round", partial(profiled, task, shape, engine, device))


def main() -> None:
    """Checks first, then every shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0, help="nothing is begun after so many minutes")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on a CPU")
    asked = parser.parse_args()
    device, report = "cpu" if asked.tiny else "cuda", Report(asked.out, asked.minutes)
    shape, large = (TINY, TINY) if asked.tiny else (Shape(), Shape(length=128, rows=32, batch=8))
    where = device if asked.tiny else torch.cuda.get_device_name()
    report.add(what="machine", torch=torch.__version__, python=sys.version.split()[0], device=where)
    small = replace(shape, rows=2 * shape.batch)
    for kind, at_once in KINDS.items():
        checked = partial(check_equal, small, Batched(), device, "float64", at_once)
        report.attempt(f"as by hand, float64, {kind}", checked)
    precisions = ("float32",) if asked.tiny else ("float32", "bf16", "tf32")
    compare(report, shape, asked.rounds, device, precisions[:2])
    compare(report, large, asked.rounds, device, precisions[:2])
    compare(report, shape, asked.rounds, device, precisions[2:])
    if not asked.tiny:
        report.add(what="draws in one kernel", devices=sorted(cuda_draws._checked), refused=sorted(cuda_draws._refused))


if __name__ == "__main__":
    main()
