"""From a recipe to its algorithm, task and settings, and to the one-run recipe that is stored with a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedalloy.core import registry
from fedalloy.core.algorithm import Algorithm
from fedalloy.core.errors import RegistryError, SpecError, nearest
from fedalloy.core.spec import from_spec
from fedalloy.experiment.config import RunConfig
from fedalloy.experiment.driver import Ending, RoundEvent, run
from fedalloy.experiment.interrupt import Caught, put_off
from fedalloy.experiment.recipe.changes import merge
from fedalloy.experiment.recipe.learned import with_table
from fedalloy.experiment.recipe.reading import parse
from fedalloy.experiment.recipe.tables import EntryTable, Recipe, SamplingTable, SyntheticTable, TaskTable
from fedalloy.experiment.recorder import Recorder
from fedalloy.experiment.records.reading import GIVEN
from fedalloy.experiment.sampling import BySize, Listed, Sampling, UniformSampling
from fedalloy.methods.classifier import ClassifierTraining
from fedalloy.tasks.datasets.base import defaults_of
from fedalloy.tasks.devices import DeviceProfile
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.kinds import METRICS
from fedalloy.tasks.lazy import LazyTask
from fedalloy.tasks.losses.loss import choose
from fedalloy.tasks.making import task

QUICK_ROUNDS, QUICK_SEEDS = 3, 2
_PARTS = ("solver", "weighting", "server")


@dataclass(frozen=True)
class Experiment:
    """One run, ready: ``resolved`` is the recipe that reproduces exactly this run."""

    algorithm: Algorithm
    task: Callable[[], FederatedTask | LazyTask]
    config: RunConfig
    resolved: dict[str, Any]

    def run(
        self,
        folder: str | Path | None = None,
        *,
        resume: bool = False,
        watcher: Callable[[RoundEvent], None] | None = None,
        track: Sequence[str] = (),
        start_over: bool = False,
        allow_engine_change: bool = False,
        caught: Caught | None = None,
    ) -> tuple[Ending, Recorder]:
        """Make the task and run to the end. A signal that stops the run takes effect afterwards; with a list ``caught``
        it is put there instead."""
        with put_off() if caught is None else nullcontext(caught) as caught_signals:
            return run(
                self.algorithm,
                self.task(),
                self.config,
                folder=folder,
                resume=resume,
                recipe=self.resolved,
                watcher=watcher,
                track=track,
                caught=caught_signals,
                start_over=start_over,
                allow_engine_change=allow_engine_change,
            )


def resolve(recipe: Recipe, seed: int | None = None, entry: str | None = None) -> Experiment:
    """One run of a recipe: one seed (default: the first), one entry of its comparison (or none)."""
    single = single_of(recipe, recipe.run.seeds[0] if seed is None else seed, entry)
    resolved = _with_names(single.model_dump(exclude_none=True, exclude={"compare", "grid"}))
    config = config_of(single)
    return Experiment(algorithm_of(single), lambda: task_of(single), config, resolved)


def _with_names(resolved: dict[str, Any]) -> dict[str, Any]:
    """The recipe with rules by name, not by alias, so that results see one rule as one."""
    for category in _PARTS:
        if category in resolved:
            resolved[category]["kind"] = registry.canonical(category, resolved[category]["kind"])
    for wire in resolved.get("wire", ()):
        wire["kind"] = registry.canonical("wire", wire["kind"])
    return resolved


def quick(recipe: Recipe) -> Recipe:
    """The recipe shortened to at most 3 rounds and 2 seeds, scored at the end, and permanently marked as quick."""
    rounds = min(recipe.run.rounds, QUICK_ROUNDS)
    run_table = recipe.run.model_copy(
        update={
            "rounds": rounds,
            "seeds": recipe.run.seeds[:QUICK_SEEDS],
            "tuning_seeds": recipe.run.tuning_seeds[:1],
            "quick": True,
        }
    )
    evaluate = recipe.evaluate.model_copy(update={"every": rounds})
    return recipe.model_copy(update={"run": run_table, "evaluate": evaluate})


def entry_names(recipe: Recipe) -> list[str]:
    """The names of the entries of a comparison."""
    return [entry.name for entry in recipe.compare]


def with_entry(recipe: Recipe, name: str) -> Recipe:
    """The recipe of one entry, with the entry's changes and name."""
    found = [entry for entry in recipe.compare if entry.name == name]
    if not found:
        raise SpecError(f"the recipe's comparison has no '{name}': {nearest(name, entry_names(recipe))}")
    data = recipe.model_dump(exclude_none=True, exclude={"compare"}) | {"name": name}
    return parse(merge(data, _changes(found[0])), f"compare entry '{name}'")


def algorithm_of(recipe: Recipe) -> Algorithm:
    """The named method (default: FedAvg), with the parts that the recipe replaces."""
    from fedalloy.methods.published import named

    table = recipe.algorithm
    name = table.name or "fedavg"
    check_names("algorithm.name", "algorithm", [name])
    base = named(name, **table.arguments)
    parts: dict[str, Any] = {
        category: from_spec(category, getattr(recipe, category).model_dump())
        for category in _PARTS
        if getattr(recipe, category)
    }
    if recipe.wire is not None:
        parts["wire"] = tuple(from_spec("wire", one.model_dump(), f"wire[{i}]") for i, one in enumerate(recipe.wire))
    if table.on_failure:
        parts["on_failure"] = table.on_failure
    return replace(base, **parts)


