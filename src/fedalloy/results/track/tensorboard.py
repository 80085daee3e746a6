"""TensorBoard: ``tensorboard --logdir runs`` shows every run that was tracked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedalloy.core.registry import register
from fedalloy.experiment.records import toml
from fedalloy.experiment.tracking import TrackedRun
from fedalloy.results.track import needed


@register("tracker", "tensorboard")
class TensorBoard:
    """Writes event files into ``tensorboard/`` in the run's folder; a resumed run replaces rounds that were lost."""

    def __init__(self) -> None:
        self._module = needed("torch.utils.tensorboard", "TensorBoard")
        self._writer: Any = None

    def begin(self, run: TrackedRun) -> None:
        """Open a new event file."""
        place = str(run.folder / "tensorboard")
        self._writer = self._module.SummaryWriter(place, purge_step=run.round + 1 if run.round else None, flush_secs=5)
        self._writer.add_text("recipe", "".join(f"    {line}\n" for line in toml.dumps(run.recipe).splitlines()))

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """One scalar per number."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)

    def end(self, state: str, reason: str) -> None:
        """Close the file."""
        self._writer.close()
