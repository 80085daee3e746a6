"""The tables that a recipe needs: for its own algorithm, or for every entry of its comparison that uses one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedalloy.core.errors import SpecError
from fedalloy.experiment.interrupt import Caught
from fedalloy.experiment.recipe import Experiment, Recipe, entry_names, resolve
from fedalloy.experiment.recipe.learned import SEED, table_file
from fedalloy.experiment.recipe.resolving import with_entry
from fedalloy.experiment.recipe.tables import UnfoldTable
from fedalloy.experiment.sampling import UniformSampling
from fedalloy.methods.weightings.unfolded import Unfolded
from fedalloy.methods.weightings.weight_table import WeightTable
from fedalloy.studies.unfolding.call import unfold
from fedalloy.studies.unfolding.learning import OuterEvent


@dataclass(frozen=True)
class LearningJob:
    """One table to learn: its experiment, its settings and its output file."""

    name: str
    experiment: Experiment
    table: UnfoldTable
    output: Path

    def learn(
        self,
        resume: bool = True,
        watcher: Callable[[OuterEvent], None] | None = None,
        caught: Caught | None = None,
    ) -> WeightTable:
        """Learn the table and write it; arguments as in ``unfold``."""
        config, settings = self.experiment.config, self.table.model_dump(exclude_none=True)
        seed: int = settings.pop("seed")
        return unfold(
            self.experiment.algorithm,
            self.experiment.task(),
            rounds=config.rounds,
            seed=seed,
            devices=config.devices,
            device=config.device,
            output=self.output,
            resume=resume,
            watcher=watcher,
            caught=caught,
            **settings,
        )


def jobs(
    recipe: Recipe, entry: str | None = None, output: Path | None = None, seed: int | None = None
) -> list[LearningJob]:
    """The tables that a recipe asks for; with ``entry`` that of one entry of its comparison."""
    names: list[str | None] = [entry] if entry is not None else list(_entries(recipe)) or [None]
    if output is not None and len(names) > 1:
        raise SpecError(
            f"the recipe needs {len(names)} tables ({', '.join(map(str, names))}): choose one with --entry, or omit "
            "-o to write each to its path in the recipe"
        )
    return [_job(recipe, name, output, seed) for name in names]


def seeds_of(recipe: Recipe) -> list[int | None]:
    """The seeds that need a table of their own, or None for the one of the recipe."""
    entries = [with_entry(recipe, name) for name in _entries(recipe)] or [recipe]
    own = any(SEED in str(table_file(one)) for one in entries)
    return list(recipe.run.seeds) if own else [None]


def _entries(recipe: Recipe) -> list[str]:
    """The entries of the comparison that use a table."""
    return [name for name in entry_names(recipe) if table_file(with_entry(recipe, name)) is not None]


def _job(recipe: Recipe, entry: str | None, output: Path | None, seed: int | None) -> LearningJob:
    single = with_entry(recipe, entry) if entry is not None else recipe
    table = single.unfold or UnfoldTable()
    table = table if seed is None else table.model_copy(update={"seed": seed})
    named = table_file(single, table.seed)
    experiment = resolve(recipe, table.seed, entry)
    if experiment.config.sampling not in (UniformSampling(), UniformSampling(1.0)):
        raise SpecError("unfold: the table has a weight for every client in every round: remove [sampling]")
    rule = experiment.algorithm.weighting
    if isinstance(rule, Unfolded):
        # An earlier table must not influence this learning.
        rule = Unfolded("", normalise=rule.normalise)
        experiment = replace(experiment, algorithm=replace(experiment.algorithm, weighting=rule))
    return LearningJob(entry or single.name or "table", experiment, table, output or named or Path("weights.json"))


def summary(table: WeightTable) -> list[dict[str, Any]]:
    """The rows of a table for display: every client's weight per round, as the mean over layers if there are any."""
    weights = table.weights.mean(2) if table.layers else table.weights
    return [{"round": number, "weights": row.tolist()} for number, row in enumerate(weights, 1)]
