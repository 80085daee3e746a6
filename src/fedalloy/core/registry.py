"""The one place that knows which rules exist: names, categories, discovery, plug-ins.

A rule enters by decorating its class (or, for models and algorithms, its function):

    @register("weighting", "uniform")
    @dataclass(frozen=True)
    class Uniform(Weighting): ...

Built-in rules are found by walking their category's package (modules whose names begin with ``_`` hold none). Other
packages publish theirs through the entry-point group ``fedalloy.rules`` (each entry names a module to import).

A rule whose name is not that of the method it comes from has the method's name as an alias:

    @register("weighting", "uniform", aliases=("fedmethod",))

A metric also says which way is better, and nothing else in the library decides it:

    @register("metric", "perplexity", higher_is_better=False)
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

from fedalloy.core.arguments import guard
from fedalloy.core.errors import RegistryError, nearest

Rule = TypeVar("Rule", bound=Callable[..., Any])

CATEGORIES: dict[str, str] = {
    "solver": "fedalloy.methods.solvers",
    "weighting": "fedalloy.methods.weightings",
    "server": "fedalloy.methods.servers",
    "wire": "fedalloy.methods.wires",
    "algorithm": "fedalloy.methods.published",
    "dataset": "fedalloy.tasks.datasets",
    "partition": "fedalloy.tasks.partitions",
    "model": "fedalloy.tasks.models",
    "metric": "fedalloy.tasks.metrics",
    "engine": "fedalloy.engines",
    "tracker": "fedalloy.results.track",
    "conform": "fedalloy.testing.vectors",
}

_HIGHER = {"engine": {"flower": "fedalloy.flower.engine"}}
"""Rules that stand in higher packages than their category: the module of each, imported when the rule is asked for."""

_UNGUARDED = frozenset({"conform"})
_SETTINGS = {"algorithm": ("fedalloy.methods.solvers.training", "LocalTraining")}
"""What the ``**`` argument of a category's functions stands for."""

_rules: dict[str, dict[str, Callable[..., Any]]] = {category: {} for category in CATEGORIES}
_aliases: dict[str, dict[str, str]] = {category: {} for category in CATEGORIES}
_loaded: set[str] = set()
_directions: dict[str, bool | None] = {}


def register(
    category: str,
    name: str,
    *,
    aliases: Sequence[str] = (),
    higher_is_better: bool | Literal["unsaid"] | None = "unsaid",
) -> Callable[[Rule], Rule]:
    """Enter a rule under ``name``; a second rule of the same name is refused. From then on it checks its arguments
    (:mod:`fedalloy.core.arguments`). It is found by its ``aliases`` too, but known by its name.

    A metric says which way is better: ``higher_is_better`` is True, False, or None for a number that has no direction
    (a count). Such a metric is recorded, but nothing is tuned on it, no target is set for it and no run waits for it.
    """
    _check_direction(category, name, higher_is_better)

    def enter(rule: Rule) -> Rule:
        rules = _category(category)
        _enter_aliases(category, name, aliases)
        taken = rules.get(name) or rules.get(_aliases[category].get(name, ""))
        if taken is not None and not _same_source(taken, rule):
            raise RegistryError(
                f"{category} '{name}' is taken by {taken.__module__}.{taken.__qualname__}; "
                f"choose another name for {rule.__module__}.{rule.__qualname__}"
            )
        rules[name] = (
            rule if category in _UNGUARDED else guard(rule, f"{category} '{name}'", lambda: settings_of(category))
        )
        if higher_is_better != "unsaid":
            _directions[name] = higher_is_better
        return cast(Rule, rules[name])

    return enter


def settings_of(category: str) -> type | None:
    """The dataclass whose fields the functions of a category hand on, where they take more than they name."""
    if category not in _SETTINGS:
        return None
    module, name = _SETTINGS[category]
    return cast(type, getattr(load(module), name))


