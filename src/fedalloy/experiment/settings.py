"""The further settings of ``fit``, ``compare``, ``tune`` and ``advise``, for editors and type checkers.

Each is a field of :class:`fedalloy.experiment.config.RunConfig`, where it is explained and, at the call, checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from fedalloy.core.protocols import Engine
from fedalloy.experiment.sampling import Sampling
from fedalloy.methods.classifier import ClassifierTraining
from fedalloy.tasks.devices import DeviceProfile


class RunSettings(TypedDict, total=False):
    """What single runs and comparisons take."""

    sampling: Sampling
    devices: DeviceProfile | Mapping[str, Any]
    evaluate_every: int
    evaluate_clients: int | None
    evaluate_part: Literal["test", "valid"]
    mix_every: int | None
    snapshot_every: int | None
    parquet_from: int | None
    metrics: Sequence[str]
    target: float | None
    target_metric: str
    target_on: Literal["clients", "global"]
    stop_at_target: bool
    patience: int | None
    max_norm: float | None
    max_examples: int
    checkpoint_every: float
    client_memory_mb: float
    engine_options: Mapping[str, Any]
    device: str
    threads: int | None
    contributions_mb: float
    contributions_folder: str | Path | None


class FitSettings(RunSettings, total=False):
    """What a single run takes."""

    engine: str | Engine
    classifier: ClassifierTraining | Mapping[str, Any]
    profile: bool


class ComparisonSettings(RunSettings, total=False):
    """What a comparison takes; a recipe holds it, so that an engine has a name."""

    engine: str
    cohort: int | float | None


class SearchSettings(ComparisonSettings, total=False):
    """What a search takes."""

    rounds: int
    seeds: Sequence[int]


class AdviceSettings(SearchSettings, total=False):
    """What an advice takes."""

    tuning_seeds: Sequence[int]
