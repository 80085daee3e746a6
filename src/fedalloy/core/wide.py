"""The widest floating-point numbers of a device: float64, or float32 on Apple's GPUs (``mps``), which have no other."""

from __future__ import annotations

import torch
from torch import Tensor

_WITHOUT_FLOAT64 = ("mps",)


def has_float64(device: torch.device | str | None) -> bool:
    """Whether a device computes in float64.

    >>> has_float64("cpu"), has_float64("mps")
    (True, False)
    """
    return device is None or torch.device(device).type not in _WITHOUT_FLOAT64


def widest(device: torch.device | str | None) -> torch.dtype:
    """The type in which long sums are added up on a device."""
    return torch.float64 if has_float64(device) else torch.float32


def wide(values: Tensor) -> Tensor:
    """The values in the widest type of their device."""
    return values.to(widest(values.device))
