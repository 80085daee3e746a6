"""Normalisation layers by name."""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn

from fedalloy.core.errors import SpecError, nearest

Norm = Literal["batch", "group"]
_GROUPS = 8


def norm_layer(width: int, norm: Norm) -> nn.Module:
    """BatchNorm, or GroupNorm with the largest possible number of groups up to 8; both have two parameters per channel.

    >>> norm_layer(12, "group").num_groups
    6
    """
    if norm not in get_args(Norm):
        raise SpecError(f"norm '{norm}': {nearest(str(norm), get_args(Norm))}")
    groups = next(count for count in range(_GROUPS, 0, -1) if width % count == 0)
    return nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(groups, width)
