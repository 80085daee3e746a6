"""Rules as data: a rule to and from JSON, with errors that name the field and what is allowed.

A rule's spec is its fields plus ``kind``, the name it is registered under:

>>> from fedalloy.core.spec import to_spec
>>> from fedalloy.methods.weightings.samples import Samples
>>> to_spec("weighting", Samples())
{'kind': 'samples'}
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.arguments import CATEGORY_OF, build, convert
from fedalloy.core.errors import FedalloyError, SpecError, nearest

Spec = dict[str, Any]


def to_spec(category: str, rule: Any) -> Spec:
    """The JSON form of a rule: its kind and every field that differs from its default."""
    spec: Spec = {"kind": registry.name_of(category, type(rule))}
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if value != _default(field):
            spec[field.name] = _plain(value)
    return spec


def from_spec(category: str, spec: Mapping[str, Any] | str, where: str = "") -> Any:
    """The rule a spec describes; a bare string means a rule with its defaults."""
    where = where or category
    if isinstance(spec, str):
        spec = {"kind": spec}
    if not isinstance(spec, Mapping) or not isinstance(spec.get("kind"), str):
        raise SpecError(f"{where}: needs a 'kind'; {nearest('', registry.names(category))}")
    try:
        rule = registry.find(category, spec["kind"])
    except FedalloyError as error:
        raise SpecError(f"{where}.kind: {error}") from None
    arguments = {name: value for name, value in spec.items() if name != "kind"}
    return build(rule, arguments, f"{where} '{spec['kind']}'")


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


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _plain(value: Any) -> Any:
    """Tuples become lists and nested rules their specs, so that the result is plain JSON."""
    for kind, category in CATEGORY_OF.items():
        if isinstance(value, kind):
            return to_spec(category, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return value
