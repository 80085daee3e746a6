"""Builds a model from a name or a dotted path, with its sizes filled in from the data."""

from __future__ import annotations

import difflib
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn

from fedalloy.core import registry
from fedalloy.core.arguments import convert
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.inputs import Shape, is_one_shape
from fedalloy.core.own_code import import_own, own_code


def build(name: str, input_shape: Shape, classes: int, /, **args: Any) -> nn.Module:
    """A registered model, or ``"package.module:function"``, for inputs of this shape.

    Those of ``inputs`` (the number of features), ``input_shape`` and ``classes`` that the factory has parameters for
    and ``args`` does not contain are filled in from the data.

    >>> build("logistic", (8, 8), 10)
    Sequential(
      (flatten): Flatten(start_dim=1, end_dim=-1)
      (output): Linear(in_features=64, out_features=10, bias=True)
    )
    """
    factory = resolve(name)
    if ":" not in name:
        _check_sizes(name, args)
    known = {**sizes_of(input_shape), "classes": classes}
    taken = _arguments(factory)
    if taken is None:
        return _made(name, factory, {**known, **args})
    if unknown := sorted(args.keys() - taken):
        raise SpecError(f"model '{name}' has no argument '{unknown[0]}': {nearest(unknown[0], taken)}")
    filled = {key: value for key, value in known.items() if key in taken}
    return _made(name, factory, {**filled, **args})


@dataclass(frozen=True)
class NamedModel:
    """A factory of a named model with its sizes and settings, which can be told and built again.

    >>> NamedModel("logistic", (4,), 2)()[1]
    Linear(in_features=4, out_features=2, bias=True)
    """

    kind: str
    input_shape: Shape
    outputs: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> nn.Module:
        """The model."""
        return build(self.kind, self.input_shape, self.outputs, **self.settings)

    def told(self) -> dict[str, Any] | None:
        """Plain values; None for a function of somebody's module, which only its own program has."""
        return None if ":" in self.kind or not is_one_shape(self.input_shape) else asdict(self)

    @staticmethod
    def read(told: Mapping[str, Any]) -> NamedModel:
        """What :meth:`told` said. Only registered names are looked up: nothing is imported."""
        kind = told["kind"]
        if not isinstance(kind, str) or kind not in registry.names("model"):
            raise ValueError(f"no model is called {kind!r}")
        return NamedModel(kind, tuple(told["input_shape"]), told["outputs"], checked(kind, told["settings"]))


def checked(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a model, converted to the types its factory declares."""
    hints = typing.get_type_hints(resolve(kind))
    return {name: convert(value, hints.get(name, Any), f"model '{kind}'.{name}") for name, value in settings.items()}


def sizes_of(input_shape: Shape) -> dict[str, Any]:
    """What is filled in about the inputs; several of them have shapes, but no single number of features.

    >>> sizes_of((8, 8)), sizes_of({"words": (5,), "numbers": (3,)})
    ({'inputs': 64, 'input_shape': (8, 8)}, {'input_shape': {'words': (5,), 'numbers': (3,)}})
    """
    count = {"inputs": math.prod(input_shape)} if is_one_shape(input_shape) else {}
    return {**count, "input_shape": input_shape}


def resolve(name: str) -> Callable[..., Any]:
    """The factory behind a registered name or a dotted path."""
    if ":" not in name:
        return registry.find("model", name)
    module, _, function = name.partition(":")
    there = import_own(module, f"model '{name}'", SpecError)
    found = getattr(there, function, None)
    if found is None:
        functions = [public for public in dir(there) if callable(getattr(there, public)) and public[0] != "_"]
        close = difflib.get_close_matches(function, functions, n=5) or functions[:20]  # a library may have hundreds
        raise SpecError(f"model '{name}': module {module} has no function '{function}': {nearest(function, close)}")
    if isinstance(found, nn.Module):
        raise SpecError(
            f"model '{name}' is a built {type(found).__name__}: the seeds of a recipe redraw the model, which "
            "needs several starts, and a model that is already built has one: give the function that builds it"
        )
    if not callable(found):
        raise SpecError(f"model '{name}' is a {type(found).__name__}, not a function that returns an nn.Module")
    factory: Callable[..., Any] = found
    return factory


def _check_sizes(name: str, args: dict[str, Any]) -> None:
    """Refuse sizes below 1: every integer argument of a registered model is a size."""
    for key, value in args.items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise SpecError(f"model '{name}'.{key} must be 1 or more, got {value}")


def _arguments(factory: Callable[..., Any]) -> set[str] | None:
    """The parameter names of a factory; None if it accepts any or has no readable signature."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # some functions written in C have no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL}


def _made(name: str, factory: Callable[..., Any], arguments: dict[str, Any]) -> nn.Module:
    if ":" not in name:
        return _module(name, factory(**arguments))
    with own_code(f"model '{name}'", SpecError):
        built = factory(**arguments)
    return _module(name, built)


def _module(name: str, built: Any) -> nn.Module:
    if not isinstance(built, nn.Module):
        raise SpecError(f"model '{name}' returned a {type(built).__name__}: a factory returns an nn.Module")
    return built
