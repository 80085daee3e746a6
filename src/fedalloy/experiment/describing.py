"""A run given in Python, as the recipe that is stored with it: the one that the command line would have stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import FedalloyError
from fedalloy.core.protocols import Task
from fedalloy.core.spec import algorithm_to_spec
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.records.reading import GIVEN
from fedalloy.experiment.sampling import BySize, Listed, Sampling, UniformSampling
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.tasks.federation import FederatedTask

PATHS = {
    "rounds": "run.rounds", "target": "run.target", "target_metric": "run.target_metric", "target_on": "run.target_on",
    "stop_at_target": "run.stop_at_target", "patience": "run.patience", "max_norm": "run.max_norm",
    "max_examples": "run.max_examples", "checkpoint_every": "run.checkpoint_every",
    "client_memory_mb": "run.client_memory_mb", "evaluate_every": "evaluate.every",
    "evaluate_clients": "evaluate.clients", "evaluate_part": "evaluate.part", "mix_every": "evaluate.mix_every",
    "snapshot_every": "evaluate.snapshots", "parquet_from": "evaluate.parquet_from",
    "metrics": "evaluate.metrics", "device": "engine.device", "threads": "engine.threads",
    "contributions_mb": "engine.contributions_mb", "contributions_folder": "engine.contributions_folder",
}  # fmt: skip
"""Settings of a run in Python (:class:`fedalloy.experiment.config.RunConfig`) by their place in a recipe."""
_ALWAYS = ("rounds", "metrics", "target_metric")


class Described(dict[str, Any]):
    """A recipe that was made from a call in Python: differences from it are named as that call names them."""


def recipe_of(algorithm: Algorithm, task: Task, config: RunConfig) -> Described:
    """The one-run recipe of a run; its ``task`` is ``dataset = "python"`` where a recipe cannot say it all."""
    told, known = told_settings(config)
    return Described({**(_made(task, config.seed) if known else _given()), **parts_of(algorithm), **told})


def parts_of(algorithm: Algorithm) -> dict[str, Any]:
    """The tables of an algorithm: its parts."""
    spec = algorithm_to_spec(algorithm)
    failing = spec.pop("on_failure", None)
    return {**spec, **({"algorithm": {"on_failure": failing}} if failing else {})}


def told_settings(config: RunConfig) -> tuple[dict[str, Any], bool]:
    """The tables of the settings that differ from their defaults, and whether these are all."""
    tables: dict[str, Any] = {"run": {"seeds": [config.seed]}, "evaluate": {}}
    defaults = RunConfig()
    for name, path in PATHS.items():
        value = getattr(config, name)
        if value is not None and (name in _ALWAYS or value != getattr(defaults, name)):
            table, _, key = path.partition(".")
            tables.setdefault(table, {})[key] = list(value) if isinstance(value, tuple) else value
    if config.classifier != defaults.classifier:
        tables["evaluate"]["classifier"] = asdict(config.classifier)
    sampling, engine = sampling_table(config.sampling), _engine_table(config)
    tables["engine"] = {"threads": torch.get_num_threads(), **tables.get("engine", {}), **(engine or {})}
    tables |= {"sampling": sampling} if sampling else {}
    devices = devices_table(config.devices)
    tables |= {"devices": devices} if devices else {}
    return {name: table for name, table in tables.items() if table}, sampling is not None and engine is not None


def sampling_table(sampling: Sampling) -> dict[str, Any] | None:
    """The table of a sampling rule; None for a rule of one's own."""
    if type(sampling) is Listed:
        return {"kind": "list", "cohorts": [list(cohort) for cohort in sampling.cohorts]}
    if type(sampling) is UniformSampling or type(sampling) is BySize:
        kind = {"kind": "by_size"} if type(sampling) is BySize else {}
        return {**kind, **({} if sampling.cohort is None else {"cohort": sampling.cohort})}
    return None


def devices_table(devices: DeviceProfile) -> dict[str, Any]:
    """The table of the clients' devices."""
    defaults = DeviceProfile()
    found = {one.name: getattr(devices, one.name) for one in fields(devices)}
    whole = asdict(devices)
    told = {name: whole[name] for name, value in found.items() if value != getattr(defaults, name)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in told.items()}


def _engine_table(config: RunConfig) -> dict[str, Any] | None:
    """The engine's name and arguments; None for an engine that was given as an object and is not registered."""
    if isinstance(config.engine, str):
        return {"kind": config.engine, **config.engine_options}
    try:
        return {"kind": registry.name_of("engine", type(config.engine))}
    except FedalloyError:
        return None


def _made(task: Task, seed: int) -> Mapping[str, Any]:
    source = task.source if isinstance(task, FederatedTask) else None
    return source.tables if source is not None and source.seed == seed else _given()


def _given() -> dict[str, Any]:
    return {"task": {"dataset": GIVEN}}
