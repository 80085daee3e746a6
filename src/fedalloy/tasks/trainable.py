"""Which leaves of a model are trained and exchanged, and which are frozen."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from fedalloy.core.errors import SpecError

_NORM = re.compile(r"Norm(?![a-z])")
Patterns = tuple[str, ...] | None
"""Name patterns of the trained parameters; None: the parameters with ``requires_grad``."""


@dataclass(frozen=True)
class Selection:
    """Names of the trained parameters, the exchanged buffers and the constants, and the modules that stay in evaluation
    mode."""

    params: tuple[str, ...]
    buffers: tuple[str, ...]
    constants: tuple[str, ...]
    frozen_modules: tuple[str, ...]


def select(module: nn.Module, patterns: Patterns = None) -> Selection:
    """Parameters that match a pattern, or without patterns those with ``requires_grad``, are trained. Buffers of norm
    layers (:func:`is_norm`) are exchanged unless the layer is frozen; others, such as position ids, are constants.

    A parameter with several names (tied weights) has the first of them, and a pattern may match any.

    A module is frozen if none of its parameters is trained; one without parameters is treated like the closest
    enclosing module that has some. A frozen norm layer stays in evaluation mode: it neither uses the statistics of a
    batch nor updates its own. With patterns all frozen modules do, so that a frozen body has no dropout; without
    patterns dropout works as in torch.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    >>> select(model, ("2.*",)).buffers
    ()
    >>> model[:2].requires_grad_(False) and select(model).params
    ('2.weight', '2.bias')
    """
    names = [name for name, _ in module.named_parameters()]
    params = _trained(module, names, patterns)
    norms = {name for name, part in module.named_modules() if is_norm(part)}
    known = [name for name, _ in module.named_modules() if patterns is not None or name in norms]
    frozen = tuple(name for name in known if _is_frozen(name, names, params))
    stay = set(frozen)
    buffers = [name for name, _ in module.named_buffers()]
    moving = tuple(name for name in buffers if _owner(name) in norms - stay or _declared(module, name))
    constants = [name for name in names if name not in params] + [name for name in buffers if name not in moving]
    return Selection(params, moving, tuple(constants), frozen)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm layer: one of torch's, or one of any other package whose class has a name such as
    ``RMSNorm`` or ``GroupNormAct``, but not ``Normalize``.

    >>> is_norm(nn.BatchNorm2d(3)), is_norm(nn.Embedding(3, 2))
    (True, False)
    """
    return isinstance(module, nn.modules.batchnorm._NormBase) or bool(_NORM.search(type(module).__name__))


def _declared(module: nn.Module, buffer: str) -> bool:
    """Whether the buffer's module lists it in ``exchanged_buffers``, as a module does whose training changes it."""
    owner = module.get_submodule(_owner(buffer))
    return buffer.rpartition(".")[2] in getattr(owner, "exchanged_buffers", ())


def _trained(module: nn.Module, names: list[str], patterns: Patterns) -> tuple[str, ...]:
    if patterns is not None:
        known = _all_names(module)
        _check([one for some in known.values() for one in some], patterns)
        return tuple(
            name for name in names if any(fnmatchcase(one, pattern) for one in known[name] for pattern in patterns)
        )
    trained = tuple(name for name, parameter in module.named_parameters() if parameter.requires_grad)
    if not trained and names:
        raise SpecError(
            "no parameter of the model has requires_grad = True, so that nothing would be trained: set it for some, or "
            f"name patterns in trainable; groups of parameters: {', '.join(_groups(names))}"
        )
    return trained


def _all_names(module: nn.Module) -> dict[str, list[str]]:
    """All names of every parameter, by the first one: a tied one has several."""
    first: dict[int, list[str]] = {}
    for name, leaf in module.named_parameters(remove_duplicate=False):
        first.setdefault(id(leaf), []).append(name)
    return {names[0]: names for names in first.values()}


def _check(names: list[str], patterns: tuple[str, ...]) -> None:
    if isinstance(patterns, str):
        raise SpecError(f"trainable is the text '{patterns}': give a tuple of patterns, ('{patterns}',)")
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
    return sorted({f"{_owner(name)}.*" if "." in name else name for name in names})
