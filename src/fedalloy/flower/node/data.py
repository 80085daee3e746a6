"""A node's own data: a file or folder, what a function returns, or (for trials) its share of the recipe's data.

A file is a table (``.csv``, ``.parquet``), arrays (``.npz``) or a query of a database (``.sql``,
:mod:`fedalloy.tasks.sources.sql`). A folder holds one file for each part, ``train``, ``valid`` and ``test``, or a
single file of any name, which is then split according to the recipe; it may also hold ``x.npy`` and ``y.npy``, or one
folder of images per class (:mod:`fedalloy.tasks.sources.files`). A function returns a pair ``(x, y)``, which is split,
a dict of pairs by part, a torch ``Dataset``, a frame, or a dataset of Hugging Face
(:mod:`fedalloy.tasks.sources.one_client`). Missing values are filled, where ``columns.missing`` says how, from the
node's own training part.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from fedalloy.core import inputs, registry
from fedalloy.core.errors import DataError, RegistryError, SpecError
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart, Objective
from fedalloy.core.types import Examples
from fedalloy.flower.config import FROM_RECIPE
from fedalloy.flower.node.leaves import frozen_digest
from fedalloy.flower.node.limits import check_size
from fedalloy.flower.node.policy import Policy
from fedalloy.flower.protocol.header import Refused
from fedalloy.flower.protocol.orders import RuleSpec, TaskSpec, TrialSpec
from fedalloy.tasks.assembly import as_dataset, as_factory, as_precision, make_objective, make_task, with_floats
from fedalloy.tasks.datasets.base import Dataset, as_pair
from fedalloy.tasks.examining import LabelLimits, check_examples
from fedalloy.tasks.imputing import Impute, Imputer, count_gaps, without_gaps
from fedalloy.tasks.kinds import LOSSES, outputs_for
from fedalloy.tasks.losses.loss import choose
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.tasks.precision import reading_as
from fedalloy.tasks.probing import ROWS
from fedalloy.tasks.sources.files import SCHEMA
from fedalloy.tasks.sources.one_client import ClientSource, read_function, read_path
from fedalloy.tasks.sources.sql import CONNECTION
from fedalloy.tasks.splits import split_client
from fedalloy.tasks.standardise import Scaler, changed_parts

PARTS: tuple[DataPart, ...] = ("train", "valid", "test")
Parts = dict[DataPart, Examples]
NO_POLICY = Policy()


@dataclass(frozen=True)
class LocalTask:
    """The model and one client's examples."""

    objective: Objective
    parts: Parts
    filled: int = 0
    """How many missing values were filled."""

    def examples(self, part: DataPart) -> Examples:
        """The examples of a part."""
        return self.parts[part]

    @cached_property
    def frozen(self) -> str | None:
        """A hash of the leaves that are neither trained nor sent; None if there are none."""
        return frozen_digest(self.objective)


class MakeTask(Protocol):
    """The task of one client: :func:`local_task`, or the same with a cache."""

    def __call__(
        self, source: str, client: int, spec: TaskSpec, device: str = "cpu", policy: Policy = NO_POLICY
    ) -> LocalTask: ...


def local_task(source: str, client: int, spec: TaskSpec, device: str = "cpu", policy: Policy = NO_POLICY) -> LocalTask:
    """The task of one client; ``spec`` is the server's description of model and data, ``source`` the node's data.

    Nothing from the server names a file or a function: those are in ``source`` and in the policy.
    """
    if source == FROM_RECIPE:
        return _share(client, spec, device, policy)
    _check_model(spec, policy)
    with reading_as(as_precision(spec.dtype)):
        return _own(_own_source(source, client), source, client, spec, device)


def _own_source(source: str, client: int) -> ClientSource:
    """The node's own data. The text of an error in them may quote them or their schema, and is not for the server,
    which is told what is wrong with a spec (:mod:`fedalloy.flower.node.answer`)."""
    try:
        return read_source(source, client)
    except (SpecError, RegistryError) as error:
        raise DataError(str(error)) from error


