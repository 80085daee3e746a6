"""Checks that this machine has the device that models are to be computed on."""

from __future__ import annotations

import torch

from fedalloy.core.errors import SpecError
from fedalloy.core.wide import has_float64

_KINDS = ("cpu", "cuda", "mps")


def check_device(device: str | torch.device | None, dtype: torch.dtype | None = None) -> None:
    """Refuse a device that torch does not know, that this machine does not have, or that lacks the numbers asked for.

    >>> check_device("cpu")
    >>> check_device("tpu")
    Traceback (most recent call last):
    fedalloy.core.errors.SpecError: device 'tpu' is none that models are computed on; allowed: cpu, cuda, cuda:N, mps
    """
    if device is None:
        return
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        wanted = None
    if wanted is None or wanted.type not in _KINDS:
        raise SpecError(
            f"device '{device}' is none that models are computed on; allowed: cpu, cuda, cuda:N, mps"
        ) from None
    trouble = _cuda_trouble(wanted.index) if wanted.type == "cuda" else _mps_trouble() if wanted.type == "mps" else ""
    if trouble:
        raise SpecError(f"device '{device}' cannot be used here: {trouble}; 'cpu' works everywhere")
    if dtype == torch.float64 and not has_float64(wanted):
        raise SpecError(f"device '{device}' has no float64: use dtype float32, or device 'cpu'")


def _cuda_trouble(index: int | None) -> str:
    if not torch.backends.cuda.is_built():
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device or no driver (see fedalloy doctor)"
    count = torch.cuda.device_count()
    return f"there are {count} CUDA devices, numbered from 0" if index is not None and index >= count else ""


def _mps_trouble() -> str:
    return "" if torch.backends.mps.is_available() else "torch finds no Apple GPU"
