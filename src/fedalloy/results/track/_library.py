"""The libraries that trackers speak to: loaded when a tracker is made."""

from __future__ import annotations

from typing import Any

from fedalloy.core import registry
from fedalloy.core.errors import SpecError


def needed(module: str, tracker: str) -> Any:
    """A library, or advice on how to get it."""
    try:
        return registry.load(module)
    except ImportError as error:
        raise SpecError(f"tracking with {tracker} needs {error.name}: pip install 'fedalloy[track]'") from error
