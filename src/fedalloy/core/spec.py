"""Rules as data: a rule to and from JSON, with errors that name the field and what is allowed.

A rule's spec is its fields plus ``kind``, the name it is registered under:

>>> from fedalloy.core.spec import to_spec
>>> from fedalloy.weightings.samples import Samples
>>> to_spec("weighting", Samples())
{'kind': 'samples'}
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import FedalloyError, SpecError, nearest
from fedalloy.core.protocols import LocalSolver, ServerOptimizer, Weighting, Wire

Spec = dict[str, Any]

_ROOM_OF: dict[type, str] = {LocalSolver: "solver", Weighting: "weighting", ServerOptimizer: "server", Wire: "wire"}


def to_spec(room: str, rule: Any) -> Spec:
    """The JSON form of a rule: its kind and every field that differs from its default."""
    spec: Spec = {"kind": registry.name_of(room, type(rule))}
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if value != _default(field):
            spec[field.name] = _plain(value)
    return spec


def from_spec(room: str, spec: Mapping[str, Any] | str, where: str = "") -> Any:
    """The rule a spec describes; a bare string means a rule with its defaults."""
    where = where or room
    if isinstance(spec, str):
        spec = {"kind": spec}
    if not isinstance(spec, Mapping) or not isinstance(spec.get("kind"), str):
        raise SpecError(f"{where}: needs a 'kind'; {nearest('', registry.names(room))}")
    try:
        rule = registry.find(room, spec["kind"])
    except FedalloyError as error:
        raise SpecError(f"{where}.kind: {error}") from None
    arguments = {name: value for name, value in spec.items() if name != "kind"}
    return build(rule, arguments, f"{where} '{spec['kind']}'")


def build(rule: Any, arguments: Mapping[str, Any], where: str, extra: type | None = None) -> Any:
    """Call a dataclass or function with checked arguments; ``extra`` is a dataclass whose fields a function
    accepts through its ``**`` argument."""
    hints = {**(_arguments(extra) if extra else {}), **_arguments(rule)}
    for name in arguments:
        if name not in hints:
            raise SpecError(f"{where}: unknown argument '{name}'; {nearest(name, hints)}")
    values = {name: convert(value, hints[name], f"{where}.{name}") for name, value in arguments.items()}
    try:
        return rule(**values)
    except (TypeError, ValueError) as error:
        raise SpecError(f"{where}: {error}") from error


def algorithm_to_spec(algorithm: Algorithm) -> Spec:
    """The JSON form of a whole algorithm."""
    spec: Spec = {
        "solver": to_spec("solver", algorithm.solver),
        "weighting": to_spec("weighting", algorithm.weighting),
        "server": to_spec("server", algorithm.server),
    }
    if algorithm.wire:
        spec["wire"] = [to_spec("wire", wire) for wire in algorithm.wire]
    if algorithm.on_failure:
        spec["on_failure"] = algorithm.on_failure
    return spec


def algorithm_from_spec(spec: Mapping[str, Any]) -> Algorithm:
    """The algorithm a spec describes."""
    allowed = {"solver", "weighting", "server", "wire", "on_failure"}
    for name in spec:
        if name not in allowed:
            raise SpecError(f"algorithm: unknown part '{name}'; {nearest(name, allowed)}")
    for name in ("solver", "weighting", "server"):
        if name not in spec:
            raise SpecError(f"algorithm: the part '{name}' is missing; {nearest('', registry.names(name))}")
    wire = tuple(from_spec("wire", one, f"wire[{i}]") for i, one in enumerate(spec.get("wire", ())))
    return Algorithm(
        from_spec("solver", spec["solver"]),
        from_spec("weighting", spec["weighting"]),
        from_spec("server", spec["server"]),
        wire,
        convert(spec.get("on_failure"), Literal["drop", "resend"] | None, "algorithm.on_failure"),
    )


def convert(value: Any, hint: Any, where: str) -> Any:
    """``value`` as the hinted type, or an error that says what would be right."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return _convert_union(value, options, where)
    if origin is Literal:
        if value not in options:
            raise SpecError(f"{where}: {value!r} is not allowed; {nearest(str(value), map(str, options))}")
        return value
    if origin in (tuple, list):
        return _convert_sequence(value, origin, options, where)
    if isinstance(hint, type) and hint in _ROOM_OF:
        return value if isinstance(value, hint) else from_spec(_ROOM_OF[hint], value, where)
    return _convert_plain(value, hint, where)


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
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and not (isinstance(value, bool) and hint is not bool):
        return value
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, where)
    raise SpecError(f"{where}: expected {_words(hint)}, got {value!r}")


def _words(hint: type) -> str:
    known = {float: "a number", int: "a whole number", bool: "true or false", str: "text"}
    return known.get(hint, f"a {hint.__name__}")


def _arguments(rule: Any) -> dict[str, Any]:
    """Argument names and resolved types of a dataclass or function."""
    hints = typing.get_type_hints(rule if dataclasses.is_dataclass(rule) else inspect.unwrap(rule))
    if dataclasses.is_dataclass(rule):
        return {field.name: hints[field.name] for field in dataclasses.fields(rule) if field.init}
    named = inspect.signature(rule).parameters.values()
    return {one.name: hints.get(one.name, Any) for one in named if one.kind is not one.VAR_KEYWORD}


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _plain(value: Any) -> Any:
    """Tuples become lists and nested rules their specs, so that the result is plain JSON."""
    for kind, room in _ROOM_OF.items():
        if isinstance(value, kind):
            return to_spec(room, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
