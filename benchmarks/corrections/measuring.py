"""A case compares several forms of one rule; this module runs them and reads their results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedalloy.core import tree
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.protocols import Weighting
from fedalloy.core.types import Context, Contributions, Info, State, Weights
from fedalloy.experiment.fit import RunResult, fit
from fedalloy.tasks.assembly import make_task
from fedalloy.tasks.federation import FederatedTask

SEEDS = (10, 11, 12, 13, 14)
"""Settings were chosen on the seeds 0 to 4; reported results come from these seeds, which were not used before."""
OURS = "ours"
EVERY, LAST = 2, 10
"""A model is scored every other round; accuracies are means over the last ten rounds, which vary less than one."""
Readings = dict[str, dict[str, float]]
"""The value of every form in every column, for one seed."""


@dataclass(frozen=True)
class Column:
    """A number that is read from every form; ``scale`` and ``digits`` define how it is printed.

    ``shape``: ``e`` always with a power of ten, ``g`` when it would round to zero, ``f`` only when it is huge.
    """

    key: str
    heading: str
    digits: int = 1
    scale: float = 1.0
    shape: str = "f"


@dataclass(frozen=True)
class Case:
    """One correction: its name, what is read, and how to read it for a seed."""

    name: str
    columns: tuple[Column, ...]
    measure: Callable[[int], Readings]
    seeds: tuple[int, ...] = SEEDS
    what: str = ""


@dataclass(frozen=True)
class Form:
    """One way to write a rule; the first form of a case is the one that the others are compared with."""

    name: str
    algorithm: Callable[[FederatedTask], Algorithm]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundResult:
    """A run and its federation."""

    task: FederatedTask
    result: RunResult


Reading = Callable[[RoundResult], float]

ACCURACY = Column("accuracy", "accuracy", 1, 100)
WORST = Column("worst", "worst tenth", 1, 100)
WAY = Column("way", "all rounds", 1, 100)
APART = Column("apart", "apart", 2, shape="g")
GAIN = Column("gain", "difference", 1, 100)


def form(name: str, algorithm: Algorithm, **settings: Any) -> Form:
    """A form that is the same for every federation."""
    return Form(name, lambda task: algorithm, settings)


def digits(
    clients: int = 20, alpha: float = 0.1, sizes: str = "even", valid: float = 0.0, model: Any = None
) -> Callable[[int], FederatedTask]:
    """The embedded digits under label skew; ``sizes = "skewed"`` also makes a few clients large."""
    partition: dict[str, Any] = {"kind": "dirichlet", "alpha": alpha, "min_samples": 10}
    if sizes == "skewed":
        quantity = {"kind": "power_law", "exponent": 1.0, "min_samples": 15}
        partition = {"kind": "skewed", "label": partition, "quantity": quantity, "keep": "sizes"}
    chosen = model or {"kind": "mlp", "hidden": [32]}
    return lambda seed: make_task(
        "digits", chosen, partition, clients, test_fraction=0.25, valid_fraction=valid, seed=seed
    )


def normed(inputs: int, classes: int) -> nn.Module:
    """A perceptron with BatchNorm."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, 32, bias=False), nn.BatchNorm1d(32), nn.ReLU(),
        nn.Linear(32, classes, bias=False),
    )  # fmt: skip


def trained(
    name: str,
    federation: Callable[[int], FederatedTask],
    forms: Sequence[Form],
    extras: Mapping[Column, Reading] | None = None,
    **settings: Any,
) -> Case:
    """A case in which every form trains on the same federation, from the same model, with the same batches."""
    extras = extras or {}

    def measure(seed: int) -> Readings:
        task = federation(seed)
        played = {one.name: RoundResult(task, run_round(one, task, seed, settings)) for one in forms}
        first = played[forms[0].name]
        return {
            title: {**_default(each, first), **{column.key: read(each) for column, read in extras.items()}}
            for title, each in played.items()
        }

    return Case(name, (ACCURACY, WORST, WAY, APART, *extras), measure)


