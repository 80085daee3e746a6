"""The one place that knows which rules exist: names, rooms, discovery, plug-ins.

A rule enters by decorating its class (or, for models and algorithms, its function):

    @register("weighting", "uniform")
    @dataclass(frozen=True)
    class Uniform(Weighting): ...

Built-in rules are found by walking their room (modules whose names begin with ``_`` hold none); other packages publish
theirs through the entry-point group ``fedalloy.rules`` (each entry names a module to import).

A metric also says which way is better, and nothing else in the library decides it:

    @register("metric", "perplexity", higher_is_better=False)
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, Literal, TypeVar, cast

from fedalloy.core.arguments import guard
from fedalloy.core.errors import RegistryError, nearest

Rule = TypeVar("Rule", bound=Callable[..., Any])

ROOMS: dict[str, str] = {
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
"""Rules that stand in higher packages than their room: the module of each, imported when the rule is asked for."""

_UNGUARDED = frozenset({"conform"})
_SETTINGS = {"algorithm": ("fedalloy.methods.solvers.training", "LocalTraining")}
"""What the ``**`` argument of a room's functions stands for."""

_rules: dict[str, dict[str, Callable[..., Any]]] = {room: {} for room in ROOMS}
_loaded: set[str] = set()
_directions: dict[str, bool | None] = {}


def register(
    room: str, name: str, *, higher_is_better: bool | Literal["unsaid"] | None = "unsaid"
) -> Callable[[Rule], Rule]:
    """Enter a rule under ``name``; a second rule of the same name is refused. From then on it checks its arguments
    (:mod:`fedalloy.core.arguments`).

    A metric says which way is better: ``higher_is_better`` is True, False, or None for a number that has no direction
    (a count). Such a metric is recorded, but nothing is tuned on it, no target is set for it and no run waits for it.
    """
    _check_direction(room, name, higher_is_better)

    def enter(rule: Rule) -> Rule:
        rules = _room(room)
        taken = rules.get(name)
        if taken is not None and not _same_source(taken, rule):
            raise RegistryError(
                f"{room} '{name}' is taken by {taken.__module__}.{taken.__qualname__}; "
                f"choose another name for {rule.__module__}.{rule.__qualname__}"
            )
        rules[name] = rule if room in _UNGUARDED else guard(rule, f"{room} '{name}'", lambda: settings_of(room))
        if higher_is_better != "unsaid":
            _directions[name] = higher_is_better
        return cast(Rule, rules[name])

    return enter


def settings_of(room: str) -> type | None:
    """The dataclass whose fields the functions of a room hand on, where they take more than they name."""
    if room not in _SETTINGS:
        return None
    module, name = _SETTINGS[room]
    return cast(type, getattr(load(module), name))


def find(room: str, name: str) -> Callable[..., Any]:
    """The rule registered under ``name``, or an error that lists what there is."""
    rules = _own(room)
    if name not in rules and name in _HIGHER.get(room, {}):
        importlib.import_module(_HIGHER[room][name])
    if name not in rules:
        raise RegistryError(f"unknown {room} '{name}': {nearest(name, names(room))}")
    return rules[name]


def direction(metric: str) -> bool | None:
    """Whether more of a metric is better, as it was registered; None where it has no direction or nobody knows it."""
    everything("metric")
    return _directions.get(metric)


def names(room: str) -> list[str]:
    """All names of a room, sorted."""
    return sorted({*_own(room), *_HIGHER.get(room, {})})


def everything(room: str) -> dict[str, Callable[..., Any]]:
    """All rules of a room, built in and plugged in, those of higher packages among them."""
    return {name: find(room, name) for name in names(room)}


def _own(room: str) -> dict[str, Callable[..., Any]]:
    """The rules of a room and those that are plugged in; its modules are imported on first use."""
    rules = _room(room)
    if room not in _loaded:
        _loaded.add(room)
        try:
            _import_tree(ROOMS[room])
            _import_plugins()
        except BaseException:
            _loaded.discard(room)  # a room that is half there would look complete the next time
            raise
    return rules


def name_of(room: str, rule: Callable[..., Any]) -> str:
    """The name under which a rule's class was registered."""
    for name, known in _room(room).items():
        if known is rule:
            return name
    raise RegistryError(f"{rule.__module__}.{rule.__qualname__} is not a registered {room}: decorate it with @register")


def _check_direction(room: str, name: str, said: object) -> None:
    if room != "metric":
        if said != "unsaid":
            raise RegistryError(f"{room} '{name}': only a metric has a direction; leave higher_is_better out")
    elif said == "unsaid":
        raise RegistryError(
            f"metric '{name}' does not say which way is better: register it with higher_is_better=True (as accuracy), "
            "False (as a loss) or None (no direction, as a count: it cannot be tuned on, targeted or waited for)"
        )
    elif said is not None and not isinstance(said, bool):
        raise RegistryError(f"metric '{name}': higher_is_better is {said!r}; allowed are True, False and None")


def _room(room: str) -> dict[str, Callable[..., Any]]:
    if room not in _rules:
        raise RegistryError(f"unknown room '{room}': {nearest(room, ROOMS)}")
    return _rules[room]


def _same_source(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    """A module that is imported again (reload, spawn) may replace its own rules."""
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def load(module: str) -> ModuleType:
    """A module whose name is only known at run time: of a room, of a user, of a library that not everybody has. Nothing
    else is imported in this way, so that the import statements tell who builds on whom."""
    return importlib.import_module(module)


def _import_tree(package: str) -> None:
    module = load(package)
    for found in pkgutil.iter_modules(getattr(module, "__path__", [])):
        if not found.name.startswith("_"):
            load(f"{package}.{found.name}")


def _import_plugins() -> None:
    for point in entry_points(group="fedalloy.rules"):
        point.load()