def _own(found: ClientSource, source: str, client: int, spec: TaskSpec, device: str) -> LocalTask:
    """The task of one client on what was read from its own source."""
    parts = {name: _checked(*pair, spec, source, found.impute) for name, pair in found.parts.items()}
    filled = sum(count_gaps(one.x) for one in parts.values())
    if set(parts) == {""}:
        parts = _split(parts[""], client, spec)
    empty = _taken(parts["train"], slice(0))
    whole: Parts = {part: parts.get(part, empty) for part in PARTS}
    if found.impute != "none":
        whole = changed_parts(whole, Imputer.by(found.impute))
    objective = _objective(spec, whole["train"].x)
    if not objective.takes_integers:
        whole = {part: Examples(with_floats(one.x), one.y) for part, one in whole.items()}
    if spec.standardise == "client":
        whole = changed_parts(whole, Scaler.learn)
    placed = {part: _placed(one, device, objective.dtype) for part, one in whole.items()}
    return LocalTask(objective.to(device).hollowed(), placed, filled)


def read_source(source: str, client: int) -> ClientSource:
    """What a node's own data are, by part, as they were read: a file, a folder, or what a function returns."""
    return read_function(source, client) if ":" in source else read_path(Path(source).expanduser())


def _objective(spec: TaskSpec, x: Inputs) -> ModuleObjective:
    """The model, whose size was checked before; ``x`` are the node's examples, of which it sees a few."""
    return make_objective(
        spec.shape, spec.classes, _model(spec), loss=_spec(spec.loss), dtype=spec.dtype, trainable=spec.trainable,
        bounds=spec.bounds, kind=spec.kind, targets=spec.targets, unit=spec.unit, augment=_augment(spec),
        buckets=spec.buckets, ignore_index=spec.ignore_index,
        example=inputs.take(x, slice(ROWS)) if inputs.length(x) else None,
    )  # fmt: skip


def _check_model(spec: TaskSpec, policy: Policy) -> None:
    loss = choose(_spec(spec.loss) or LOSSES[spec.kind or ("classification" if spec.classes else "regression")])
    outputs = outputs_for(spec.kind, loss, spec.targets, spec.classes)
    own = spec.model is not None and spec.model.kind in policy.models
    check_size(as_factory(_model(spec), spec.shape, outputs, spec.bounds), policy.max_parameters, own=own)


def _augment(spec: TaskSpec) -> dict[str, Any] | None:
    return None if spec.augment is None else spec.augment.model_dump()


def _model(spec: TaskSpec) -> dict[str, Any] | None:
    return None if spec.model is None else spec.model.to_spec()


def remembering(make: MakeTask, most: int = 2) -> MakeTask:
    """The same function with a cache of its latest results: a process that carries out many orders reads its data
    once, and again for another task or when a file in the node's folder has changed."""
    known: dict[str, LocalTask] = {}

    def remembered(
        source: str, client: int, spec: TaskSpec, device: str = "cpu", policy: Policy = NO_POLICY
    ) -> LocalTask:
        what = json.dumps([source, client, repr(spec), device, repr(policy), _stamps(source)])
        known[what] = known.pop(what) if what in known else make(source, client, spec, device, policy)
        for oldest in list(known)[:-most]:
            del known[oldest]
        return known[what]

    return remembered


