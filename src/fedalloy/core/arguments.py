"""The one place where arguments of rules are checked, whether they come from a recipe, a message or a Python call.

Every registered rule and every class of settings is guarded: names, types, choices and finite numbers are checked
before its own ``__post_init__`` checks ranges, and every error is a ``SpecError``.

>>> from fedalloy.methods.solvers.sgd import Sgd
>>> Sgd(learning_rate=0.1)
Traceback (most recent call last):
fedalloy.core.errors.SpecError: solver 'sgd': unknown argument 'learning_rate'; did you mean 'lr'? ...
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.protocols import LocalSolver, ServerOptimizer, Weighting, Wire

Guarded = TypeVar("Guarded", bound=Callable[..., Any])
Kind = TypeVar("Kind", bound=type)
Settings = Callable[[], type | None]

CATEGORY_OF: dict[type, str] = {LocalSolver: "solver", Weighting: "weighting", ServerOptimizer: "server", Wire: "wire"}


def checked(where: str) -> Callable[[Kind], Kind]:
    """Guard a class of settings that is not registered; its error messages start with ``where``."""
    return lambda kind: guard(kind, where)


def guard(rule: Guarded, where: str, extra: Settings = lambda: None) -> Guarded:
    """The same rule with checked arguments. A class stays the same object; classes that are not dataclasses are not
    guarded, because their arguments are unknown. ``extra`` is as in ``build``, but called lazily.
    """
    if not inspect.isclass(rule):
        return typing.cast(Guarded, _guarded_function(rule, where, extra))
    own = vars(rule).get("__init__")
    if own is not None and dataclasses.is_dataclass(rule) and not hasattr(own, "__wrapped__"):
        type.__setattr__(rule, "__init__", _guarded_init(rule, own, where))
    return rule


def build(rule: Any, arguments: Mapping[str, Any], where: str, extra: type | None = None) -> Any:
    """Call a dataclass or function with checked arguments; ``extra`` is a dataclass whose fields a function
    accepts through its ``**`` argument."""
    values = accepted(rule, arguments, where, extra)
    try:
        return rule(**values)
    except (TypeError, ValueError) as error:
        raise _named(where, error) from error


def accepted(rule: Any, arguments: Mapping[str, Any], where: str, extra: type | None = None) -> dict[str, Any]:
    """Named arguments converted to the types that a rule declares, or an error that names what is allowed."""
    hints = {**(_hints(extra) if extra else {}), **_hints(rule)}
    open_ended = extra is None and _takes_anything(rule)
    for name in arguments:
        if name not in hints and not open_ended:
            raise SpecError(f"{where}: unknown argument '{name}'; {nearest(name, hints)}")
    needed = _needed(rule)
    missing = next((name for name in needed if name not in arguments), None)
    if missing is not None:
        raise SpecError(f"{where}: '{missing}' is missing; needed: {', '.join(needed)}")
    return {name: convert(value, hints.get(name, Any), f"{where}.{name}") for name, value in arguments.items()}


def convert(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the hinted type, or an error that names what is allowed."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, options, where)
    if origin is Literal:
        if value not in options or isinstance(value, bool) is not isinstance(options[0], bool):
            raise SpecError(f"{where}: {value!r} is not allowed; {nearest(str(value), map(str, options))}")
        return value
    if origin in (tuple, list):
        return _convert_sequence(value, origin, options, where)
    if origin is dict:
        return _convert_plain(value, dict, where)
    if isinstance(hint, type) and hint in CATEGORY_OF:
        return value if isinstance(value, hint) else _nested(CATEGORY_OF[hint], value, where)
    return _convert_plain(value, hint, where)


def _guarded_init(kind: type, plain: Callable[..., None], where: str) -> Callable[..., None]:
    @functools.wraps(plain)
    def init(self: Any, *given: Any, **named: Any) -> None:
        names = [field.name for field in dataclasses.fields(kind) if field.init and not field.kw_only]
        values = accepted(kind, _by_name(names, given, named, where), where)
        try:
            plain(self, **values)
        except (TypeError, ValueError) as error:
            raise _named(where, error) from error

    return init


def _guarded_function(plain: Callable[..., Any], where: str, extra: Settings) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(*given: Any, **named: Any) -> Any:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [one.name for one in inspect.signature(plain).parameters.values() if one.kind in kinds]
        values = accepted(plain, _by_name(names, given, named, where), where, extra())
        try:
            return plain(**values)
        except (TypeError, ValueError) as error:
            raise _named(where, error) from error

    return call


def _by_name(names: list[str], given: tuple[Any, ...], named: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Positional and named arguments, all by name."""
    if len(given) > len(names):
        taken = f"{len(names)} ({', '.join(names)})" if names else "none"
        raise SpecError(f"{where}: {len(given)} arguments are given by place, allowed: {taken}; give the rest by name")
    placed = dict(zip(names, given, strict=False))
    twice = next((name for name in placed if name in named), None)
    if twice is not None:
        raise SpecError(f"{where}: '{twice}' is given twice, by place and by name; give it once")
    return {**placed, **named}


