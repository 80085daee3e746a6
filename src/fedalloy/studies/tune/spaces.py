"""Which settings of an algorithm are searched, and where: what its rules declare, and what the recipe says instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any

from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import FedalloyError, SpecError
from fedalloy.core.search import Choice, Range, read_space
from fedalloy.experiment.recipe.changes import merge
from fedalloy.experiment.recipe.reading import parse
from fedalloy.experiment.recipe.resolving import algorithm_of
from fedalloy.experiment.recipe.tables import Recipe, RuleTable
from fedalloy.methods.solvers.personal import Personal
from fedalloy.methods.solvers.training import SEARCH, SEARCH_SCALED, LocalTraining

Space = dict[str, Range | Choice]
TABLES = ("algorithm", "solver", "weighting", "server")
"""The tables of a recipe whose settings can be searched."""
_ARGUMENTS = {("server", "lr"): "server_lr", ("weighting", "lr"): "score_lr"}
"""The names that arguments of rules have in published methods, where they differ."""


def space_of(recipe: Recipe) -> Space:
    """The paths of a one-algorithm recipe that are searched, with their ranges.

    >>> space_of(parse({"algorithm": {"name": "fedprox"}}))["algorithm.mu"]
    Range(low=0.0001, high=1.0, log=True)
    """
    algorithm = algorithm_of(recipe)
    found = {**_method_space(recipe, algorithm), **_parts_space(recipe, algorithm)}
    own = {path: read_space(path, given) for path, given in _given(recipe).items()}
    for path, where in own.items():
        _check_table(path)
        _check(recipe, path, where)
    space = {**{path: one for path, one in found.items() if _settable(recipe, path, one)}, **own}
    if not space:
        raise SpecError("there is nothing to search: the rules of this algorithm declare no ranges; give [tune.space]")
    return space


def with_own_ranges(entries: Sequence[tuple[str, Recipe]]) -> list[tuple[str, Recipe]]:
    """The entries, each without those ranges of ``[tune.space]`` that are for arguments of other entries' methods; one
    that none of them has stays, and is refused by :func:`space_of`."""
    elsewhere = {path for _, recipe in entries for path in _given(recipe) if has_argument(recipe, path)}
    return [(name, without_ranges(recipe, elsewhere)) for name, recipe in entries]


def without_ranges(recipe: Recipe, paths: Collection[str]) -> Recipe:
    """The recipe without the ranges at these paths that its method has no argument for."""
    kept = {path: one for path, one in _given(recipe).items() if path not in paths or has_argument(recipe, path)}
    if recipe.tune is None or kept == recipe.tune.space:
        return recipe
    return recipe.model_copy(update={"tune": recipe.tune.model_copy(update={"space": kept})})


def has_argument(recipe: Recipe, path: str) -> bool:
    """Whether the algorithm of a one-algorithm recipe has the argument at a path.

    >>> [has_argument(parse({"algorithm": {"name": name}}), "algorithm.mu") for name in ("fedprox", "fedavg")]
    [True, False]
    """
    table, _, name = path.partition(".")
    if table not in TABLES or (table != "algorithm" and getattr(recipe, table) is None):
        return False
    local = {one.name for one in fields(LocalTraining)} if table == "algorithm" else set()
    return name in {*inspect.signature(_maker(recipe, table)).parameters, *local}


def _given(recipe: Recipe) -> Mapping[str, Any]:
    return recipe.tune.space if recipe.tune else {}


def _check_table(path: str) -> None:
    """Refuse what is not a setting of the method: with other data, seeds or rounds scores could not be compared, and
    an entry that became another method would have been searched in the ranges of the first."""
    if path.partition(".")[0] not in TABLES:
        raise SpecError(
            f"tune.space.{path}: only settings of the method can be searched, in {', '.join(TABLES)}: trials with "
            "other data, seeds or rounds could not be compared"
        )
    if path == "algorithm.name":
        raise SpecError(
            f"tune.space.{path}: a search is for the settings of one method: name the others in [[compare]], where "
            "each has a search of its own"
        )


def _method_space(recipe: Recipe, algorithm: Algorithm) -> Space:
    """The arguments of a published method, as far as a part of it that is still its own declares them."""
    if recipe.algorithm.name is None and all((recipe.solver, recipe.weighting, recipe.server)):
        return {}
    name = recipe.algorithm.name or "fedavg"
    declared = _declared(recipe, algorithm, name)
    arguments = [*inspect.signature(registry.find("algorithm", name)).parameters, "lr"]
    return {f"algorithm.{one}": declared[one] for one in arguments if one in declared}


def _declared(recipe: Recipe, algorithm: Algorithm, name: str) -> dict[str, Range]:
    """What the parts of a method declare, by the names of the method's arguments."""
    found: dict[str, Range] = {}
    for category in ("server", "weighting", "solver"):
        if getattr(recipe, category) is None:
            ranges = {**registry.search_of(category, name), **_of_rule(category, getattr(algorithm, category))}
            found |= {_ARGUMENTS.get((category, one), one): where for one, where in ranges.items()}
    return found