def _stamps(source: str) -> list[tuple[str, int, int]]:
    """Modification times and sizes of the files in a folder, or of a file and what describes it beside it."""
    place = Path(source).expanduser()
    if ":" in source or source == FROM_RECIPE or not place.exists():
        return []
    found = [place, place.parent / SCHEMA, place.parent / CONNECTION] if place.is_file() else sorted(place.rglob("*"))
    stats = [(str(file), file.stat()) for file in found if file.is_file()]
    return [(name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]


def _share(client: int, spec: TaskSpec, device: str, policy: Policy) -> LocalTask:
    """This client's share of the recipe's own data, for trials."""
    if spec.trial is None:
        raise Refused(
            "this node should use its share of the recipe's own data, and the recipe has none that a server may "
            "name: set 'fedalloy-data' (in node.toml: data) to the node's folder or function"
        )
    data = _trial_data(spec, spec.trial, policy)
    _check_model(spec, policy)
    task = make_task(
        data, _model(spec), _spec(spec.trial.partition), spec.trial.clients, test_fraction=spec.test_fraction,
        valid_fraction=spec.valid_fraction, seed=spec.seed, loss=_spec(spec.loss), standardise=spec.standardise,
        kind=spec.kind, unit=spec.unit, augment=_augment(spec), buckets=spec.buckets,
        noise=spec.trial.noise.model_dump() if spec.trial.noise else None, newcomers=spec.trial.newcomers,
        trainable=spec.trainable, dtype=spec.dtype, device=device,
    )  # fmt: skip
    if client >= task.population:
        raise Refused(f"the recipe's data have {task.population} clients, and the order is for number {client}")
    objective = task.objective.hollowed() if isinstance(task.objective, ModuleObjective) else task.objective
    return LocalTask(objective, {part: task.data(part, torch.tensor([client])).client(0) for part in PARTS})


def _trial_data(spec: TaskSpec, trial: TrialSpec, policy: Policy) -> Dataset:
    check_nameable(trial.dataset)
    _check_numbers(trial.dataset.arguments, policy.max_examples)
    data = as_dataset(trial.dataset.to_spec(), Key.of(spec.seed).fold("task").fold("dataset"))
    shape = inputs.shape_of(data.x)
    if shape != spec.shape or data.classes != spec.classes:
        raise Refused(f"the data are of shape {shape}, the order says {spec.shape}")
    if len(data) > policy.max_examples:
        raise Refused("the recipe's data have more examples than the policy of this node allows (max_examples)")
    return data


def _check_numbers(arguments: Mapping[str, Any], most: int) -> None:
    """Refuse data that would take too long to generate: every number in the arguments is limited like examples."""
    for name, value in arguments.items():
        if isinstance(value, int) and value > most:
            raise Refused(f"the recipe's data have {name} = {value}, the policy of this node allows {most} examples")


def check_nameable(dataset: RuleSpec) -> None:
    """Refuse datasets with free-text arguments, such as a path or the name of a function."""
    loader = registry.find("dataset", dataset.kind)
    hints = typing.get_type_hints(loader)
    texts = [one.name for one in dataclasses.fields(loader) if _is_text(hints[one.name])]  # type: ignore[arg-type]
    if texts:
        raise Refused(
            f"the recipe's data are of the kind '{dataset.kind}', which only a node itself may name: set its "
            "'fedalloy-data' to its folder or function"
        )


def _is_text(hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return False
    return hint in (str, Any) or any(_is_text(inner) for inner in typing.get_args(hint))


def _spec(rule: RuleSpec | None) -> dict[str, Any] | None:
    return None if rule is None else rule.to_spec()


def _checked(x: Any, y: Any, spec: TaskSpec, source: str, impute: Impute) -> Examples:
    """One part as tensors, fitting what the recipe expects; with ``impute`` features may be missing."""
    classes, real = spec.classes, spec.classes == 0 if spec.real is None else spec.real
    features, labels = as_pair(x, y, source)
    if not len(labels):  # shape and dtype of an empty part mean nothing
        features = inputs.zeros(spec.shape, 0, torch.float32)
        labels = torch.empty(0, *spec.targets, dtype=torch.float32 if real else torch.int64)
    if inputs.shape_of(features) != spec.shape:
        raise DataError(f"{source}: examples have shape {inputs.shape_of(features)}, the recipe's {spec.shape}")
    if tuple(labels.shape[1:]) != spec.targets:
        raise DataError(f"{source}: targets have shape {tuple(labels.shape[1:])}, the recipe's {spec.targets}")
    if labels.is_floating_point() != real:
        raise DataError(f"{source}: labels are {labels.dtype}, the recipe expects {classes or 'no'} classes")
    limits = LabelLimits(classes or None, spec.ignore_index)
    seen = features if impute == "none" else without_gaps(features)
    check_examples(seen, labels, limits, torch.zeros(len(labels), dtype=torch.int64), lambda _: source)
    return Examples(features, labels)


def _split(examples: Examples, client: int, spec: TaskSpec) -> dict[str, Examples]:
    """The same split as that of this client in a simulation of all clients."""
    key = Key.of(spec.seed).fold("task").fold("federation")
    mine = split_client(client, examples.y, key, test_fraction=spec.test_fraction, valid_fraction=spec.valid_fraction)
    chosen = {"train": mine.train, "valid": mine.valid, "test": mine.test}
    return {part: _taken(examples, index) for part, index in chosen.items()}


def _taken(examples: Examples, rows: torch.Tensor | slice) -> Examples:
    return Examples(inputs.take(examples.x, rows), examples.y[rows])


def _placed(examples: Examples, device: str, dtype: torch.dtype) -> Examples:
    """On the device, in the model's precision; whole numbers stay what they are."""

    def placed(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    return Examples(inputs.each(placed, examples.x), inputs.each(placed, examples.y))
