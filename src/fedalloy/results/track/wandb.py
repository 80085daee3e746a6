"""Weights & Biases: online with an API key, otherwise offline into the run's folder, for ``wandb sync``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from fedalloy.core.registry import register
from fedalloy.experiment.tracking import TrackedRun
from fedalloy.results.track import needed


@register("tracker", "wandb")
class WeightsAndBiases:
    """One W&B run per run; ``WANDB_MODE``, ``WANDB_PROJECT`` and the other variables of W&B are respected."""

    def __init__(self) -> None:
        self._wandb = needed("wandb", "Weights & Biases")
        self._run: Any = None
        self._round, self._values = 0, dict[str, float]()

    def begin(self, run: TrackedRun) -> None:
        """Begin, or continue the W&B run of an earlier session."""
        known = run.recall("wandb")
        mode = os.environ.get("WANDB_MODE") or ("online" if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT") or "fedalloy", name=f"{run.name} {run.folder.name}", id=known,
            resume="allow" if known else None, dir=str(run.folder), config=dict(run.recipe), mode=mode,
            settings=self._wandb.Settings(console="off", silent=True),
        )  # fmt: skip
        if not known:
            run.remember("wandb", str(self._run.id))

    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Numbers of one round are sent together: W&B drops what arrives late for an earlier step."""
        if round != self._round:
            self._send()
        self._round = round
        self._values.update(values)

    def end(self, state: str, reason: str) -> None:
        """Send the rest and the final state."""
        self._send()
        self._run.summary.update({"state": state, "reason": reason})
        self._run.finish(exit_code=0 if state in ("finished", "stopped") else 1)

    def _send(self) -> None:
        if self._values:
            self._run.log(self._values, step=self._round)
            self._values = {}
