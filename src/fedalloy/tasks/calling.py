"""How a module is called: its inputs as arguments, and the tensor in what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from fedalloy.core.errors import SpecError
from fedalloy.core.inputs import Inputs, each


def arguments(x: Inputs, prepare: Callable[[Tensor], Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of a call: a tensor is the first, a tuple are the first ones, a dict are keyword
    arguments. ``prepare`` is applied to every tensor."""
    if isinstance(x, Tensor):
        return (prepare(x),), {}
    if isinstance(x, tuple):
        return tuple(each(prepare, value) for value in x), {}
    return (), {name: each(prepare, value) for name, value in x.items()}


def scores_in(returned: Any) -> Tensor:
    """The tensor of scores in what a model returns: itself, its ``logits``, or the first tensor of a tuple.

    >>> import torch
    >>> scores_in((torch.ones(2), None))
    tensor([1., 1.])
    """
    if isinstance(returned, Tensor):
        return returned
    named = returned.get("logits") if isinstance(returned, Mapping) else getattr(returned, "logits", None)
    if named is None and isinstance(returned, tuple | list):
        named = next((one for one in returned if isinstance(one, Tensor)), None)
    if isinstance(named, Tensor):
        return named
    fields = f" with {', '.join(map(str, returned))}" if isinstance(returned, Mapping) else ""
    raise SpecError(
        f"the model returns a {type(returned).__name__}{fields}: it must return a tensor, a tuple that has one, or an "
        "object with 'logits'; wrap it in a module that returns its scores"
    )


def called(module: Callable[..., Any], x: Inputs) -> Tensor:
    """The scores of a module for these inputs."""
    args, named = arguments(x, lambda leaf: leaf)
    return scores_in(module(*args, **named))