def find(category: str, name: str) -> Callable[..., Any]:
    """The rule registered under ``name`` or an alias, or an error that lists what there is."""
    rules = _own(category)
    name = canonical(category, name)
    if name not in rules and name in _HIGHER.get(category, {}):
        importlib.import_module(_HIGHER[category][name])
    if name not in rules:
        raise RegistryError(f"unknown {category} '{name}': {nearest(name, names(category))}")
    return rules[name]


def direction(metric: str) -> bool | None:
    """Whether more of a metric is better, as it was registered; None where it has no direction or nobody knows it."""
    everything("metric")
    return _directions.get(metric)


def canonical(category: str, name: str) -> str:
    """The name under which a rule is registered, given that name or an alias; any other name as it is."""
    _own(category)
    return _aliases[category].get(name, name)


def knows(category: str, name: str) -> bool:
    """Whether a rule has this name or alias."""
    return canonical(category, name) in names(category)


def aliases_of(category: str, name: str) -> list[str]:
    """Other names of a rule, sorted."""
    _own(category)
    return sorted(alias for alias, known in _aliases[category].items() if known == name)


def names(category: str) -> list[str]:
    """All names of a category, sorted."""
    return sorted({*_own(category), *_HIGHER.get(category, {})})


def everything(category: str) -> dict[str, Callable[..., Any]]:
    """All rules of a category, built in and plugged in, those of higher packages among them."""
    return {name: find(category, name) for name in names(category)}


def _own(category: str) -> dict[str, Callable[..., Any]]:
    """The rules of a category and those that are plugged in; its modules are imported on first use."""
    rules = _category(category)
    if category not in _loaded:
        _loaded.add(category)
        try:
            _import_tree(CATEGORIES[category])
            _import_plugins()
        except BaseException:
            _loaded.discard(category)  # a category that is half there would look complete the next time
            raise
    return rules


def name_of(category: str, rule: Callable[..., Any]) -> str:
    """The name under which a rule's class was registered."""
    for name, known in _category(category).items():
        if known is rule:
            return name
    raise RegistryError(
        f"{rule.__module__}.{rule.__qualname__} is not a registered {category}: decorate it with @register"
    )


def _enter_aliases(category: str, name: str, aliases: Sequence[str]) -> None:
    known = _aliases[category]
    for alias in aliases:
        if known.get(alias, name) != name or alias in _rules[category]:
            raise RegistryError(f"{category} '{name}': the alias '{alias}' is taken; choose another")
    known.update(dict.fromkeys(aliases, name))


def _check_direction(category: str, name: str, said: object) -> None:
    if category != "metric":
        if said != "unsaid":
            raise RegistryError(f"{category} '{name}': only a metric has a direction; leave higher_is_better out")
    elif said == "unsaid":
        raise RegistryError(
            f"metric '{name}' does not say which way is better: register it with higher_is_better=True (as accuracy), "
            "False (as a loss) or None (no direction, as a count: it cannot be tuned on, targeted or waited for)"
        )
    elif said is not None and not isinstance(said, bool):
        raise RegistryError(f"metric '{name}': higher_is_better is {said!r}; allowed are True, False and None")


def _category(category: str) -> dict[str, Callable[..., Any]]:
    if category not in _rules:
        raise RegistryError(f"unknown category '{category}': {nearest(category, CATEGORIES)}")
    return _rules[category]


def _same_source(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """A module that is imported again (reload, spawn) may replace its own rules."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def load(module: str) -> ModuleType:
    """A module whose name is only known at run time: a category's, a user's, an optional library's. Nothing else is
    imported this way, so import statements show which package builds on which."""
    return importlib.import_module(module)


def _import_tree(package: str) -> None:
    module = load(package)
    for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
        if not found.name.startswith("_"):
            load(f"{package}.{found.name}")


def _import_plugins() -> None:
    for point in entry_points(group="fedalloy.rules"):
        point.load()
