"""Trackers for TensorBoard, MLflow and Weights & Biases (extra ``track``).

A tracker gets the numbers of every round as it ends (:func:`fedalloy.experiment.records.scalars.scalars`). The run
folder is complete without it: when a tracker fails, the run continues without it and warns. The libraries are loaded
when a tracker is created. Register your own with
``@register("tracker", "name")`` (:class:`fedalloy.experiment.tracking.Tracker`).
"""

from __future__ import annotations

from typing import Any

from fedalloy.core import registry
from fedalloy.core.errors import SpecError


def needed(module: str, tracker: str) -> Any:
    """Import a library, or refuse with how to install it."""
    try:
        return registry.load(module)
    except ImportError as error:
        raise SpecError(f"tracking with {tracker} needs {error.name}: pip install 'fedalloy[track]'") from error
