"""The registry of rules: names, categories, discovery, plug-ins.

A rule is registered by decorating its class (or, for models and algorithms, its function):

    @register("weighting", "uniform")
    @dataclass(frozen=True)
    class Uniform(Weighting): ...

Built-in rules are found by importing all modules of their category's package, except those whose names start with
``_``. Other packages publish theirs through the entry-point group ``fedalloy.rules`` (each entry names a module to
import).

If a rule's name is not that of the published method, the method's name is an alias:

    @register("weighting", "uniform", aliases=("fedmethod",))

A metric also declares its direction, which is decided nowhere else in the library:

    @register("metric", "perplexity", higher_is_better=False)
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

from fedalloy.core.arguments import guard
from fedalloy.core.errors import RegistryError, nearest
from fedalloy.core.search import Range

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
    "loss": "fedalloy.tasks.losses",
    "metric": "fedalloy.tasks.metrics",
    "engine": "fedalloy.engines",
    "tracker": "fedalloy.results.track",
    "conform": "fedalloy.testing.vectors",
}

_HIGHER = {"engine": {"flower": "fedalloy.flower.engine"}}
"""Rules in higher packages than their category: the module of each, imported when the rule is requested."""

_ALIASED = ("solver", "weighting", "server", "wire")
_UNGUARDED = frozenset({"conform"})
_SETTINGS = {"algorithm": ("fedalloy.methods.solvers.training", "LocalTraining")}
"""The class whose fields the ``**`` argument of a category's functions accepts."""

_rules: dict[str, dict[str, Callable[..., Any]]] = {category: {} for category in CATEGORIES}
_aliases: dict[str, dict[str, str]] = {category: {} for category in CATEGORIES}
_loaded: set[str] = set()
_directions: dict[str, bool | None] = {}
_searches: dict[str, dict[str, Mapping[str, Range]]] = {category: {} for category in CATEGORIES}


def register(
    category: str,
    name: str,
    *,
    aliases: Sequence[str] = (),
    higher_is_better: bool | Literal["unsaid"] | None = "unsaid",
    search: Mapping[str, Range] | None = None,
) -> Callable[[Rule], Rule]:
    """Register a rule under ``name``; a second rule of the same name is refused. Its arguments are checked from then on
    (:mod:`fedalloy.core.arguments`). ``aliases`` find the rule too, but records and specs use its name.

    A metric declares its direction: ``higher_is_better`` is True, False, or None for a number without a direction
    (a count). Such a metric is recorded, but cannot be used for tuning, targets or early stopping. ``search`` has the
    ranges of those arguments that are worth tuning (:mod:`fedalloy.core.search`).
    """
    _check_direction(category, name, higher_is_better)
    _check_aliases(category, name, aliases)

    def enter(rule: Rule) -> Rule:
        rules = _category(category)
        taken = rules.get(name)
        if taken is not None and not _same_source(taken, rule):
            raise RegistryError(
                f"{category} '{name}' is taken by {taken.__module__}.{taken.__qualname__}; "
                f"choose another name for {rule.__module__}.{rule.__qualname__}"
            )
        rules[name] = (
            rule if category in _UNGUARDED else guard(rule, f"{category} '{name}'", lambda: settings_of(category))
        )
        _aliases[category].update(dict.fromkeys(aliases, name))
        _searches[category][name] = search or {}
        if higher_is_better != "unsaid":
            _directions[name] = higher_is_better
        return cast(Rule, rules[name])

    return enter


def settings_of(category: str) -> type | None:
    """The dataclass whose fields the functions of a category accept through ``**``; None if there is none."""
    if category not in _SETTINGS:
        return None
    module, name = _SETTINGS[category]
    return cast(type, getattr(load(module), name))


def find(category: str, name: str) -> Callable[..., Any]:
    """The rule registered under ``name`` or an alias, or an error that lists the known names."""
    rules = _own(category)
    name = canonical(category, name)
    if name not in rules and name in _HIGHER.get(category, {}):
        importlib.import_module(_HIGHER[category][name])
    if name not in rules:
        raise RegistryError(f"unknown {category} '{name}': {nearest(name, [*names(category), *_aliases[category]])}")
    return rules[name]


