"""The identity of a run: algorithm, settings, data, model and sampling, as plain values and hashes.

A folder keeps it as ``identity.json``, and a run is only resumed with the same one. What may differ is not part of it:
threads, trackers, how often checkpoints are written, where client states are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any, cast

import torch

from fedalloy.core import inputs, registry
from fedalloy.core.algorithm import Algorithm, ServerState
from fedalloy.core.errors import FedalloyError
from fedalloy.core.fingerprint import VALUES, Plain, digest, portrait
from fedalloy.core.inputs import Inputs
from fedalloy.core.protocols import Engine, Objective, Task
from fedalloy.experiment.config import RunConfig
from fedalloy.tasks.federation import FederatedTask

FREE = ("threads", "checkpoint_every", "client_memory_mb", "contributions_mb", "contributions_folder", "profile")
_ELSEWHERE = ("sampling", "devices", "engine", "engine_options", "device")
_WITNESSES = 5


def identify(algorithm: Algorithm, task: Task, config: RunConfig, state: ServerState) -> Plain:
    """The identity of a run that begins from ``state``."""
    return {
        **_settings(algorithm, task, config, defaults=True),
        "engine": _engine(config),
        "task": {**data_of(task), "model": _model(task.objective)},
        "initial": _leaves({**state["shared"]["params"], **state["shared"]["buffers"]}),
    }


def without_defaults(identity: Plain, algorithm: Algorithm, task: Task, config: RunConfig) -> Plain:
    """The same without the settings that hold their default, which a folder of an earlier version may lack."""
    return {**identity, **_settings(algorithm, task, config, defaults=False)}


def _settings(algorithm: Algorithm, task: Task, config: RunConfig, defaults: bool) -> Plain:
    settings = portrait(config, defaults)
    return {
        "algorithm": portrait(algorithm, defaults),
        "run": {name: value for name, value in settings.items() if name not in ("kind", *FREE, *_ELSEWHERE)},
        "sampling": _sampling(task, config, defaults),
        "devices": portrait(config.devices, defaults),
    }


def disagreements(found: Plain, wanted: Plain, short: Plain, engine: bool = False) -> list[str]:
    """Where a run's identity and another one differ; ``short`` is the other one without defaults.

    With ``engine`` another engine or device is allowed; another device may compute data and the initial model with
    other last digits, another engine on the same one does not touch them.
    """
    moved = engine and found.get("engine", {}).get("device") != wanted["engine"]["device"]
    told = {path: said for path, said in _differences(found, wanted, short).items() if path != "run.rounds"}
    told = {path: said for path, said in told.items() if not (engine and path.startswith("engine."))}
    return [said for path, said in told.items() if not (moved and path.split(".")[-1] == VALUES)]


def _differences(found: Plain, wanted: Plain, short: Plain, prefix: str = "") -> dict[str, str]:
    said: dict[str, str] = {}
    for key in dict.fromkeys([*found, *wanted]):
        there, here, path = found.get(key), wanted.get(key), f"{prefix}{key}"
        if isinstance(there, Mapping) and isinstance(here, Mapping):
            inner = short.get(key)
            said |= _differences(dict(there), dict(here), inner if isinstance(inner, dict) else {}, f"{path}.")
        elif there != here and (key in found or key in short):  # a field added since then has its default
            said[path] = _said(path, there, here)
    return said


def _said(path: str, there: Any, here: Any) -> str:
    if path.split(".")[-1] in (VALUES, "exact"):
        return f"the values of {path.rpartition('.')[0]} differ"
    texts = [text if len(text) <= 80 else f"{text[:77]}..." for text in (repr(there), repr(here))]
    return f"{path} is {texts[0]} there, {texts[1]} here"


def _sampling(task: Task, config: RunConfig, defaults: bool) -> Plain:
    """The rule with its arguments; a cohort given as a fraction equals the same cohort given as a number."""
    told: Plain = portrait(config.sampling, defaults)
    told.pop("cohort", None)
    return {**told, "size": config.sampling.size(task.population)}


def _engine(config: RunConfig) -> Plain:
    """The engine and its device; how long it waits for remote nodes may change from session to session."""
    engine = config.engine
    kind = engine if isinstance(engine, str) else _registered(engine) or type(engine).__qualname__
    rule = cast(type[Engine], registry.find("engine", kind)) if isinstance(engine, str) else engine
    given = (config.engine_options if isinstance(engine, str) else _options_of(engine)) if rule.fixed_options else {}
    options = {name: value for name, value in given.items() if name not in rule.free_options}
    return {"kind": kind, "device": str(config.device), "options": portrait(options)}


def _options_of(engine: Engine) -> Mapping[str, Any]:
    """What an engine object was made with, but for defaults; what a class that nobody registered holds is its own."""
    known = is_dataclass(engine) and _registered(engine) is not None
    told: Plain = portrait(engine, defaults=False) if known else {}
    return {name: value for name, value in told.items() if name != "kind"}


def _registered(engine: object) -> str | None:
    try:
        return registry.name_of("engine", type(engine))
    except FedalloyError:
        return None


def other_data(found: Plain, task: Task) -> list[str]:
    """Where a task's data differ from those that the run with the identity ``found`` was made on."""
    there, here = found.get("task", {}), data_of(task)
    known = {name: value for name, value in there.items() if name in here}
    return list(_differences(known, here, {}, "task.").values())


