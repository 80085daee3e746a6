"""The conformance table: one row per registered rule and check."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, cast

from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.protocols import Engine
from fedalloy.core.spec import algorithm_from_spec, algorithm_to_spec, from_spec, to_spec
from fedalloy.testing import dataset_checks, server_checks, solver_checks, weighting_checks, wire_checks
from fedalloy.testing.cases import CHANGING, EngineCase, work
from fedalloy.testing.engines import check_engine
from fedalloy.testing.problems import model_for, small_task

Check = Callable[[Any], Iterable[str]]


class Row(NamedTuple):
    """One check of one rule."""

    category: str
    name: str
    check: str


def conformance_table() -> Iterator[Row]:
    """All rows: every registered rule of every category that has checks, so new files are included automatically.
    Engines whose clients train elsewhere are left out: they only run in a federation or on a cluster.

    >>> Row("weighting", "samples", "order of clients") in set(conformance_table())
    True
    """
    for category in CATEGORIES:
        for name in registry.names(category):
            if category == "engine" and not cast(type[Engine], registry.find(category, name)).trains_here:
                continue
            yield from (Row(category, name, check) for check in _checks(category))


def run_row(row: Row) -> list[str]:
    """The problems that one check finds in a rule; empty if there are none."""
    return _run(_checks(row.category)[row.check], specimen(row.category, row.name))


def check_rule(category: str, rule: Any) -> list[str]:
    """Run all checks of its category on a rule (a value, registered or not); empty if it passes all. A problem that
    several checks meet is listed once.

    The spec is not checked for a rule that is not registered, because it has no name.

    >>> from fedalloy.methods.weightings.samples import Samples
    >>> check_rule("weighting", Samples())
    []
    """
    checks = dict(_checks(category))
    if type(rule) not in registry.everything(category).values() and not isinstance(rule, Algorithm):
        checks.pop("spec", None)
    found: dict[str, list[str]] = {}
    for name, check in checks.items():
        for problem in _run(check, rule):
            found.setdefault(problem, []).append(name)
    return [f"{', '.join(dict.fromkeys(names))}: {problem}" for problem, names in found.items()]


def specimen(category: str, name: str) -> Any:
    """A rule to check: built without arguments, or by the static method ``example`` of a rule that needs some."""
    found = registry.find(category, name)
    return getattr(found, "example", found)()


def _run(check: Check, rule: Any) -> list[str]:
    """Run a check; an exception is reported as a problem of the rule."""
    try:
        return list(check(rule))
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]


def _spec(category: str, rule: Any) -> Iterator[str]:
    """The spec survives JSON and gives the same rule back."""
    if "kind" in {field.name for field in fields(rule)}:
        yield "has a field 'kind', which is the key of the rule's name in a spec: rename the field"
        return
    again = from_spec(category, json.loads(json.dumps(to_spec(category, rule))))
    if again != rule:
        yield f"comes back from its spec as {again}"


def _algorithm_spec(algorithm: Algorithm) -> Iterator[str]:
    """The spec survives JSON and gives the same algorithm back."""
    again = algorithm_from_spec(json.loads(json.dumps(algorithm_to_spec(algorithm))))
    if again != algorithm:
        yield f"comes back from its spec as {again}"


def _runs_a_round(algorithm: Algorithm) -> Iterator[str]:
    """Three rounds on the loop run with finite numbers, on a model with layers of every kind."""
    task = small_task(model_for(algorithm.solver, "batchnorm"))
    rounds = (work(*range(task.population)),) * 3 if algorithm.weighting.needs_everyone else CHANGING
    case = EngineCase("algorithm", "everything together", algorithm, task, rounds)
    yield from map(str, check_engine(registry.find("engine", "loop")(), [case]))


def _like_the_loop(engine: Any) -> Iterator[str]:
    """The engine does what the loop does."""
    yield from map(str, check_engine(engine))


CATEGORIES: dict[str, dict[str, Check]] = {
    "solver": dict(solver_checks.CHECKS),
    "weighting": dict(weighting_checks.CHECKS),
    "server": dict(server_checks.CHECKS),
    "wire": dict(wire_checks.CHECKS),
    "algorithm": {"spec": _algorithm_spec, "plays": _runs_a_round},
    "engine": {"like the loop": _like_the_loop},
}
"""Categories with their checks; rules of the four kinds also have a spec."""


ON_REQUEST: dict[str, dict[str, Check]] = {"dataset": dict(dataset_checks.CHECKS)}
"""Only checked by ``check_rule``: many data sets need files that may be missing, so the table leaves them out."""


def _checks(category: str) -> dict[str, Check]:
    known = {**CATEGORIES, **ON_REQUEST}
    if category not in known:
        raise SpecError(f"there are no checks for the category '{category}': {nearest(category, known)}")
    own = known[category]
    return own if category in ("algorithm", "engine") else {"spec": partial(_spec, category), **own}
