"""A local step can be captured as a CUDA graph only if it never reads a number back from the card.

Here no card is needed: the step runs on fake tensors, which have shapes and no values and refuse to be read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import fedalloy
from fedalloy.core import inputs, registry
from fedalloy.core.keys import Key
from fedalloy.core.program import BlockTraining, TrainingResult
from fedalloy.engines.batched import Batched
from fedalloy.engines.batches import batches, dropout_keys
from fedalloy.engines.kernels import vmap_kernel
from fedalloy.engines.kernels.cuda_graphs import FEW, StepContext, in_streams
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.tasks.objective import ModuleObjective
from tests.experiment.test_cuda import DATA_MAKERS, SKEWED, method


def unread(training: BlockTraining) -> TrainingResult:
    """Take the first step of a block on tensors without values; the clients stay untrained."""
    block, ctx = training.block, training.ctx
    x, y = next(iter(batches(block)))
    drawn = {name: leaf[:, 0] for name, leaf in block.draws.items()}
    values = (training.carry, training.buffers, x, y, block.mask[0], dropout_keys(block)[:, 0], drawn)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    lr = mode.from_tensor(torch.tensor(ctx.local_lr))
    step = vmap_kernel.step_of(training.algorithm, training.objective, StepContext(**{**vars(ctx), "local_lr": lr}))
    with mode:
        vmap(step)(*tree_map(mode.from_tensor, values), mode.from_tensor(block.plan.phase[:, 0]))
    return TrainingResult(training.carry, training.buffers, torch.ones(len(block), 2, dtype=torch.float64))


def blocks_tried(algorithm: Any, model: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run one round; how many blocks took their first step on fake tensors. One that reads a number ends in a warning,
    which is an error here."""
    tried = []

    def train(training: BlockTraining) -> TrainingResult:
        tried.append(training)
        return unread(training)

    monkeypatch.setattr(vmap_kernel, "train", train)
    task = fedalloy.task("digits", model=model, clients=4, partition=SKEWED, valid_fraction=0.1)
    fedalloy.fit(algorithm, task, rounds=1, engine=Batched(kernel="mapped"), threads=1)
    return len(tried)


@pytest.mark.parametrize("name", registry.names("algorithm"))
def test_no_step_reads_a_number_back(name, monkeypatch):
    assert blocks_tried(method(name), DATA_MAKERS.get(name, "mlp"), monkeypatch) > 0, "no step was tried"


class Reading(Sgd):
    """A solver whose step takes its size from the card."""

    def step(self, carry, grad_at, draws, phase, ctx):
        float(ctx.local_lr)
        return super().step(carry, grad_at, draws, phase, ctx)


def test_a_step_that_reads_its_size_is_found(monkeypatch):
    with pytest.warns(RuntimeWarning, match="cannot be batched"):
        blocks_tried(replace(fedalloy.algorithms.fedavg(), solver=Reading()), "mlp", monkeypatch)


class NoCpu(TorchDispatchMode):
    """Collects the operations on tensors of the CPU: inside a capture each would be a copy to the card."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, kinds: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(isinstance(one, torch.Tensor) and one.device.type == "cpu" for one in tree_leaves((args, kwargs, made))):
            self.found.append(str(func))
        return made


@pytest.mark.parametrize("together", [False, True], ids=["streams", "vmap"])
@pytest.mark.parametrize("name", ["BERT + LoRA", "GPT-2", "Qwen (grouped attention)", "ViT"])
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")
def test_a_step_of_a_large_model_stays_on_the_device_of_its_data(name, together):
    pytest.importorskip("peft", reason="needs the extra 'huggingface'")
    from examples.zoo.__main__ import task_of

    task = task_of(name)  # its frozen leaves are on the CPU, as after a fit with a device
    params, _ = task.objective.init(Key.of(0))
    rows = (slice(0, 3), slice(3, 6)) if together else (slice(0, 3),)

    def there(pick: Any) -> Any:
        made = [tree_map(lambda leaf: leaf.to("meta"), pick(some)) for some in rows]
        return tree_map(lambda *leaves: torch.stack(leaves), *made) if together else made[0]

    values = [
        there(lambda some: {"params": params, "memory": {}}), {},
        there(lambda some: inputs.take(task.train.x, some)), there(lambda some: task.train.y[some]),
        there(lambda some: torch.ones(3, dtype=torch.bool)), there(lambda some: torch.zeros((), dtype=torch.int64)), {},
        there(lambda some: torch.zeros((), dtype=torch.int64)),
    ]  # fmt: skip
    lr: Any = torch.zeros((), device="meta", dtype=torch.float64)
    ctx = StepContext(1, 2, Key.of(0), local_lr=lr)
    step = vmap_kernel.step_of(fedalloy.algorithms.fedavg(lr=0.1), task.objective, ctx)
    with torch.no_grad():
        (vmap(step) if together else step)(*values)  # a warm-up, which brings the frozen leaves there
        with NoCpu() as seen:
            (vmap(step) if together else step)(*values)
    assert not seen.found


@pytest.mark.parametrize(("trainable", "clients", "apart"), [
    (None, FEW, True), (None, FEW + 1, False), (["1.*"], FEW, False), (["0.*"], FEW, True),
])  # fmt: skip
def test_few_clients_run_in_streams_unless_they_share_most_of_the_model(trainable, clients, apart):
    objective = ModuleObjective(lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), trainable=trainable)
    params, _ = objective.init(Key.of(0))
    carry = {name: torch.stack([leaf] * clients) for name, leaf in params.items()}
    assert in_streams(clients, objective, carry) is apart