def _of_rule(category: str, rule: Any) -> dict[str, Range]:
    """The ranges of a rule; those of local training are the same for all solvers."""
    try:
        ranges = dict(registry.search_of(category, registry.name_of(category, type(rule))))
    except FedalloyError:
        ranges = {}
    local = rule.solver if isinstance(rule, Personal) else rule
    if isinstance(local, LocalTraining):
        ranges["lr"] = SEARCH if local.optimizer == "sgd" else SEARCH_SCALED
    return ranges


def _of_table(category: str, table: RuleTable, rule: Any) -> dict[str, Range]:
    """The ranges of the rule that a table names, which may be a function that makes another rule."""
    return {**_of_rule(category, rule), **registry.search_of(category, table.kind)}


def _parts_space(recipe: Recipe, algorithm: Algorithm) -> Space:
    """The arguments of the parts that the recipe gives itself."""
    return {
        f"{category}.{name}": where
        for category in ("solver", "weighting", "server")
        if getattr(recipe, category) is not None
        for name, where in _of_table(category, getattr(recipe, category), getattr(algorithm, category)).items()
    }


def _settable(recipe: Recipe, path: str, where: Range | Choice) -> bool:
    """Whether the recipe accepts the ends of a declared range (a wrapped solver has no step size of its own)."""
    try:
        _check(recipe, path, where)
    except SpecError:
        return False
    return True


def _check(recipe: Recipe, path: str, where: Range | Choice) -> None:
    """Refuse a path or an end of its range that no run could use, and a path that changes nothing."""
    ends = where.values if isinstance(where, Choice) else (where.value(where.low), where.value(where.high))
    if len({repr(algorithm_of(changed(recipe, {path: value}))) for value in ends}) == 1:
        own = [f"{table}.{path.partition('.')[2]}" for table in TABLES[1:]]
        instead = " or ".join(one for one in own if has_argument(recipe, one))
        why = f": the recipe gives that part of the method itself, so write {instead}" if instead else ""
        raise SpecError(f"tune.space.{path} would change nothing{why}")


def changed(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """The recipe with other settings."""
    return parse(merge(recipe.model_dump(exclude_none=True), settings), "tune") if settings else recipe


def present(recipe: Recipe, space: Space) -> dict[str, Any]:
    """The recipe's own values of what is searched, or the defaults of its rules; of a choice the value's place. Those
    outside their range are left out."""
    tables = recipe.model_dump(exclude_none=True)
    found: dict[str, Any] = {}
    for path, where in space.items():
        table, _, name = path.partition(".")
        value = (tables.get(table) or {}).get(name, _default(recipe, table, name))
        if isinstance(where, Choice):
            found |= {path: where.values.index(value)} if value in where.values else {}
        elif isinstance(value, int | float) and value in where:
            found[path] = value
    return found


def _default(recipe: Recipe, table: str, name: str) -> Any:
    """The default of a rule's argument; of local training's where the rule passes it on."""
    known = inspect.signature(_maker(recipe, table)).parameters
    return known[name].default if name in known else getattr(LocalTraining, name, None)


def _maker(recipe: Recipe, table: str) -> Callable[..., Any]:
    """The function or class that takes the arguments of a table."""
    kind = recipe.algorithm.name or "fedavg" if table == "algorithm" else getattr(recipe, table).kind
    return registry.find(table, kind)
