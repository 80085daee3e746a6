"""Copies values into the buffers that a captured graph reads."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten


def fill(static: Any, values: Any) -> None:
    """Copy values into buffers of the same structure."""
    pairs = zip(tree_flatten(static)[0], tree_flatten(values)[0], strict=True)
    changed = [(buffer, value) for buffer, value in pairs if buffer is not value]
    alike = [(one, other) for one, other in changed if (one.device, one.dtype) == (other.device, other.dtype)]
    if len(alike) > 1:
        # One kernel for all leaves instead of one each.
        torch._foreach_copy_([buffer for buffer, _ in alike], [value for _, value in alike])
        changed = [(one, other) for one, other in changed if (one.device, one.dtype) != (other.device, other.dtype)]
    for buffer, value in changed:
        buffer.copy_(value, non_blocking=True)
