"""The environment of a run: versions, threads and device; no host names, no paths."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch


def describe(device: str | torch.device = "cpu") -> dict[str, Any]:
    """What may affect results or speed.

    >>> describe()["device"]
    'cpu'
    """
    return {
        "python": platform.python_version(),
        **{name: _version(name) for name in ("fedalloy", "torch", "numpy", "safetensors")},
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": str(device),
        "device_name": _device_name(torch.device(device)),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
