"""How a federation's clients differ, in numbers with names: from the data, from its recipe, and from one cheap round.

| measure | what it is |
|---|---|
| ``label_skew`` | the mean total variation distance between a client's classes and those of all, 0 to 1 |
| ``feature_skew`` | epsilon squared: the share of the features' variance between clients, corrected for chance, \
within classes where there are some, 0 to 1 |
| ``quantity_skew`` | the Gini coefficient of the numbers of training examples, 0 to 1 |
| ``dissimilarity`` | gradient diversity as B^2 of Li et al. (2020): the clients' mean squared gradient over the \
square of the mean gradient, 1 where all agree |
| ``drift`` | the spread of the clients' updates after local training over the length of their mean, 0 where all agree |
| ``loss_spread`` | the coefficient of variation of the clients' training losses after one round |
| ``absent`` | the share of clients that a round does not hear: not sampled, or lost on the way |
| ``uneven_work`` | the coefficient of variation of the clients' local steps in a round |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Task
from fedalloy.core.types import Block, Context, Tree, Work
from fedalloy.engines.loop import Loop
from fedalloy.experiment.machinery import Threads
from fedalloy.experiment.recipe.resolving import Experiment
from fedalloy.tasks.describing import PARTS, Description, describe
from fedalloy.tasks.evaluation import evaluate_clients
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.lazy import LazyTask

FEWEST, MOST = 5, 20
"""So many clients take part in the round that is measured, if there are as many."""
_EXAMPLES, _PASSES = 20_000, 50_000
"""Examples whose features are compared, and examples that the round trains on, each epoch counted."""
NAMES = {
    "label_skew": "label skew (total variation distance)",
    "feature_skew": "feature skew (epsilon squared)",
    "quantity_skew": "quantity skew (Gini)",
    "dissimilarity": "gradient diversity (B squared)",
    "drift": "client drift (spread of updates over their mean)",
    "loss_spread": "loss spread (coefficient of variation)",
    "absent": "clients that a round does not hear",
    "uneven_work": "uneven local work (coefficient of variation)",
}


@dataclass(frozen=True)
class Measures:
    """The measures by name, None where one does not apply; what is missing, in sentences; and the size of the model."""

    values: Mapping[str, float | None]
    clients: int
    measured: int
    missing: tuple[str, ...]
    layers: int
    normalised: bool
    bytes: int

    def lines(self) -> list[tuple[str, str]]:
        """Names and values to print."""
        told = [("clients", f"{self.clients}" + (f" ({self.measured} measured)" * (self.measured < self.clients)))]
        told += [(NAMES[name], "-" if one is None else f"{one:.3g}") for name, one in self.values.items()]
        return told + [("missing", said) for said in self.missing]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "values": dict(self.values), "missing": list(self.missing)}


def measure(made: Experiment) -> Measures:
    """Measure the federation of a one-run recipe with FedAvg: its data, and one round of at most 20 clients."""
    with Threads(replace(made.config, threads=made.config.threads or 1)):
        return _measured(made, made.task())


def _measured(made: Experiment, task: FederatedTask | LazyTask) -> Measures:
    seen, ids = describe(task), _some(made, task)
    block = task.data("train", ids)
    params, buffers = task.objective.init(Key.of(made.config.seed).fold("model"))
    values: dict[str, float | None] = {"label_skew": seen.skew, "feature_skew": feature_skew(block)}
    values["quantity_skew"] = gini([float(one) for one in seen.sizes["train"]])
    values |= _one_round(made, task, ids, (params, buffers))
    values["absent"] = _absent(made, task.population)
    layers = len({name.rpartition(".")[0] for name in params})
    missing = tuple(_missing(task, seen))
    return Measures(values, task.population, len(ids), missing, layers, bool(buffers), tree.nbytes(params))


def _some(made: Experiment, task: Task) -> Tensor:
    """The clients of the round: so few that it is cheap."""
    everyone = torch.arange(min(task.population, 1000))
    each = float(task.data("train", everyone).size.double().mean()) * getattr(made.algorithm.solver, "epochs", 1)
    count = max(FEWEST, min(MOST, int(_PASSES / max(1.0, each))))
    if task.population <= count:
        return torch.arange(task.population)
    return Key.of(made.config.seed).fold("advise").choice(task.population, count).sort().values


def feature_skew(block: Block) -> float | None:
    """Epsilon squared of the features between clients, within classes where targets are classes; None where features
    are not numbers.

    >>> far = torch.cat([torch.zeros(50, 1), torch.ones(50, 1)]) + 0.1 * torch.randn(100, 1)
    >>> feature_skew(Block(far, torch.zeros(100).long(), torch.tensor([0, 50]), torch.tensor([50, 50]))) > 0.9
    True
    """
    x, y = block.x, block.y
    if not isinstance(x, Tensor) or not x.is_floating_point() or not isinstance(y, Tensor) or x.dim() < 2:
        return None
    rows, owner = _rows(block)
    labels = y[rows] if y.dim() == 1 and not y.is_floating_point() else torch.zeros_like(rows)
    features = x[rows].flatten(1).double()
    found = [_between(features[labels == one], owner[labels == one]) for one in labels.unique()]
    between, total = (sum(part) for part in zip(*found, strict=True))
    return float(max(0.0, min(1.0, between / total))) if total > 0 else 0.0


def _between(features: Tensor, owner: Tensor) -> tuple[float, float]:
    """The corrected sum of squares between clients, and the whole one, over all features."""
    _, mine, counts = owner.unique(return_inverse=True, return_counts=True)
    groups, rows = len(counts), len(features)
    total = float(((features - features.mean(0)) ** 2).sum())
    if groups < 2 or rows <= groups:
        return 0.0, 0.0
    means = torch.zeros(groups, features.shape[1], dtype=features.dtype).index_add_(0, mine, features)
    means /= counts.unsqueeze(1)
    inside = float(((features - means[mine]) ** 2).sum())
    return total - inside - (groups - 1) * inside / (rows - groups), total


def _rows(block: Block) -> tuple[Tensor, Tensor]:
    """Rows of the pool and their clients; every so many of them where there are very many."""
    sizes, start = block.size.cpu(), block.start.cpu()
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)[:-1]])
    rows = start[owner] + torch.arange(len(owner)) - first[owner]
    step = max(1, math.ceil(len(rows) / _EXAMPLES))
    return rows[::step], owner[::step]


def gini(values: list[float]) -> float:
    """The Gini coefficient: half the mean absolute difference over the mean.

    >>> gini([1.0, 1.0]), gini([0.0, 1.0])
    (0.0, 0.5)
    """
    ordered, total = sorted(values), sum(values)
    if not total:
        return 0.0
    ranked = sum((2 * place - len(ordered) - 1) * one for place, one in enumerate(ordered, 1))
    return ranked / (len(ordered) * total)


def _one_round(made: Experiment, task: Task, ids: Tensor, model: tuple[Tree, Tree]) -> dict[str, float | None]:
    """Gradients and updates at the first model, and losses after the round."""
    algorithm, root, (params, buffers) = made.algorithm, Key.of(made.config.seed), model
    trained = _updates(algorithm, task, ids, (params, buffers), root)
    solver = replace(algorithm.solver, **_ONE_STEP)  # type: ignore[type-var]
    gradients = _updates(replace(algorithm, solver=solver), task, ids, (params, buffers), root)
    shares = task.data("train", ids).size.double()
    shares = shares / shares.sum().clamp(min=1)
    mean = tree.map_leaves(lambda leaf: torch.tensordot(shares.to(leaf.dtype), leaf.cpu(), 1), trained[0])
    moved = tree.map_leaves(lambda leaf, change: leaf + change.to(leaf.device), params, mean)
    losses = evaluate_clients(task.objective, moved, buffers, task.data("train", ids), ("loss",))["loss"]
    return {
        "dissimilarity": _ratio(gradients[0], shares, centred=False),
        "drift": _root(_ratio(trained[0], shares, centred=True)),
        "loss_spread": _variation(losses),
        "uneven_work": _variation(_work(made, ids, trained[1])),
    }


_ONE_STEP: dict[str, Any] = {
    "optimizer": "sgd", "momentum": 0.0, "nesterov": False, "weight_decay": 0.0, "epochs": 1, "batch_size": None,
    "lr": 1.0, "accumulate": 1, "clip_norm": None, "clip_value": None, "dampening": 0.0,
}  # fmt: skip
"""One step of size one with all examples: the update is the gradient."""


def _updates(algorithm: Algorithm, task: Task, ids: Tensor, model: tuple[Tree, Tree], root: Key) -> tuple[Tree, Tensor]:
    """Every client's update from a model, stacked, and its numbers of steps."""
    shared = algorithm.init(model[0], task.population, model[1])["shared"]
    rate = algorithm.solver.lr_at(1, 1)
    ctx = Context(1, task.population, root.fold("advise", "round"), rate, 1)
    states = {client: algorithm.init_client(shared, root.fold("state")) for client in ids.tolist()}
    with torch.no_grad():
        done = Loop()(algorithm, task, shared, states, Work.of(ids), ctx).cohort
    return done.payload["delta"], done.stats["num_steps"].double()