def _named(where: str, error: Exception) -> SpecError:
    """An error of the rule itself, with the rule's name in front."""
    return error if isinstance(error, SpecError) else SpecError(f"{where}: {error}")


def _nested(category: str, value: Any, where: str) -> Any:
    from fedalloy.core.spec import from_spec  # imports this module

    return from_spec(category, value, where)


def _convert_union(value: Any, options: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in options:
        return None
    problems = []
    for option in options:
        if option is type(None):
            continue
        try:
            return convert(value, option, where)
        except SpecError as error:
            problems.append(str(error).removeprefix(f"{where}: "))
    raise SpecError(f"{where}: " + "; or ".join(dict.fromkeys(problems)))


def _convert_sequence(value: Any, origin: Any, options: tuple[Any, ...], where: str) -> Any:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise SpecError(f"{where}: expected a list, got {value!r}")
    if origin is tuple and options and options[-1] is not Ellipsis:
        if len(value) != len(options):
            raise SpecError(f"{where}: expected {len(options)} values, got {len(value)}")
        return tuple(convert(one, options[i], f"{where}[{i}]") for i, one in enumerate(value))
    inner = options[0] if options else Any
    return origin(convert(one, inner, f"{where}[{i}]") for i, one in enumerate(value))


def _convert_plain(value: Any, hint: Any, where: str) -> Any:
    if hint is Any or not isinstance(hint, type):
        return value
    if hint in (int, float):
        return _convert_number(value, hint, where)
    if _is_instance(value, hint):
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, where)
    raise SpecError(f"{where}: expected {_words(hint)}, got {value!r}")


def _convert_number(value: Any, hint: type, where: str) -> int | float:
    """A plain number, also from number types of other libraries; booleans, infinity and NaN are refused."""
    if isinstance(value, bool) or not isinstance(value, Integral if hint is int else Real):
        raise SpecError(f"{where}: expected {_words(hint)}, got {value!r}")
    try:
        plain: int | float = hint(value)
        finite = math.isfinite(plain) if hint is float else True
    except (OverflowError, ValueError):  # more than a float can hold
        finite = False
    if not finite:
        raise SpecError(f"{where}: expected a finite number, got {_brief(value)}")
    return plain


def _brief(value: Any) -> str:
    """A value for an error message; Python refuses to print integers of thousands of digits."""
    return repr(value) if not isinstance(value, int) or value.bit_length() < 256 else "a number of hundreds of digits"


def _is_instance(value: Any, hint: type) -> bool:
    try:
        return isinstance(value, hint)
    except TypeError:  # a protocol that is not runtime-checkable
        return True


def _words(hint: type) -> str:
    known = {float: "a number", int: "a whole number", bool: "true or false", str: "text", dict: "a table"}
    if dataclasses.is_dataclass(hint):
        return f"a {hint.__name__} (or a table of {', '.join(_hints(hint))})"
    if inspect.isabstract(hint):
        return f"an object of a class that inherits from {hint.__module__}.{hint.__name__}"
    return known.get(hint, f"a {hint.__name__}")


@functools.cache
def _hints(rule: Any) -> dict[str, Any]:
    """Argument names and resolved types of a dataclass or function."""
    hints = typing.get_type_hints(rule if dataclasses.is_dataclass(rule) else inspect.unwrap(rule))
    if dataclasses.is_dataclass(rule):
        return {field.name: hints[field.name] for field in dataclasses.fields(rule) if field.init}
    named = inspect.signature(rule).parameters.values()
    return {one.name: hints.get(one.name, Any) for one in named if one.kind is not one.VAR_KEYWORD}


@functools.cache
def _needed(rule: Any) -> list[str]:
    """The arguments that have no default."""
    if dataclasses.is_dataclass(rule):
        every = (one for one in dataclasses.fields(rule) if one.init)
        return [one.name for one in every if one.default is one.default_factory is dataclasses.MISSING]
    named = inspect.signature(rule).parameters.values()
    open_ended = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    return [one.name for one in named if one.default is one.empty and one.kind not in open_ended]


def _takes_anything(rule: Any) -> bool:
    """Whether a function has a ``**`` argument."""
    if inspect.isclass(rule):
        return False
    return any(one.kind is one.VAR_KEYWORD for one in inspect.signature(rule).parameters.values())
