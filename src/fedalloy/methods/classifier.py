"""The server's classifier: trained on synthetic samples, evaluated on real ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedalloy.core.algorithm import Algorithm, ServerState
from fedalloy.core.arguments import checked
from fedalloy.core.aspects import Generative
from fedalloy.core.errors import SpecError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart, Engine, Objective, Task
from fedalloy.core.types import Block, Context, Tree, Work
from fedalloy.methods.servers.sgd import ServerSgd
from fedalloy.methods.solvers.sgd import Sgd
from fedalloy.methods.weightings.uniform import Uniform


@checked("classifier")
@dataclass(frozen=True)
class ClassifierTraining:
    """Training settings of the server's classifier: Adam from a new model, ``epochs`` passes over the synthetic set.
    The default is long enough to fit it. A generator makes ``per_class`` samples of every class; a method whose result
    is the samples themselves uses all it has if they are more."""

    epochs: int = 200
    batch_size: int = 64
    lr: float = 1e-3
    weight_decay: float = 1e-4
    per_class: int = 10

    def __post_init__(self) -> None:
        if self.weight_decay < 0:
            raise SpecError(f"the server's classifier needs weight_decay of 0 or more, got {self.weight_decay}")
        if min(self.epochs, self.batch_size, self.per_class) < 1 or self.lr <= 0:
            raise SpecError(
                "the server's classifier needs epochs, batch_size and per_class of 1 or more and lr above 0, got "
                f"{self.epochs}, {self.batch_size}, {self.per_class} and {self.lr}"
            )


@dataclass(frozen=True, eq=False)
class OneClient(Task):
    """A single client that holds given examples."""

    objective: Objective
    x: Tensor
    y: Tensor
    population: int = 1

    def data(self, part: DataPart, ids: Tensor) -> Block:
        """All examples, whichever part is asked for."""
        return Block(self.x, self.y, torch.zeros(1, dtype=torch.int64), torch.tensor([len(self.y)]))


def synthetic_set(
    task: Task, algorithm: Algorithm, state: ServerState, key: Key, per_class: int = 10
) -> tuple[Tensor, Tensor] | None:
    """The labelled synthetic samples ``(x, y)`` of a run; None where the method makes none."""
    maker = algorithm.solver.aspect(Generative)
    if maker is None:
        return None
    return maker.synthesise(state["shared"], key, max(per_class, maker.holds_per_class), task.objective)


def classifier_of(task: Task) -> Objective:
    """The model that is trained on synthetic samples: the task's ``classifier`` if set, else the task's model."""
    return task.classifier or task.objective


def train_classifier(
    objective: Objective,
    x: Tensor,
    y: Tensor,
    key: Key,
    engine: Engine,
    settings: ClassifierTraining | None = None,
) -> tuple[Tree, Tree]:
    """Parameters and buffers of a new model after training on ``x`` and ``y``, run on ``engine`` as one client's local
    training."""
    algorithm, ids = _trainer(settings or ClassifierTraining()), torch.zeros(1, dtype=torch.int64)
    params, buffers = ({name: leaf.to(x.device) for name, leaf in made.items()} for made in objective.init(key))
    shared = algorithm.init(params, 1, buffers)["shared"]
    states = {0: algorithm.init_client(shared, key)}
    ctx = Context(1, 1, key, algorithm.solver.lr_at(1), 1)
    task = OneClient(objective, x, y)
    sent = engine(algorithm, task, shared, states, Work.of(ids), ctx).cohort.payload
    moved = {name: leaf + sent["delta"][name][0] for name, leaf in params.items()}
    return moved, {name: leaf[0] for name, leaf in sent.get("buffers", {}).items()}


@lru_cache(maxsize=16)
def _trainer(settings: ClassifierTraining) -> Algorithm:
    """Cached, because an engine looks up its captured steps by this object."""
    solver = Sgd(
        lr=settings.lr,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        optimizer="adam",
        weight_decay=settings.weight_decay,
    )
    return Algorithm(solver, Uniform(), ServerSgd())
