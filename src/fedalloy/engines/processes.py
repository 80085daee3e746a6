"""How worker processes start: as forks where that is safe, elsewhere as new processes that get a copy of the work."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fedalloy.core.errors import SpecError

KILLED = frozenset({-int(getattr(signal, "SIGKILL", 9)), -int(signal.SIGTERM)})
"""The exit codes of a process that was ended from outside, for example because memory ran out."""


def forks() -> bool:
    """Whether processes are forked: Windows cannot, and the libraries of macOS do not survive it.

    >>> isinstance(forks(), bool)
    True
    """
    return hasattr(os, "fork") and sys.platform != "darwin"


def start(serve: Callable[[Any, Connection, Connection | None], None], work: Any) -> tuple[BaseProcess, Connection]:
    """A process that runs ``serve(work, its end of a pipe, our end or None)``, and our end of that pipe."""
    return _forked(serve, work) if forks() else _spawned(serve, work)


def why_died(code: int | None) -> str:
    """A hint for a process that ended by itself: where it is not a fork, it begins by importing the user's script."""
    if forks() or code in KILLED:
        return ""
    return '; in a script, the call must stand under `if __name__ == "__main__":`'


def _forked(serve: Callable[..., None], work: Any) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(work, theirs, ours), daemon=True)
    with warnings.catch_warnings():
        # Forking while a progress display's thread runs is safe here: the child does not use the display.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return process, ours


def _spawned(serve: Callable[..., None], work: Any) -> tuple[BaseProcess, Connection]:
    """Tensors are passed as shared memory (torch's own way), everything else is pickled."""
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(work, theirs, None), daemon=True)
    try:
        process.start()
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SpecError(
            f"engine 'workers' starts new processes here and cannot send them the task ({error}): define the model and "
            "the loss in a module, not inside a function or a notebook cell, or use the engine 'batched' or 'loop'"
        ) from error
    theirs.close()
    return process, ours