def _ratio(stacked: Tree, shares: Tensor, centred: bool) -> float | None:
    """The weighted mean of squared lengths, of the differences to the mean if centred, over that of the mean."""
    squares, mean = torch.zeros_like(shares), 0.0
    for leaf in stacked.values():
        rows = leaf.cpu().flatten(1).double()
        middle = shares @ rows
        mean += float(middle @ middle)
        squares += ((rows - middle if centred else rows) ** 2).sum(1)
    found = float(shares @ squares)
    return found / mean if mean and math.isfinite(found) else None


def _root(value: float | None) -> float | None:
    return None if value is None else math.sqrt(value)


def _variation(values: Tensor) -> float | None:
    known = values[values.isfinite()].double()
    middle = float(known.mean()) if len(known) else 0.0
    return float(known.std(unbiased=False)) / middle if middle else None


def _work(made: Experiment, ids: Tensor, steps: Tensor) -> Tensor:
    """The steps of a round in which devices draw their epochs."""
    epochs = made.config.devices.epochs_for(ids, Key.of(made.config.seed).fold("advise", "epochs"))
    own = getattr(made.algorithm.solver, "epochs", 1)
    return steps / max(1, own) * torch.where(epochs < 0, own, epochs)


def _absent(made: Experiment, population: int) -> float:
    """The share of clients that a round expects not to hear, from sampling and links."""
    reached = made.config.sampling.size(population) / population
    for chance in (made.config.devices.success, made.config.devices.availability):
        reached *= float(torch.as_tensor(chance, dtype=torch.float64).mean())
    return 1.0 - reached


def _missing(task: Task, seen: Description) -> list[str]:
    """What the data lack, in sentences."""
    everyone = torch.arange(min(task.population, 1000))
    empty = {part: int((task.data(part, everyone).size == 0).sum()) for part in PARTS}
    said = [
        f"{count} of {len(everyone)} clients have no {part} examples"
        for part, count in empty.items()
        if count and (part != "valid" or count < len(everyone))
    ]
    if empty["valid"] == len(everyone):
        said.append("there are no validation parts: a share of the training parts is used for the trials")
    few = task.data("test", everyone).size
    if len(few) and int(few.median()) < 10:
        said.append(f"half of the clients have fewer than {int(few.median()) + 1} test examples: scores are coarse")
    if seen.missing:
        said.append(f"{seen.missing} values are missing or infinite")
    if seen.leaked:
        said.append(f"{seen.leaked} test or validation examples of clients are among their training examples")
    return said
