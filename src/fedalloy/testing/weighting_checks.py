"""Checks of weightings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import tree
from fedalloy.core.errors import AlgorithmError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import Weighting
from fedalloy.core.types import Cohort, Context, Payload, Weights
from fedalloy.testing.comparing import broken, copied, differences
from fedalloy.testing.handles import SumsOnly
from fedalloy.testing.problems import small_objective

CLIENTS, POPULATION, SAMPLES = 5, 8, 6
TOLERANCE = 1e-9
EXTREMES = (0.0, 1e-8, 1.0, 1e4, 1e8)


def same_again(rule: Weighting) -> Iterator[str]:
    """Rules are pure: inputs are not changed, and the same inputs give the same weights."""
    cohort, state = sample(rule), rule.init(_population(rule))
    before = copied(vars(cohort)), copied(state)
    first, second = _weigh(rule, cohort, state), _weigh(rule, cohort, state)
    yield from (f"changed its cohort: {place}" for place in differences(vars(cohort), before[0]))
    yield from (f"changed its state: {place}" for place in differences(state, before[1]))
    yield from (f"a second call differs: {place}" for place in differences(second, first))


def order_of_clients(rule: Weighting) -> Iterator[str]:
    """Permuting the clients permutes their weights and changes nothing else, in a first and in a second round."""
    cohort, order = sample(rule), torch.tensor([3, 0, 4, 2, 1])
    state = other = rule.init(_population(rule))
    for round in (1, 2):
        weights, state, _ = rule.weigh(cohort, state, context(rule, round))
        permuted, other, _ = rule.weigh(cohort.take(order), other, context(rule, round))
        expected = _by_name(weights)
        expected = {name: leaf[order] for name, leaf in expected.items()}
        yield from differences({"weights": _by_name(permuted)}, {"weights": expected}, TOLERANCE)
        yield from differences({"state": other}, {"state": state}, TOLERANCE)


def finite(rule: Weighting) -> Iterator[str]:
    """Weights stay finite for extreme statistics, one client, equal clients, and clients that did not move."""
    for name, cohort in _hard_cohorts(rule).items():
        weights, state, _ = rule.weigh(cohort, rule.init(_population(rule)), context(rule))
        yield from (f"{name}: {place}" for place in broken({"weights": _by_name(weights), "state": state}))


def nobody_moved(rule: Weighting) -> Iterator[str]:
    """From the initial state, updates of zero combine to zero."""
    cohort = _fixed(sample(rule))
    weights, _, _ = rule.weigh(cohort, rule.init(_population(rule)), context(rule))
    moved = tree.combine(cohort.payload[_update(cohort)], weights)
    yield from differences(moved, tree.zeros_like(moved))


def shapes(rule: Weighting) -> Iterator[str]:
    """A weight's shape is a prefix of the stacked leaf's shape, and its first axis is the clients."""
    cohort = sample(rule)
    weights, _, _ = rule.weigh(cohort, rule.init(_population(rule)), context(rule))
    for name, leaf in cohort.payload[_update(cohort)].items():
        weight = weights if isinstance(weights, Tensor) else weights[name]
        if weight.dim() == 0 or leaf.shape[: weight.dim()] != weight.shape:
            yield f"the weight of {name} has shape {tuple(weight.shape)}, no prefix of {tuple(leaf.shape)}"


def declared(rule: Weighting) -> Iterator[str]:
    """The rule reads required statistics only, payloads only with ``reads_payload``, and its weights stay below its
    bound."""
    cohort = sample(rule)
    given = cohort if rule.reads_payload else SumsOnly(cohort)
    weights, _, _ = rule.weigh(given, rule.init(_population(rule)), context(rule))
    largest = max(float(leaf.abs().max()) for leaf in _by_name(weights).values())
    if rule.weight_bound is not None and largest > rule.weight_bound + TOLERANCE:
        yield f"a weight of {largest:g} is above the declared bound {rule.weight_bound:g}"


CHECKS = {
    "same again": same_again,
    "order of clients": order_of_clients,
    "finite": finite,
    "nobody moved": nobody_moved,
    "shapes": shapes,
    "declared": declared,
}


class _Required(dict[str, Tensor]):
    """The required statistics; others are refused in words."""

    def __missing__(self, name: str) -> Tensor:
        raise AlgorithmError(f"the rule reads the statistic '{name}' and does not declare it: add it to 'requires'")


def sample(rule: Weighting, clients: int = CLIENTS) -> Cohort:
    """A cohort with the statistics the rule requires, and no others."""
    key = Key.of(5).fold("cohort")
    ids = torch.arange(clients) if rule.needs_everyone else torch.tensor([0, 2, 3, 6, 7])[:clients]
    params, _ = small_objective("mlp").init(key)
    delta = {name: key.fold(name).normal(clients, *leaf.shape, dtype=torch.float64) for name, leaf in params.items()}
    stats = _Required((name, _statistic(name, clients, key)) for name in sorted(rule.requires - {"cross_score"}))
    crossed = "cross_score" in rule.requires
    scores = key.fold("cross").uniform(clients, clients, dtype=torch.float64) if crossed else None
    return Cohort(ids, _samples(clients, key) if "factors" in rule.reads else {"delta": delta}, stats, scores)


def _samples(clients: int, key: Key) -> Payload:
    """Contributions about synthetic samples: a gradient and a factor for each."""
    gradients = key.fold("slopes").normal(clients, SAMPLES, 2, dtype=torch.float64)
    factors = key.fold("factors").normal(clients, SAMPLES, dtype=torch.float64).sign().exp()
    return {"energy_grad": {"x": gradients}, "factors": {"x": factors}}


def _update(cohort: Cohort) -> str:
    """The part that updates the target: the first."""
    return next(iter(cohort.payload))


def context(rule: Weighting, round: int = 1) -> Context:
    """A round as the rule sees it."""
    return Context(round, _population(rule), Key.of(6).fold(round), local_lr=0.1, rounds=10)


def _population(rule: Weighting) -> int:
    return CLIENTS if rule.needs_everyone else POPULATION


def _statistic(name: str, clients: int, key: Key) -> Tensor:
    """Counts are whole numbers, everything else lies in (0.1, 0.9)."""
    values = 0.1 + 0.8 * key.fold(name).uniform(clients, dtype=torch.float64)
    counted = name.startswith(("num_", "bytes")) or name in {"step_norm", "effective_steps"}
    return (values * 20).ceil() if counted else values


def _hard_cohorts(rule: Weighting) -> dict[str, Cohort]:
    cohort, one = sample(rule), torch.tensor([2])
    numbers = {name: torch.tensor(EXTREMES, dtype=torch.float64) for name in rule.requires if "loss" in name}
    scores = {
        name: torch.tensor([0.0, 0.0, 1.0, 1.0, 0.5], dtype=torch.float64) for name in rule.requires if "accur" in name
    }
    equal = replace(cohort.take(torch.zeros(len(cohort), dtype=torch.int64)), ids=cohort.ids)
    hard = {
        "extreme losses": _with(cohort, numbers),
        "extreme accuracies": _with(cohort, scores),
        "zeros": _with(cohort, {name: torch.zeros_like(values) for name, values in cohort.stats.items()}),
        "equal clients": equal,
        "clients that did not move": _fixed(cohort),
        "one client that moved": _fixed(cohort, but=2),
    }
    return hard if rule.needs_everyone else {**hard, "one client": cohort.take(one)}


def _with(cohort: Cohort, stats: Mapping[str, Tensor]) -> Cohort:
    return replace(cohort, stats=_Required({**cohort.stats, **stats}))


def _fixed(cohort: Cohort, but: int | None = None) -> Cohort:
    moving = torch.zeros(len(cohort), dtype=torch.bool)
    if but is not None:
        moving[but] = True
    update = _update(cohort)
    unmoved = {
        name: torch.where(moving.reshape(-1, *[1] * (leaf.dim() - 1)), leaf, 0.0)
        for name, leaf in cohort.payload[update].items()
    }
    return cohort.with_payload({**cohort.payload, update: unmoved})


def _weigh(rule: Weighting, cohort: Cohort, state: dict[str, Any]) -> dict[str, Any]:
    weights, new, info = rule.weigh(cohort, state, context(rule))
    return {"weights": _by_name(weights), "state": new, "info": info}


def _by_name(weights: Weights) -> dict[str, Tensor]:
    return {"client": weights} if isinstance(weights, Tensor) else dict(weights)
