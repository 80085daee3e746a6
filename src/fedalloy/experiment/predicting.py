"""Predictions for rows that were in no task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedalloy.core import inputs
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.inputs import Inputs
from fedalloy.core.own_code import own_code
from fedalloy.core.types import Tree
from fedalloy.experiment.calling_clients import Client
from fedalloy.tasks.preparing import named
from fedalloy.tasks.sources.raw_rows import tensors_of

_AT_ONCE = 1024
"""Examples that are predicted together."""


def rows_for(
    x: Any,
    prepare: Callable[[Any, Client | None], Inputs],
    client: Client | None,
    rows_of: Client | None,
    prepared: bool,
) -> Inputs:
    """The rows as the model gets them: as they are if they are ``prepared``, else as those of ``rows_of``."""
    if not prepared:
        return prepare(x, client if rows_of is None else rows_of)
    if rows_of is not None:
        raise SpecError("rows_of says whose raw rows these are, and prepared=True that they are not raw; give one")
    return tensors_of(x)


def outputs(model: Callable[[Inputs], Tensor], rows: Inputs, params: Tree, floats: bool) -> Tensor:
    """The outputs for all rows, in the precision and on the device of the parameters; ``floats``: the model gets whole
    numbers as floats."""
    if not inputs.one_length(rows):
        raise SpecError("predict: x has no rows")
    like = next((leaf for leaf in params.values() if leaf.is_floating_point()), torch.zeros(()))

    def moved(leaf: Tensor) -> Tensor:
        return leaf.to(like) if floats or leaf.is_floating_point() else leaf.to(like.device)

    there = inputs.each(moved, rows)
    with torch.no_grad(), own_code(f"predict: the model called with {_shapes(rows)}", DataError):
        parts = (inputs.take(there, some) for some in inputs.pieces(inputs.length(there), _AT_ONCE))
        return torch.cat([model(part).cpu() for part in parts])


def _shapes(rows: Inputs) -> str:
    """Rows in words, for an error of a model that does not take them."""
    found = [
        f"{path or 'x'} of {tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}" for path, leaf in named(rows)
    ]
    return f"{', '.join(found)} (which must be rows like those of the task)"