def run_round(one: Form, task: FederatedTask, seed: int, settings: Mapping[str, Any]) -> RunResult:
    """One form's run."""
    common: dict[str, Any] = {"rounds": 40, "engine": "batched", "evaluate_every": EVERY, "threads": 1}
    return fit(one.algorithm(task), task, seed=seed, **{**common, **settings, **one.settings})


def _default(played: RoundResult, first: RoundResult) -> dict[str, float]:
    """The values of every run; a run that broke off only has the round in which it did."""
    rows = list(played.result.rounds())
    if played.result.status != "finished":
        return {"accuracy": math.nan, "worst": math.nan, "way": math.nan, "apart": math.nan, "broke": len(rows)}
    scores = [row["evaluation"]["accuracy"] for row in rows if "evaluation" in row]
    late = scores[-LAST // EVERY :]
    return {
        "accuracy": statistics.fmean(score["mean"] for score in late),
        "worst": statistics.fmean(score["worst_served"] for score in late),
        "way": statistics.fmean(score["mean"] for score in scores),
        "apart": _apart(played, first),
    }


def _apart(played: RoundResult, first: RoundResult) -> float:
    """The distance of a model from that of the first form, relative to how far that one moved."""
    model, reference = (each.result.ending.state["shared"]["params"] for each in (played, first))
    fed = first.result.ending.trained.fed
    start, _ = fed.task.objective.init(fed.root.fold("model"))
    return float(tree.norm(tree.subtract(model, reference)) / tree.norm(tree.subtract(reference, start)))


@dataclass(frozen=True)
class Watched(Weighting):
    """A rule whose record also holds the clients' losses and the lengths of their updates."""

    rule: Weighting

    @property
    def requires(self) -> frozenset[str]:
        return self.rule.requires | {"loss_before", "num_examples"}

    @property
    def needs_everyone(self) -> bool:
        return self.rule.needs_everyone

    def init(self, population: int) -> State:
        return self.rule.init(population)

    def weigh(self, cohort: Contributions, state: State, ctx: Context) -> tuple[Weights, State, Info]:
        weights, kept, info = self.rule.weigh(cohort, state, ctx)
        seen = {
            "seen_loss": cohort.stats["loss_before"],
            "seen_length": tree.norms(cohort.payload["delta"]),
            "seen_size": cohort.stats["num_examples"],
            "seen_move": tree.norm(tree.combine(cohort.payload["delta"], weights)),
        }
        return weights, kept, {**info, **seen}


def over_rounds(read: Callable[[dict[str, Any]], float]) -> Reading:
    """The mean of something over the rounds in which it exists."""

    def mean(played: RoundResult) -> float:
        values = [value for row in played.result.rounds() if not math.isnan(value := read(row))]
        return sum(values) / len(values) if values else math.nan

    return mean


def largest_weight(row: dict[str, Any]) -> float:
    """The largest weight of a client."""
    return max(row["weights"]) if row["weights"] else math.nan


def agreement(row: dict[str, Any]) -> float:
    """The correlation over clients between weight and loss."""
    pair = torch.tensor([row["weights"], row["info"]["seen_loss"]], dtype=torch.float64)
    if pair.shape[1] < 2 or bool((pair.std(1) < 1e-12).any()):
        return math.nan
    return float(torch.corrcoef(pair)[0, 1])


def mean_length(row: dict[str, Any]) -> float:
    """The mean length of the clients' updates."""
    return _mean(torch.tensor(row["info"]["seen_length"]))


def largest_owner(row: dict[str, Any]) -> float:
    """The weight of the client with most examples, over its share of the examples."""
    sizes = torch.tensor(row["info"]["seen_size"], dtype=torch.float64)
    most = int(sizes.argmax())
    return float(row["weights"][most] / (sizes[most] / sizes.sum()))


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
