"""Small federations in float64, generated from a key: clients of different sizes, smooth models, no data sets."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from fedalloy.core.aspects import Generative
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart, LocalSolver, Objective, Task
from fedalloy.core.types import Block, Examples
from fedalloy.tasks.dropout import Dropout
from fedalloy.tasks.models.acgan import Acgan, acgan_rows
from fedalloy.tasks.models.cvae import ConditionalVae, cvae_rows
from fedalloy.tasks.objective import ModuleObjective

Model = Literal["linear", "mlp", "batchnorm", "dropout", "acgan", "cvae"]

INPUTS, CLASSES, HIDDEN = 4, 3, 5
RAGGED = (1, 3, 7, 12, 5)
# With batches of 3 none of these has a last batch of one example, for which BatchNorm has no variance.
RAGGED_FOR_BATCHNORM = (2, 3, 8, 11, 6)
EQUAL = (6, 6, 6, 6)


@dataclass(frozen=True, eq=False)
class SmallTask(Task):
    """A model and a few clients. All three parts hold the same examples."""

    objective: Objective
    block: Block

    @property
    def population(self) -> int:
        """The number of clients."""
        return len(self.block.size)

    @property
    def global_test(self) -> Examples:
        """All clients' examples."""
        return Examples(self.block.x, self.block.y)

    def data(self, part: DataPart, ids: Tensor) -> Block:
        """The examples of some clients."""
        return Block(self.block.x, self.block.y, self.block.start[ids], self.block.size[ids])


def small_task(model: Model = "mlp", sizes: tuple[int, ...] | None = None, seed: int = 0) -> SmallTask:
    """Clients of the given sizes whose features are shifted against each other; the same seed gives the same task.

    >>> small_task("linear", sizes=(2, 5)).data("train", torch.tensor([1])).client(0).x.shape
    torch.Size([5, 4])
    """
    sizes = sizes or (RAGGED_FOR_BATCHNORM if model == "batchnorm" else RAGGED)
    key, size = Key.of(seed).fold("small task"), torch.tensor(sizes)
    owner = torch.repeat_interleave(size)
    shifts = key.fold("shift").normal(len(sizes), INPUTS, dtype=torch.float64)
    x = key.fold("x").normal(len(owner), INPUTS, dtype=torch.float64) + shifts[owner]
    y = (key.fold("y").uniform(len(owner), dtype=torch.float64) * CLASSES).long()
    return SmallTask(small_objective(model), Block(x, y, size.cumsum(0) - size, size))


def small_objective(model: Model = "mlp") -> ModuleObjective:
    """The model; with tanh, so that small differences stay small."""
    return ModuleObjective(_BUILDERS[model], dtype=torch.float64)


def model_for(solver: LocalSolver, ordinary: Model = "mlp") -> Model:
    """The ordinary model, or one with the capabilities that the solver needs.

    >>> from fedalloy.methods.solvers.cvae import Cvae
    >>> model_for(Cvae())
    'cvae'
    """
    asked = solver.aspect(Generative)
    capabilities = asked.capabilities if asked is not None else frozenset()
    return next((model for model in _GENERATIVE if capabilities and capabilities <= _CAPABILITIES[model]), ordinary)


def _linear() -> nn.Module:
    return nn.Sequential(OrderedDict(output=nn.Linear(INPUTS, CLASSES)))


def _with_middle(name: str, middle: nn.Module) -> nn.Module:
    layers = OrderedDict(hidden=nn.Linear(INPUTS, HIDDEN), tanh=nn.Tanh())
    layers[name], layers["output"] = middle, nn.Linear(HIDDEN, CLASSES)
    return nn.Sequential(layers)


_BUILDERS = {
    "linear": _linear,
    "mlp": lambda: _with_middle("same", nn.Identity()),
    "batchnorm": lambda: _with_middle("norm", nn.BatchNorm1d(HIDDEN)),
    "dropout": lambda: _with_middle("drop", Dropout(0.4)),
    "acgan": lambda: acgan_rows((INPUTS,), CLASSES, width=HIDDEN, latent=2),
    "cvae": lambda: cvae_rows((INPUTS,), CLASSES, width=HIDDEN, latent=2),
}
_GENERATIVE: tuple[Model, ...] = ("acgan", "cvae")
_CAPABILITIES: dict[Model, frozenset[str]] = {"acgan": Acgan.capabilities, "cvae": ConditionalVae.capabilities}
