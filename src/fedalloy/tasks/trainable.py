"""Which leaves of a model are trained and exchanged, and which are frozen."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.parameter import UninitializedParameter

from fedalloy.core.errors import SpecError
from fedalloy.core.tree import layer_of


@dataclass(frozen=True)
class Selection:
    """Names of the trained parameters, the exchanged buffers and the constants, and the frozen modules."""

    params: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    frozen_modules: tuple[str, ...]


def select(module: nn.Module, patterns: tuple[str, ...]) -> Selection:
    """Parameters that match a pattern are trained; buffers are exchanged unless their module is frozen.

    A module is frozen if none of its parameters is trained; one without parameters is treated like the closest
    enclosing module that has some. Frozen modules stay in evaluation mode: a frozen BatchNorm neither uses the
    statistics of a batch nor updates its own.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    >>> select(model, ("2.*",)).buffers
    ()
    """
    names = [name for name, _ in module.named_parameters()]
    _check(module, names, patterns)
    params = tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
    frozen = tuple(name for name, _ in module.named_modules() if _is_frozen(name, names, params))
    stay = set(frozen)
    buffers = [name for name, _ in module.named_buffers()]
    moving = tuple(name for name in buffers if _owner(name) not in stay)
    constants = [name for name in names if name not in params] + [name for name in buffers if name not in moving]
    return Selection(params, moving, tuple(constants), frozen)


def _check(module: nn.Module, names: list[str], patterns: tuple[str, ...]) -> None:
    if isinstance(patterns, str):
        raise SpecError(f"trainable is the text '{patterns}': give a tuple of patterns, ('{patterns}',)")
    if any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters()):
        raise SpecError("the model has lazy layers whose shapes are not known: give every layer its sizes")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SpecError(
                f"trainable pattern '{pattern}' matches no parameter; groups of parameters: {', '.join(_groups(names))}"
            )
    if not patterns:
        raise SpecError("trainable is empty: name at least one pattern, for example ('*',)")


def _is_frozen(module: str, names: list[str], params: tuple[str, ...]) -> bool:
    """Whether the module, or the closest enclosing one with parameters, has none that are trained."""
    while True:
        prefix = f"{module}." if module else ""
        if any(name.startswith(prefix) for name in names) or not module:
            return not any(name.startswith(prefix) for name in params)
        module = _owner(module)


def _owner(leaf: str) -> str:
    return leaf.rpartition(".")[0]


def _groups(names: Iterable[str]) -> list[str]:
    return sorted({f"{layer_of(name)}.*" if "." in name else name for name in names})
