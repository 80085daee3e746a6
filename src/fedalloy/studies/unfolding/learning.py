"""The outer loop: Adam on theta, iteration by iteration, resumable bit for bit, with early stopping."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.errors import CheckpointError, SpecError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Engine, Task
from fedalloy.core.types import Tree
from fedalloy.experiment.interrupt import Caught, StopFlag, stop_on_signal
from fedalloy.experiment.placement import on_device
from fedalloy.experiment.records import atomic, checkpoint
from fedalloy.studies.unfolding.gradient import OuterGradient, make_engine, outer_gradient
from fedalloy.studies.unfolding.settings import Learning
from fedalloy.studies.unfolding.shares import first_theta, shares_of
from fedalloy.studies.unfolding.unrolled import Subsample, UnrolledProblem

_EPS = 1e-8


@dataclass
class Standing:
    """The progress of the learning: everything needed to resume it."""

    theta: Tensor
    first: Tensor
    second: Tensor
    iteration: int = 0
    losses: list[float] = field(default_factory=list)
    best: float = math.inf
    best_theta: Tensor | None = None
    stale: int = 0


@dataclass(frozen=True)
class OuterEvent:
    """Passed to the watcher after every outer iteration."""

    iteration: int
    iterations: int
    loss: float
    valid_loss: float | None
    seconds: float


@dataclass(frozen=True)
class Learner:
    """One learning: the unrolled problem, the seed, the progress file and the watcher."""

    problem: UnrolledProblem
    seed: int = 0
    device: str = "cpu"
    progress: Path | None = None
    save_every: float = 30.0
    watcher: Callable[[OuterEvent], None] | None = None
    identity: dict[str, Any] = field(default_factory=dict)
    engine: Engine | None = None

    @property
    def root(self) -> Key:
        """The root key of a run with this seed, which therefore begins with the same model."""
        return Key.of(self.seed)

    def model(self, iteration: int) -> tuple[Tree, Tree]:
        """The model that an iteration begins with."""
        fixed = self.problem.learning.initial == "fixed"
        key = self.root.fold("model") if fixed else self.root.fold("unfold", iteration, "model")
        params, buffers = self.problem.task.objective.init(key)
        return on_device(params, self.device), on_device(buffers, self.device)


def learn(learner: Learner, resume: bool = False, caught: Caught | None = None) -> tuple[Standing, str | None]:
    """Outer iterations to the end, or until stopped; the second value is then the reason."""
    learning = learner.problem.learning
    standing = _restored(learner) if resume else None
    standing = standing or _beginning(learner)
    engine = learner.engine or make_engine(learner.problem, *learner.model(0))
    saved = time.monotonic()
    with stop_on_signal(caught=caught) as flag:
        while standing.iteration < learning.iterations and not _stale(standing, learning) and not flag:
            _iterate(learner, standing, engine)
            if learner.progress and time.monotonic() - saved >= learner.save_every:
                _save(learner, standing)
                saved = time.monotonic()
    if learner.progress and flag:
        _save(learner, standing)
    return standing, _reason(flag)


def chosen_theta(standing: Standing) -> Tensor:
    """The parameters of the best validation loss where there is one, otherwise the last."""
    return standing.theta if standing.best_theta is None else standing.best_theta


def sampled(problem: UnrolledProblem, seed: int) -> UnrolledProblem:
    """The problem on the stated fraction of every client's examples."""
    if problem.learning.fraction == 1.0:
        return problem
    key = Key.of(seed).fold("unfold", "fraction")
    return replace(problem, task=Subsample(problem.task, problem.learning.fraction, key))


def sizes_of(task: Task) -> Tensor:
    """How many training examples the clients have, in the order of their ids."""
    return task.data("train", torch.arange(task.population)).size.cpu()


def adam(standing: Standing, grad: Tensor, learning: Learning) -> None:
    """One step of Adam with bias correction."""
    beta1, beta2 = learning.betas
    count = standing.iteration + 1
    standing.first = beta1 * standing.first + (1 - beta1) * grad
    standing.second = beta2 * standing.second + (1 - beta2) * grad * grad
    rate, root = learning.lr / (1 - beta1**count), math.sqrt(1 - beta2**count)
    standing.theta = standing.theta - rate * standing.first / (standing.second.sqrt() / root + _EPS)


def _iterate(learner: Learner, standing: Standing, engine: Engine) -> None:
    begun, problem, number = time.perf_counter(), learner.problem, standing.iteration
    params, buffers = learner.model(number)
    key = learner.root.fold("unfold", number)
    found = outer_gradient(problem, standing.theta, params, buffers, key, engine)
    valid = _validate(learner, standing, found)
    adam(standing, found.by_theta.to(standing.theta), problem.learning)
    standing.iteration += 1
    standing.losses.append(found.loss)
    if learner.watcher:
        spent = time.perf_counter() - begun
        learner.watcher(OuterEvent(standing.iteration, problem.learning.iterations, found.loss, valid, spent))


def _validate(learner: Learner, standing: Standing, found: OuterGradient) -> float | None:
    """The final model's loss on the validation parts, if early stopping needs it; it belongs to the theta with which
    the iteration began."""
    learning = learner.problem.learning
    due = standing.iteration % learning.check_every == 0 or standing.iteration + 1 == learning.iterations
    if learning.patience is None or not due:
        return None
    value = valid_loss(learner.problem, found.params, found.buffers)
    if value < standing.best:
        standing.best, standing.best_theta, standing.stale = value, standing.theta, 0
    else:
        standing.stale += 1
    return value


@torch.no_grad()
def valid_loss(problem: UnrolledProblem, params: Tree, buffers: Tree) -> float:
    """Mean loss of a model over the validation examples of all clients."""
    block = problem.task.data("valid", problem.ids)
    if int(block.size.sum()) == 0:
        raise SpecError("unfold.patience needs a validation part: set task.valid_fraction above 0")
    outer, device, total = problem.outer, next(iter(params.values())).device, 0.0
    for row in range(len(block.size)):
        own = block.client(row)
        for some in inputs.pieces(len(own), 4096):
            x, y = (inputs.to(inputs.take(part, some), device) for part in (own.x, own.y))
            total += float(outer.losses(outer.outputs(params, buffers, x), y).double().sum())
    return total / int(block.size.sum())


def _stale(standing: Standing, learning: Learning) -> bool:
    return learning.patience is not None and standing.stale >= learning.patience


def _beginning(learner: Learner) -> Standing:
    problem = learner.problem
    sizes = sizes_of(problem.task.task if isinstance(problem.task, Subsample) else problem.task)
    theta = first_theta(sizes, problem.rounds, problem.learning.parametrisation, len(problem.layers))
    return Standing(theta, torch.zeros_like(theta), torch.zeros_like(theta))


def _save(learner: Learner, standing: Standing) -> None:
    assert learner.progress is not None
    atomic.make_folder(learner.progress.parent)
    checkpoint.save(learner.progress, {"identity": learner.identity, "standing": vars(standing)})


def _restored(learner: Learner) -> Standing | None:
    """The progress of an interrupted learning; that of another learning is refused."""
    if learner.progress is None or not learner.progress.exists():
        return None
    saved = checkpoint.load(learner.progress)
    if saved["identity"] != learner.identity:
        raise CheckpointError(
            f"{learner.progress} is the progress of another learning (other settings or another recipe); delete it, or "
            "choose another file"
        )
    return Standing(**saved["standing"])


def _reason(flag: StopFlag) -> str | None:
    return flag.reason


def shares(standing: Standing, learning: Learning) -> Tensor:
    """The current table."""
    return shares_of(chosen_theta(standing), learning.parametrisation)
