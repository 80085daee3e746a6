"""Live recorders for other people's tools: TensorBoard, MLflow, Weights & Biases (extra ``track``).

A tracker is told the numbers of every round as it ends (:func:`fedalloy.experiment.records.scalars.scalars`). What a
run needs to be resumed and reported is in its own folder all the same: a tracker that fails is left out with a warning,
and the run goes on. The libraries are loaded when a tracker is made. Others register theirs with
``@register("tracker", "name")`` (:class:`fedalloy.experiment.tracking.Tracker`).
"""

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
