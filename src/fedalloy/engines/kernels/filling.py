"""Copies values into the buffers that a captured graph reads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


def fill(static: Any, values: Any) -> None:
    """Copy values into buffers of the same structure."""
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for buffer, value in zip(tree_flatten(static)[0], tree_flatten(values)[0], strict=True):
        if buffer is value:
            continue
        if (buffer.device, buffer.dtype) != (value.device, value.dtype):
            buffer.copy_(value, non_blocking=True)
            continue
        buffers, given = alike.setdefault((buffer.device, buffer.dtype), ([], []))
        buffers.append(buffer)
        given.append(value)
    for buffers, given in alike.values():
        # One kernel for all leaves of a dtype; lists of several dtypes would be copied leaf by leaf.
        torch._foreach_copy_(buffers, given)