def direction(metric: str) -> bool | None:
    """Whether a higher value of a metric is better, as registered; None if it has no direction or is unknown."""
    everything("metric")
    return _directions.get(metric)


def search_of(category: str, name: str) -> Mapping[str, Range]:
    """The ranges that a rule declares for its arguments, by argument; none for an unknown rule."""
    return _searches[category].get(canonical(category, name), {})


def canonical(category: str, name: str) -> str:
    """The registered name of a rule, given that name or an alias; other names are returned unchanged. A rule that is
    registered under what is an alias of another one goes first."""
    return name if name in _own(category) else _aliases[category].get(name, name)


def knows(category: str, name: str) -> bool:
    """Whether a rule has this name or alias."""
    return canonical(category, name) in names(category)


def aliases_of(category: str, name: str) -> list[str]:
    """Other names of a rule, sorted."""
    rules = _own(category)
    return sorted(alias for alias, known in _aliases[category].items() if known == name and alias not in rules)


def names(category: str) -> list[str]:
    """All names of a category, sorted."""
    return sorted({*_own(category), *_HIGHER.get(category, {})})


def everything(category: str) -> dict[str, Callable[..., Any]]:
    """All rules of a category: built-in ones, plug-ins, and those of higher packages."""
    return {name: find(category, name) for name in names(category)}


def _own(category: str) -> dict[str, Callable[..., Any]]:
    """The rules of a category with plug-ins; the category's modules are imported on first use."""
    rules = _category(category)
    if category not in _loaded:
        _loaded.add(category)
        try:
            _import_tree(CATEGORIES[category])
            _import_plugins()
        except BaseException:
            _loaded.discard(category)  # a partly imported category would look complete the next time
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


def _check_aliases(category: str, name: str, aliases: Sequence[str]) -> None:
    if isinstance(aliases, str):
        raise RegistryError(f"{category} '{name}': aliases are a list of names, got '{aliases}'")
    if aliases and category not in _ALIASED:
        raise RegistryError(f"{category} '{name}': only rules of {', '.join(_ALIASED)} have aliases")
    for alias in aliases:
        owner = _aliases[category].get(alias, name)
        if owner != name or alias == name:
            raise RegistryError(f"{category} '{name}': '{alias}' is a name of '{owner}' already; choose another alias")


def _check_direction(category: str, name: str, said: object) -> None:
    if category != "metric":
        if said != "unsaid":
            raise RegistryError(f"{category} '{name}': only a metric has a direction; leave higher_is_better out")
    elif said == "unsaid":
        raise RegistryError(
            f"metric '{name}' does not declare its direction: register it with higher_is_better=True (like accuracy), "
            "False (like a loss) or None (no direction, like a count: not usable for tuning, targets or early stopping)"
        )
    elif said is not None and not isinstance(said, bool):
        raise RegistryError(f"metric '{name}': higher_is_better is {said!r}; allowed are True, False and None")


def _category(category: str) -> dict[str, Callable[..., Any]]:
    if category not in _rules:
        raise RegistryError(f"unknown category '{category}': {nearest(category, CATEGORIES)}")
    return _rules[category]


def _same_source(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """Whether two rules are the same one, because a module imported again (reload, spawn) may replace its rules."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def load(module: str) -> ModuleType:
    """Import a module whose name is only known at run time: a category's, a user's, an optional library's; and what
    shows results, which stands above them (:mod:`fedalloy.core.showing`). Nothing else is imported this way, so that
    import statements show which package depends on which."""
    return importlib.import_module(module)


def _import_tree(package: str) -> None:
    module = load(package)
    for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
        if not found.name.startswith("_"):
            load(f"{package}.{found.name}")


def _import_plugins() -> None:
    for point in _plugins(entry_points):
        point.load()


@lru_cache(1)
def _plugins(find: Callable[..., Any]) -> tuple[Any, ...]:
    """The published modules. Asked for once: finding them reads every installed distribution."""
    return tuple(find(group="fedalloy.rules"))
