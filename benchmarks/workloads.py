"""Four federations for measurements, and a hand-written sequential loop for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models import CLASSES, cnn, logistic, mlp
from fedalloy.core.types import Examples, Tree
from fedalloy.tasks.federation import FederatedTask, Pool
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.tasks.partitions.manifest import Manifest

LR = 0.05


@dataclass(frozen=True)
class Workload:
    """Clients with equal numbers of examples; ``cohort`` of them train one epoch in every round."""

    name: str
    what: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    clients: int
    examples: int
    batch: int
    cohort: int
    turn: int
    """Rounds of one side before it is the other's turn."""


WORKLOADS = (
    Workload("W1", "logistic 784-10, 10 of 1000 x 60", partial(logistic, 784), (784,), 1000, 60, 10, 10, 100),
    Workload("W2", "MLP 784-200-200-10, 10 of 100 x 600", mlp, (784,), 100, 600, 20, 10, 5),
    Workload("W3", "CNN of 582,026, 10 of 10 x 600", cnn, (1, 28, 28), 10, 600, 16, 10, 1),
    Workload("W4", "logistic 60-10, 100 of 100,000 x 20", partial(logistic, 60), (60,), 100_000, 20, 10, 100, 100),
)


def task_of(load: Workload) -> FederatedTask:
    """Random images around a mean per class, directly in the clients' pool: splitting is not measured."""
    generator = torch.Generator().manual_seed(0)
    rows = load.clients * load.examples
    y = torch.randint(CLASSES, (rows,), generator=generator)
    means = torch.randn(CLASSES, *load.shape, generator=generator)
    x = torch.randn(rows, *load.shape, generator=generator)
    for some, labels in zip(x.split(4096), y.split(4096), strict=True):
        some.add_(means[labels], alpha=0.2).mul_(0.5)
    return task_from(load, x, y)


def task_from(load: Workload, x: Tensor, y: Tensor) -> FederatedTask:
    """The task of a workload from its examples, client after client."""
    size = torch.full((load.clients,), load.examples)
    train = Pool(x, y, size.cumsum(0) - size, size)
    empty = Pool(x[:0], y[:0], torch.zeros_like(size), torch.zeros_like(size))
    manifest = Manifest(size, torch.zeros(load.clients, 0, dtype=torch.int64), "made for measuring")
    objective = ModuleObjective(load.model)
    return FederatedTask(objective, train, empty, empty, manifest, Examples(x[:100], y[:100]))


class Sequential:
    """A hand-written loop: client after client, one autograd call per step, no optimizer objects."""

    def __init__(self, load: Workload, task: FederatedTask, initial: Tree) -> None:
        self.load, self.task, self.module = load, task, load.model()
        self.params = list(self.module.parameters())
        self.server = [initial[name].clone() for name, _ in self.module.named_parameters()]
        self.generator = torch.Generator().manual_seed(1)
        self.start, self.size = task.train.start.tolist(), task.train.size.tolist()

    def round(self) -> None:
        """A cohort's local epochs and the mean of their models."""
        mean = [torch.zeros_like(leaf) for leaf in self.server]
        for client in self._cohort():
            with torch.no_grad():
                for leaf, value in zip(self.params, self.server, strict=True):
                    leaf.copy_(value)
            self._train(client)
            with torch.no_grad():
                for total, leaf in zip(mean, self.params, strict=True):
                    total.add_(leaf, alpha=1 / self.load.cohort)
        self.server = mean

    def _cohort(self) -> list[int]:
        """Some clients without replacement; a permutation of all of them would cost more than the training of W4."""
        if self.load.cohort == self.load.clients:
            return list(range(self.load.clients))
        chosen: dict[int, None] = {}
        while len(chosen) < self.load.cohort:
            chosen[int(torch.randint(self.load.clients, (), generator=self.generator))] = None
        return list(chosen)

    def _train(self, client: int) -> None:
        first, count = self.start[client], self.size[client]
        x, y = self.task.train.x[first : first + count], self.task.train.y[first : first + count]
        for rows in torch.randperm(count, generator=self.generator).split(self.load.batch):
            loss = functional.cross_entropy(self.module(x[rows]), y[rows])
            grads = torch.autograd.grad(loss, self.params)
            with torch.no_grad():
                for leaf, gradient in zip(self.params, grads, strict=True):
                    leaf.sub_(gradient, alpha=LR)


def moved(server: list[Tensor] | Tree, initial: Tree) -> float:
    """The distance of a model from its initial values: equal work moves it equally far."""
    leaves = server if isinstance(server, list) else [server[name] for name in initial]
    squares = [(leaf - first).double().square().sum() for leaf, first in zip(leaves, initial.values(), strict=True)]
    return float(torch.stack(squares).sum().sqrt())
