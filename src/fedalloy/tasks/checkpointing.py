"""Activation checkpointing (``torch.utils.checkpoint``) as a plain call.

A checkpoint computes a part of the model again in the backward pass. By then a call as a pure function is over: the
part would be computed with the module's own leaves instead of the client's, and with other random numbers, and its
gradients would be wrong without a word. The activations are kept instead: the same numbers, more memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils import checkpoint

_NAMES = ("CheckpointFunction", "_checkpoint_without_reentrant_generator")
"""What ``torch.utils.checkpoint.checkpoint`` calls, with and without ``use_reentrant``."""


class PlainCheckpoints:
    """While active, what a model checkpoints is called like everything else; ``used`` is how often."""

    def __init__(self) -> None:
        self.used = 0
        self._before: list[Any] = []

    def __enter__(self) -> PlainCheckpoints:
        self._before = [getattr(checkpoint, name) for name in _NAMES]
        for name, plain in zip(_NAMES, (self, self._around), strict=True):
            setattr(checkpoint, name, plain)
        return self

    def __exit__(self, *_: object) -> None:
        for name, before in zip(_NAMES, self._before, strict=True):
            setattr(checkpoint, name, before)

    def apply(self, function: Any, preserve: bool, *args: Any) -> Any:
        """Called instead of ``CheckpointFunction.apply``."""
        self.used += 1
        return function(*args)

    def _around(self, *_: Any, **__: Any) -> Iterator[None]:
        """Used instead of the generator around a call."""
        self.used += 1
        yield


def tell() -> None:
    """Say that a model's checkpoints have no effect."""
    warnings.warn(
        "the model checkpoints activations (torch.utils.checkpoint, gradient_checkpointing_enable): they are kept, "
        "because the backward pass would compute them with other weights; results are the same, with more memory",
        RuntimeWarning,
        stacklevel=2,
    )