def is_task_of(found: Plain, task: Task) -> bool:
    """Whether a run with the identity ``found`` was made on these data with this model, however a recipe calls them."""
    return bool(found.get("task") == {**data_of(task), "model": _model(task.objective)})


def data_of(task: Task) -> Plain:
    """The clients and their examples; a task with remote data describes itself."""
    said = task.fingerprint()
    if said is not None:
        told: Plain = portrait(said)
        return told
    known = {"clients": task.population, "names": portrait(task.names)}
    if not isinstance(task, FederatedTask):
        return {**known, **_witnessed(task)}
    pools = task.pools
    parts: Plain = {part: {"x": portrait(pool.x), "y": portrait(pool.y)} for part, pool in pools.items()}
    sizes = digest(*(owned for pool in pools.values() for owned in (pool.start, pool.size)))
    common = task.global_test
    return {
        **known, **parts, "sizes": {"exact": sizes}, "newcomers": task.newcomers, "bounds": portrait(task.bounds),
        "global_test": None if common is None else {"x": portrait(common.x), "y": portrait(common.y)},
        "classifier": None if task.classifier is None else _model(task.classifier),
    }  # fmt: skip


def _witnessed(task: Task) -> Plain:
    """For data that are generated on access: the examples of a few clients stand for all."""
    drawn = task.to("cpu")
    ids = torch.linspace(0, task.population - 1, min(_WITNESSES, task.population)).round().long()
    found: Plain = {}
    for part in ("train", "valid", "test"):
        block = drawn.data(part, ids)
        rows = [block.client(place) for place in range(len(ids))]
        found[part] = {
            "sizes": [len(row) for row in rows],
            "x": {VALUES: _digest(row.x for row in rows)}, "y": {VALUES: _digest(row.y for row in rows)},
        }  # fmt: skip
    return found


def _digest(examples: Iterable[Inputs]) -> str:
    return digest(*(leaf for one in examples for leaf in inputs.leaves(one)))


def _model(objective: Objective) -> Plain:
    """The structure, the loss and the leaves that stay frozen."""
    structure = objective.structure
    loss = objective.loss_name or portrait(objective.loss_rule)
    return {
        "structure": {"exact": digest(type(objective).__qualname__ if structure is None else repr(structure))},
        "loss": loss, "frozen": _leaves(objective.frozen),
        **({} if objective.unit == "examples" else {"unit": objective.unit}),
        **({} if objective.buckets is None else {"buckets": portrait(objective.buckets)}),
        **({} if objective.augmentation is None else {"augmentation": portrait(objective.augmentation)}),
    }  # fmt: skip


def _leaves(leaves: Mapping[str, torch.Tensor]) -> Plain:
    names = sorted(leaves)
    form = [f"{name} {leaves[name].dtype} {list(leaves[name].shape)}" for name in names]
    return {"form": {"exact": digest("\n".join(form))}, VALUES: digest(*(leaves[name] for name in names))}
