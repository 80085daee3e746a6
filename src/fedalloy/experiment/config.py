"""The settings of a run, as plain values; recipes and Python calls both produce them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedalloy.core.arguments import checked
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.protocols import Engine
from fedalloy.core.showing import brief
from fedalloy.core.statistics import MAX_EXAMPLES
from fedalloy.engines.out_of_core import LIMIT_MB
from fedalloy.experiment.sampling import Sampling, UniformSampling
from fedalloy.methods.classifier import ClassifierTraining
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.tasks.metrics.direction import better, higher_is_better, reaches
from fedalloy.tasks.metrics.metric import choose


@checked("run")
@dataclass(frozen=True, repr=False)
class RunConfig:
    """How many rounds, which clients, what is evaluated and when to stop.

    ``target`` is a value of ``target_metric``, of its mean over clients or (``target_on = "global"``) on the global
    test set: the round that reaches it is recorded and, with ``stop_at_target``, ends the run. ``patience`` ends a
    run whose metric has not improved for that many evaluations. ``evaluate_clients`` scores only that many clients,
    drawn once, and ``evaluate_part`` their test or their validation parts (to choose settings without looking at the
    test parts). ``checkpoint_every`` is in seconds. ``max_norm`` drops longer updates, ``max_examples`` clients that
    report more. ``classifier``: how the server trains on synthetic samples, for methods that generate them.
    ``mix_every``: also score mixtures of the federated and the local models after this many rounds, for methods that
    have both; the last round always does. ``snapshot_every``: keep synthetic samples in the run folder after this many
    rounds, for methods that generate them. Client states are kept on disk when those of the whole population are
    larger than ``client_memory_mb`` (:func:`fedalloy.experiment.records.store.open_store`), and the contributions of a
    round when those of the cohort are larger than ``contributions_mb``: in a file without a name in
    ``contributions_folder`` (default: in the run folder, or the system's temporary folder for a run that has none).
    ``parquet_from``: evaluations of so many clients or more are Parquet files in the run folder instead of lines of
    JSON (default: 100,000 where pyarrow is installed, 0: never).
    """

    rounds: int = 50
    seed: int = 0
    sampling: Sampling = field(default_factory=UniformSampling)
    devices: DeviceProfile = field(default_factory=DeviceProfile)
    evaluate_every: int = 1
    evaluate_clients: int | None = None
    evaluate_part: Literal["test", "valid"] = "test"
    mix_every: int | None = None
    snapshot_every: int | None = None
    parquet_from: int | None = None
    metrics: tuple[str, ...] = ("accuracy", "loss")
    target: float | None = None
    target_metric: str = "accuracy"
    target_on: Literal["clients", "global"] = "clients"
    stop_at_target: bool = False
    patience: int | None = None
    max_norm: float | None = None
    max_examples: int = MAX_EXAMPLES
    classifier: ClassifierTraining = field(default_factory=ClassifierTraining)
    checkpoint_every: float = 30.0
    client_memory_mb: float = 64.0
    engine: str | Engine = "auto"
    engine_options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    threads: int | None = None
    contributions_mb: float = LIMIT_MB
    contributions_folder: str | None = None
    profile: bool = False

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise SpecError(f"rounds must be 1 or more, got {self.rounds}")
        if self.evaluate_every < 1:
            raise SpecError(f"evaluate every: must be 1 or more rounds, got {self.evaluate_every}")
        if self.mix_every is not None and self.mix_every < 1:
            raise SpecError(f"evaluate mix_every: must be 1 or more rounds, got {self.mix_every}")
        if self.snapshot_every is not None and self.snapshot_every < 1:
            raise SpecError(f"evaluate snapshots: must be 1 or more rounds, got {self.snapshot_every}")
        if self.parquet_from is not None and self.parquet_from < 0:
            raise SpecError(f"evaluate parquet_from: must be 0 (never) or more clients, got {self.parquet_from}")
        self._check_limits()
        watched = self.target is not None or self.patience is not None
        if watched and self.target_metric not in self.metrics:
            raise SpecError(
                f"target_metric '{self.target_metric}' is not evaluated: {nearest(self.target_metric, self.metrics)}"
            )
        if self.stop_at_target and self.target is None:
            raise SpecError("stop_at_target ends a run at its target, and there is none: give target too, such as 0.9")
        choose(self.metrics)
        if watched:
            check_direction(self.target_metric, self.metrics, "targeted" if self.target is not None else "waited for")

    def __repr__(self) -> str:
        return brief(self)

    def _check_limits(self) -> None:
        """The same limits that recipes have."""
        for name in ("evaluate_clients", "patience", "threads"):
            if (count := getattr(self, name)) is not None and count < 1:
                raise SpecError(f"{name} must be 1 or more, or none, got {count}")
        if self.max_norm is not None and self.max_norm <= 0:
            raise SpecError(f"max_norm must be above 0, or none, got {self.max_norm}")
        if self.max_examples < 1:
            raise SpecError(f"max_examples must be 1 or more, got {self.max_examples}")
        for name in ("checkpoint_every", "client_memory_mb", "contributions_mb"):
            if getattr(self, name) < 0:
                raise SpecError(f"{name} must be 0 or more, got {getattr(self, name)}")

    @property
    def directions(self) -> dict[str, bool | None]:
        """Whether more is better, by metric; stored with the run because its readers may not have the metric."""
        return {name: higher_is_better(name) for name in self.metrics}

    def better(self, score: float, than: float) -> bool:
        """Whether a value of the target metric is better than another; NaN never is."""
        return better(score, than, higher_is_better(self.target_metric))

    def met_by(self, score: float) -> bool:
        """Whether a value of the target metric is as good as the target, where there is one."""
        return self.target is not None and reaches(score, self.target, higher_is_better(self.target_metric))


def check_direction(metric: str, evaluated: Sequence[str], done: str) -> None:
    """Refuse a metric without a direction where values are compared."""
    if higher_is_better(metric) is None:
        others = [name for name in evaluated if higher_is_better(name) is not None]
        raise SpecError(
            f"target_metric '{metric}' has no direction (it is registered with higher_is_better=None), so it cannot be "
            f"{done}; evaluated metrics that can: {', '.join(others) or '(none)'}"
        )
