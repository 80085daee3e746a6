"""A run before its first round: checks that everything fits together, and the initial model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from fedalloy.core.algorithm import Algorithm, ServerState
from fedalloy.core.capabilities import check_capabilities, check_targets
from fedalloy.core.cross import check_validation
from fedalloy.core.engine import check_answers
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Engine, Task
from fedalloy.core.types import Tree
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.health import check_able
from fedalloy.experiment.machinery import make_engine
from fedalloy.experiment.placement import at_work, looked_at, on_device, told
from fedalloy.experiment.round import Federation
from fedalloy.tasks.metrics.metric import check_metrics
from fedalloy.tasks.pure_module import NEEDS_FACTORY

_LOOKED_AT = 100
"""Clients among which validation parts are looked for."""


def assemble(algorithm: Algorithm, task: Task, config: RunConfig) -> Federation:
    """Build the federation of a run; refuses what does not fit together before the first round."""
    config.devices.check(task.population)
    config.sampling.check(task.population)
    algorithm.check_cohort(config.sampling.size(task.population), task.population)
    algorithm.check_able(config.sampling.smallest(task.population), task.population)
    engine = make_engine(config)
    task = looked_at(task, engine)
    check_targets(algorithm, task)
    check_metrics(config.metrics, task.kind)
    _check_global(engine, config)
    _check_part(engine, task, config)
    algorithm = algorithm.bind(task, Key.of(config.seed))
    check_capabilities(algorithm, task)
    _check_starts(algorithm, task)
    check_answers(engine, algorithm)
    there = at_work(task, engine, config.device)
    fed = Federation(algorithm, there, engine, config, Key.of(config.seed), told(task, algorithm))
    if engine.data_at_hand:  # otherwise the nodes check their data
        check_validation(algorithm, task)
        algorithm.check_task(task)
        check_able(algorithm, task, config)
    return fed


def _check_starts(algorithm: Algorithm, task: Task) -> None:
    """Refuse a model without parameters, and a method whose clients draw models of their own, if the model has only one
    start."""
    if not task.objective.forms.get("params", {"any": None}):
        raise SpecError("the model has no parameters, so that nothing would be trained: give one that has some")
    if not algorithm.needs_fresh:
        return
    who = f"solver {type(algorithm.solver).__name__}, whose clients draw models of their own,"
    if task.objective.single_start:
        raise SpecError(f"{who} {NEEDS_FACTORY}")
    first, second = (task.objective.init(Key.of(seed))[0] for seed in (0, 1))
    if all(torch.equal(leaf, second[name]) for name, leaf in first.items()):
        raise SpecError(
            f"{who} needs several starts, and the function that builds the model gives the same values every time: "
            "let it draw them, without a seed of its own"
        )


def _check_global(engine: Engine, config: RunConfig) -> None:
    """Refuse to wait for a score that does not exist: some metrics (AUROC) need all scores at one place."""
    if config.target_on == "global" and not engine.data_at_hand:
        raise SpecError(
            "target_on = 'global': the clients' data are elsewhere, so there is no global test set, and every metric "
            "is per client only; set target_on = 'clients' (the mean over clients)"
        )


def _check_part(engine: Engine, task: Task, config: RunConfig) -> None:
    """Refuse to score validation parts that do not exist, or that are elsewhere."""
    if config.evaluate_part == "test":
        return
    if not engine.data_at_hand:
        raise SpecError("evaluate part = 'valid': clients whose data are elsewhere score their test parts only")
    if config.target_on == "global":
        raise SpecError("target_on = 'global' is the global test set: with evaluate part = 'valid' use 'clients'")
    if not bool(task.data("valid", torch.arange(min(task.population, _LOOKED_AT))).size.any()):
        raise SpecError(
            "evaluate part = 'valid': the clients have no validation parts; set task.valid_fraction, e.g. 0.1"
        )


def begin(fed: Federation, initial: Tree | None = None) -> ServerState:
    """The server's state before round 1; the same seed gives every algorithm the same initial model."""
    params, buffers = given_leaves(*fed.task.objective.init(fed.root.fold("model")), initial)
    state = fed.algorithm.init(params, fed.task.population, buffers)
    return cast(ServerState, on_device(state, fed.config.device))


def given_leaves(params: Tree, buffers: Tree, initial: Any) -> tuple[Tree, Tree]:
    """Parameters and buffers with those of ``initial`` filled in; what does not fit the model is refused.

    >>> given_leaves({"w": torch.zeros(2)}, {}, {"w": torch.ones(2)})
    ({'w': tensor([1., 1.])}, {})
    """
    if initial is None:
        return params, buffers
    if not isinstance(initial, Mapping):
        hint = ": give its state_dict()" if isinstance(initial, torch.nn.Module) else ""
        raise SpecError(f"initial must be a table of tensors by name, got a {type(initial).__name__}{hint}")
    known = {**params, **buffers}
    made = {name: _fitting(name, leaf, known) for name, leaf in initial.items()}
    return {name: made.get(name, leaf) for name, leaf in params.items()}, {
        name: made.get(name, leaf) for name, leaf in buffers.items()
    }


def _fitting(name: str, leaf: Any, known: Tree) -> Tensor:
    if name not in known:
        raise SpecError(f"initial: the model has no '{name}': {nearest(str(name), known)}")
    if not isinstance(leaf, Tensor) or leaf.shape != known[name].shape:
        got = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        raise SpecError(f"initial: '{name}' must be a tensor of shape {tuple(known[name].shape)}, got {got}")
    if not bool(leaf.isfinite().all()):
        raise SpecError(f"initial: '{name}' holds NaN or infinity")
    return leaf.detach().to(known[name])