def task_of(recipe: Recipe) -> FederatedTask | LazyTask:
    """The task of a one-seed recipe: the same for every algorithm."""
    table, dealt = recipe.task, recipe.partition
    if table.dataset == GIVEN:
        raise SpecError("the data and the model of this run were given in Python: continue it there, or name a dataset")
    partition: dict[str, Any] | None = {"kind": dealt.kind, **dealt.arguments} if dealt.kind else None
    if partition is None and dealt.arguments:
        raise SpecError(f"partition: needs a 'kind'; {nearest('', registry.names('partition'))}")
    return task(
        table.dataset,
        table.model,
        partition,
        dealt.clients,
        test_fraction=table.test_fraction,
        valid_fraction=table.valid_fraction,
        seed=recipe.run.seeds[0],
        loss=table.loss,
        kind=table.kind,
        unit=table.unit,
        augment=table.augment.model_dump() if table.augment else None,
        buckets=table.buckets,
        standardise=table.standardise,
        noise=recipe.noise.model_dump() if recipe.noise else None,
        newcomers=dealt.newcomers,
        trainable=None if table.trainable is None else tuple(table.trainable),
        classifier=table.classifier,
        synthetic=table.synthetic.model_dump() if isinstance(table.synthetic, SyntheticTable) else table.synthetic,
        dtype=table.dtype,
        device=recipe.engine.device,
        cache_mb=table.cache_mb,
    )


def scored(recipe: Recipe) -> Recipe:
    """The recipe with its metrics and target metric filled in: by default those of its dataset, or of the kind of its
    task if kind or loss say it. Without either it is a classification, and a run on other data is refused."""
    defaults = defaults_of(recipe.task.dataset).metrics or METRICS[_kind(recipe.task)]
    metrics = recipe.evaluate.metrics or list(defaults)
    target = recipe.run.target_metric or (defaults[0] if defaults[0] in metrics else metrics[0])
    evaluate = recipe.evaluate.model_copy(update={"metrics": metrics})
    run_table = recipe.run.model_copy(update={"target_metric": target})
    return recipe.model_copy(update={"evaluate": evaluate, "run": run_table})


def _kind(table: TaskTable) -> str:
    """The kind of task, as far as the recipe says it."""
    loss = table.loss or defaults_of(table.dataset).loss
    kinds = choose(loss).kinds if loss is not None else ()
    return table.kind or (kinds[0] if kinds else "classification")


def config_of(recipe: Recipe) -> RunConfig:
    """The settings of a one-seed recipe."""
    recipe = scored(recipe)
    table, engine = recipe.run, recipe.engine
    check_names("engine.kind", "engine", [engine.kind])
    return RunConfig(
        rounds=table.rounds,
        seed=table.seeds[0],
        sampling=sampling_of(recipe.sampling),
        devices=DeviceProfile.read(recipe.devices.model_dump(exclude_none=True)),
        evaluate_every=recipe.evaluate.every,
        evaluate_clients=recipe.evaluate.clients,
        evaluate_part=recipe.evaluate.part,
        mix_every=recipe.evaluate.mix_every,
        snapshot_every=recipe.evaluate.snapshots,
        parquet_from=recipe.evaluate.parquet_from,
        metrics=tuple(recipe.evaluate.metrics or ()),
        target=table.target,
        target_metric=table.target_metric or "",
        target_on=table.target_on or "clients",
        stop_at_target=table.stop_at_target,
        patience=table.patience,
        max_norm=table.max_norm,
        max_examples=table.max_examples,
        classifier=ClassifierTraining(**recipe.evaluate.classifier.model_dump()),
        checkpoint_every=table.checkpoint_every,
        client_memory_mb=table.client_memory_mb,
        engine=engine.kind,
        engine_options=engine.arguments,
        device=engine.device,
        threads=engine.threads,
        contributions_mb=engine.contributions_mb,
        contributions_folder=engine.contributions_folder,
    )


def sampling_of(table: SamplingTable) -> Sampling:
    """The sampling rule of a table."""
    if table.kind == "list":
        if table.cohort is not None:
            raise SpecError("sampling.cohort: 'list' takes its cohorts from sampling.cohorts; leave 'cohort' out")
        return Listed(tuple(tuple(cohort) for cohort in table.cohorts or ()))
    if table.cohorts is not None:
        raise SpecError(f"sampling.cohorts: only for kind = 'list', not '{table.kind}'")
    return UniformSampling(table.cohort) if table.kind == "uniform" else BySize(table.cohort)


def check_names(field: str, category: str, names: list[str]) -> None:
    """Refuse names that are not registered; the message names the field."""
    for name in names:
        try:
            registry.find(category, name)
        except RegistryError as error:
            raise SpecError(f"{field}: {error}") from None


def single_of(recipe: Recipe, seed: int, entry: str | None) -> Recipe:
    """One seed, one entry, no comparison, no grid and no search; the number of threads filled in."""
    chosen = with_table(scored(with_entry(recipe, entry) if entry is not None else recipe), seed)
    table = chosen.run.model_copy(update={"seeds": [seed], "tuning_seeds": []})
    engine = chosen.engine.model_copy(update={"threads": chosen.engine.threads or _default_threads()})
    return chosen.model_copy(update={"run": table, "engine": engine, "compare": [], "grid": {}, "tune": None})


def _default_threads() -> int:
    """Stored with the run, so that it resumes with the same sums in the same order."""
    import torch

    return torch.get_num_threads()


def _changes(entry: EntryTable) -> Mapping[str, Any]:
    """The changes of an entry; one named like a published method selects that method, unless it sets another."""
    changes = dict(entry.set)
    says = any(path.split(".")[0] in (*_PARTS, "wire") or path.startswith("algorithm.name") for path in changes)
    table = changes.get("algorithm")
    says = says or (isinstance(table, Mapping) and "name" in table)
    known = entry.name in registry.names("algorithm")
    return changes if says or not known else {"algorithm.name": entry.name, **changes}


def cores() -> int:
    """The number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
