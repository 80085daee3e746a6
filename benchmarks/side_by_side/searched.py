"""What a search came to: did it keep the recipe's own settings, which are its first trial, and did any other trial get
further than to the first comparison?"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from benchmarks.side_by_side.stored import Entry
from fedalloy.studies.tune.searching import rungs


@dataclass(frozen=True)
class OwnSettings:
    """The step of a recipe, the seeds of its trials and the round in which they are first compared."""

    lr: float
    tuning_seeds: int
    first_comparison: int

    def are(self, entry: Entry) -> bool:
        """Whether the search ended with them. Drawn steps are random, so an equal step is the recipe's."""
        steps = entry.settings.get("algorithm.lr"), entry.settings.get("algorithm.server_lr", 1.0)
        return steps == (self.lr, 1.0)

    def alone(self, entry: Entry, rounds: int) -> bool:
        """Whether one trial took all its rounds, and every other one no more than those before the first comparison."""
        return entry.tuning_rounds <= self.tuning_seeds * rounds + (entry.trials - 1) * self.first_comparison


def own_settings(file: Path) -> OwnSettings:
    """Those of a recipe's file."""
    recipe = tomllib.loads(file.read_text(encoding="utf-8"))
    first, *_ = rungs(recipe["run"]["rounds"], recipe["evaluate"]["every"])
    return OwnSettings(recipe["algorithm"]["lr"], len(recipe["run"]["tuning_seeds"]), first)
