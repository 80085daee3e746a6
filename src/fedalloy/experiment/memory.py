"""How much memory a run has needed so far."""

from __future__ import annotations

import sys

import torch


def peak_memory() -> dict[str, int]:
    """The largest resident size of this process in bytes and, once a GPU is in use, the most it ever held.

    >>> peak_memory().get("memory", 1) > 0
    True
    """
    found = {} if (size := _resident()) is None else {"memory": size}
    if torch.cuda.is_initialized():
        found["device_memory"] = int(torch.cuda.max_memory_allocated())
    return found


def _resident() -> int | None:
    """None where the system does not tell."""
    try:
        import resource
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * unit
