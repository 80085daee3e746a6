"""Trains every model of the zoo with three engines and prints how they ran, and whether they agree."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import nn

import fedalloy
from examples.zoo import data
from examples.zoo.models import BUILDERS
from fedalloy.core.keys import Key
from fedalloy.engines.batched import Batched, dense_of
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.objective import ModuleObjective

AGREE, SAME = 1e-9, 1e-6
"""How far engines may differ, and logits from the model's own."""
DATA: dict[str, Any] = {
    "BERT": data.sentences, "GPT-2": data.next_tokens, "Qwen (grouped attention)": data.sentences, "ViT": data.pictures,
    "ResNet-18": lambda: data.pictures(64), "MobileNetV2": lambda: data.pictures(32), "LSTM": data.words,
    "nn.TransformerEncoder": data.sentences, "BERT + LoRA": data.sentences, "U-Net": data.maps, "MLP": data.table,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "GPT-2": {"loss": "next_token", "kind": "tokens"},
    "U-Net": {"kind": "segmentation"},
}
MUST_BATCH = ("BERT", "GPT-2", "ViT", "BERT + LoRA", "MLP")


@dataclass(frozen=True)
class Row:
    """One model: the kernel that ran it, bytes that a client sends, and the largest differences."""

    name: str
    kernel: str
    bytes_up: int
    leaves: tuple[str, ...]
    expected: tuple[str, ...]
    batched: float
    workers: float
    logits: float
    seconds: float

    @property
    def problems(self) -> list[str]:
        """What is not as it must be."""
        apart = {"batched": self.batched, "workers": self.workers}
        found = [f"{engine} differs by {far:.1e}" for engine, far in apart.items() if not far <= AGREE]
        found += [f"logits differ from the model's by {self.logits:.1e}"] * (not self.logits <= SAME)
        found += [f"exchanged {sorted({*self.leaves} ^ {*self.expected})}"] * (set(self.leaves) != set(self.expected))
        found += [f"ran by {self.kernel}"] * (self.name in MUST_BATCH and self.kernel.startswith("loop"))
        return [f"{self.name}: {one}" for one in found]


def task_of(name: str) -> FederatedTask:
    """The task of a model of the zoo, in float64."""
    made = fedalloy.task(
        DATA[name](), model=BUILDERS[name], test_fraction=0.0, dtype="float64", **OPTIONS.get(name, {})
    )
    assert isinstance(made, FederatedTask), "these data are small"
    return made


def row_of(name: str, task: FederatedTask | None = None) -> Row:
    """Train a model for one round with every engine, and compare."""
    began, task = perf_counter(), task or task_of(name)
    batched = Batched(kernel="best")
    results = {
        engine if isinstance(engine, str) else "batched": fedalloy.fit(
            fedalloy.algorithms.fedavg(lr=0.01, batch_size=4), task, rounds=1, engine=engine
        )
        for engine in ("loop", batched, "workers")
    }
    models = {engine: result.model for engine, result in results.items()}
    expected = tuple(_expected(results["loop"].module()))
    sent = int(next(results["loop"].rounds())["bytes_up"]) // task.population
    batched_apart, workers_apart = (_apart(models[engine], models["loop"]) for engine in ("batched", "workers"))
    return Row(
        name, _kernel(batched, task), sent, tuple(models["loop"]), expected, batched_apart, workers_apart,
        _logits(task), perf_counter() - began,
    )  # fmt: skip


def _kernel(engine: Batched, task: FederatedTask) -> str:
    """How the batched engine ran the model."""
    if engine._unbatchable:
        return f"loop ({engine._unbatchable[:40]})"
    objective = task.objective
    params, buffers = objective.init(Key.of(0))
    if dense_of(objective, {"params": params, "buffers": buffers}) is not None:
        return "fused"
    return "vmap, whole batches" if objective.needs_full_batches else "vmap, padded"


def _expected(module: nn.Module) -> list[str]:
    """Trained parameters, and the buffers of norm layers that have some."""
    params = [name for name, leaf in module.named_parameters() if leaf.requires_grad]
    norms = [name for name, part in module.named_modules() if isinstance(part, nn.BatchNorm2d)]
    return params + [name for name, _ in module.named_buffers() if name.rpartition(".")[0] in norms]


def _apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(float((leaf.double() - other[name].double()).abs().max()) for name, leaf in one.items())


@torch.no_grad()
def _logits(task: FederatedTask) -> float:
    """How far the outputs are from those of the model as its own library runs it."""
    objective, x = task.objective, task.train.x
    assert isinstance(objective, ModuleObjective)
    params, buffers = objective.init(Key.of(1))
    module = objective.module(params, buffers)
    made = module(**x) if isinstance(x, dict) else module(x)
    return _apart({"": objective.outputs(params, buffers, x)}, {"": getattr(made, "logits", made)})


def main() -> int:
    """Print the table; the exit code is 1 if something is not as it must be."""
    functorch: Any = torch._C._functorch
    functorch._set_vmap_fallback_enabled(False)  # the slow path of vmap counts as a failure
    for theirs in (".*is_gradient_checkpointing", ".*nested tensors"):
        warnings.filterwarnings("ignore", message=theirs)
    torch.set_num_threads(1)
    print(f"{'model':26}{'kernel':22}{'bytes up':>9}{'batched':>10}{'workers':>10}{'logits':>10}{'s':>6}")
    problems = []
    for name in BUILDERS:
        row = row_of(name)
        numbers = f"{row.batched:>10.0e}{row.workers:>10.0e}{row.logits:>10.0e}{row.seconds:>6.1f}"
        print(f"{row.name:26}{row.kernel:22}{row.bytes_up:>9}{numbers}", flush=True)
        problems += row.problems
    print("\n".join(problems) if problems else "All engines agree, and every model sends what it trains.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
