"""Builds a task in one call from data, partition, model and loss, each given as a value, a name or a spec."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from fedalloy.core.arguments import convert
from fedalloy.core.buckets import Buckets
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.inputs import Inputs, Shape, each, is_one_shape, shape_of, take, zeros
from fedalloy.core.keys import Key
from fedalloy.core.spec import from_spec
from fedalloy.tasks.augmentation import Augmentation, as_augmentation
from fedalloy.tasks.computing import check_device
from fedalloy.tasks.datasets.base import Dataset, DatasetDefaults, DatasetLoader, Standardise, defaults_of
from fedalloy.tasks.federation import FederatedTask, federate
from fedalloy.tasks.kinds import LOSSES, METRICS, TaskKind, kind_of, outputs_for, told
from fedalloy.tasks.losses.classes import IGNORED
from fedalloy.tasks.losses.loss import Loss, PerExample, choose
from fedalloy.tasks.losses.model_loss import ModelLoss
from fedalloy.tasks.models.build import NamedModel, checked, resolve, sizes_of
from fedalloy.tasks.noise import LabelNoise, as_noise
from fedalloy.tasks.objective import ModuleObjective
from fedalloy.tasks.partitions.base import Partition
from fedalloy.tasks.partitions.flower_datasets import FlowerDatasets, is_partitioner
from fedalloy.tasks.precision import read_as, reading_as
from fedalloy.tasks.preparing import Preparation
from fedalloy.tasks.probing import ROWS
from fedalloy.tasks.pure_module import BuiltModule, Factory
from fedalloy.tasks.synthetic_part import SyntheticPart, as_part, mixed_in

Spec = Mapping[str, Any]
Precision = Literal["float32", "float64"]
Unit = Literal["examples", "targets"]
DEFAULT_CLIENTS = 10
_SMALLEST_IMAGE = 16


def make_task(
    dataset: str | Spec | DatasetLoader | Dataset = "digits",
    model: str | Spec | Callable[..., nn.Module] | nn.Module | None = None,
    partition: str | Spec | Partition | None = None,
    clients: int | None = None,
    *,
    test_fraction: float = 0.2,
    valid_fraction: float = 0.0,
    seed: int = 0,
    loss: str | Spec | PerExample | Loss | None = None,
    kind: TaskKind | None = None,
    unit: Unit = "examples",
    standardise: Standardise | None = None,
    noise: LabelNoise | Spec | None = None,
    newcomers: int = 0,
    augment: Augmentation | Spec | None = None,
    buckets: Buckets | Sequence[int] | None = None,
    trainable: tuple[str, ...] | None = None,
    classifier: str | Spec | Callable[..., nn.Module] | None = None,
    synthetic: str | Spec | SyntheticPart | None = None,
    dtype: Precision | torch.dtype = "float32",
    device: str | torch.device | None = None,
) -> FederatedTask:
    """Clients with data, a model and a loss; all random draws depend on ``seed`` only.

    ``partition`` defaults to the data's natural clients, or ten iid ones; ``model`` (or a function that builds it, or
    an ``nn.Module``), ``loss`` (or a function) and ``standardise`` to the dataset's. ``kind`` is that of the targets,
    ``unit`` what ``num_examples`` counts. ``noise`` corrupts labels, ``augment`` changes training examples, ``buckets``
    cut padded batches, ``newcomers`` never take part, ``classifier`` is trained on synthetic samples, not ``model``.

    >>> assert make_task("digits", partition={"kind": "dirichlet", "alpha": 0.3}, clients=5).population == 5
    """
    key, defaults, data, scaling = _read(dataset, standardise, seed, as_precision(dtype))
    bounds, (of, rule) = data.bounds if scaling == "none" else None, kind_and_loss(data, loss or defaults.loss, kind)
    learn = partial(objective_on, data, device, loss=rule, dtype=dtype, kind=of, unit=unit)
    chosen, fixed = (defaults.model if model is None else model), {"trainable": trainable, "buckets": buckets}
    objective = learn(chosen, bounds=bounds, augment=augment, **fixed)
    raw, data = data.x, data if objective.takes_integers else _in_floats(data, as_precision(dtype))
    made = federate(
        data, *_dealing(partition, clients, data), objective, test_fraction=test_fraction, newcomers=newcomers,
        valid_fraction=valid_fraction, standardise=scaling, noise=as_noise(noise), key=key.fold("federation"),
    )  # fmt: skip
    made = made if synthetic is None else mixed_in(made, *as_part(synthetic).load())
    shown = {"bounds": bounds, **_shown(data, of, defaults, kind is None, made.prepared.of_types(raw))}
    return replace(made, classifier=learn(classifier) if classifier else None, **shown).to(device, as_precision(dtype))


def _read(
    dataset: str | Spec | DatasetLoader | Dataset, standardise: Standardise | None, seed: int, dtype: torch.dtype
) -> tuple[Key, DatasetDefaults, Dataset, Standardise]:
    """The key of a task, the defaults of its data, the data, and how they are scaled."""
    key, defaults = task_key(seed), defaults_of(dataset)
    with reading_as(dtype):
        data = as_dataset(dataset, key.fold("dataset"))
    return key, defaults, data, as_standardise(standardise or defaults.standardise)


def _shown(
    data: Dataset, kind: TaskKind | None, defaults: DatasetDefaults, inferred: bool, steps: Preparation
) -> dict[str, Any]:
    """The kind of a task, its metrics, what it did to raw rows, and its notices with one about its kind if that was
    inferred."""
    metrics = defaults.metrics or METRICS.get(kind or "", ("loss",))
    notices = (*data.notices, *(told(kind, data.y) if inferred else ()))
    return {"kind": kind, "metrics": metrics, "notices": notices, "prepared": steps}


def kind_and_loss(
    data: Dataset, loss: str | Spec | PerExample | Loss | None, said: str | None = None
) -> tuple[TaskKind | None, Loss]:
    """The kind of task and its loss: each follows from the other and from the targets, unless it is given. A loss by
    name ignores what the data say does not count."""
    rule = None if loss is None else choose(loss)
    kind = kind_of(data.y, rule, said)
    rule = _ignoring(rule or choose(LOSSES[kind or "classification"]), loss, data.ignore_index)
    return kind, rule


def _ignoring(rule: Loss, told: object, ignore_index: int) -> Loss:
    """The loss, ignoring what the data say does not count unless ``told``, what was given, says it itself."""
    says = "ignore_index" in told if isinstance(told, Mapping) else not (told is None or isinstance(told, str))
    if says or rule.ignored in (None, ignore_index):
        return rule
    return replace(rule, ignore_index=ignore_index)  # type: ignore[type-var]


def objective_on(
    data: Dataset, device: str | torch.device | None, model: str | Spec | Callable[..., nn.Module] | None, **more: Any
) -> ModuleObjective:
    """A model for these data, on ``device``."""
    check_device(device, as_precision(more.get("dtype", "float32")))
    more = {"targets": tuple(data.y.shape[1:]), "example": take(data.x, slice(0, ROWS)), **more}
    made = make_objective(shape_of(data.x), data.classes, model, **more)
    if isinstance(made.loss_rule, ModelLoss):
        made.compare_own_loss(take(data.x, slice(0, ROWS)), take(data.y, slice(0, ROWS)))
    return made if device is None else made.to(device)


def make_objective(
    input_shape: Shape,
    classes: int,
    model: str | Spec | Callable[..., nn.Module] | None = None,
    *,
    loss: str | Spec | PerExample | Loss | None = None,
    trainable: tuple[str, ...] | None = None,
    dtype: Precision | torch.dtype = "float32",
    bounds: tuple[float, float] | None = None,
    kind: TaskKind | None = None,
    targets: tuple[int, ...] = (),
    unit: Unit = "examples",
    example: Inputs | None = None,
    augment: Augmentation | Spec | None = None,
    buckets: Buckets | Sequence[int] | None = None,
    ignore_index: int = IGNORED,
) -> ModuleObjective:
    """A model and its loss for examples of this shape; ``classes`` is 0 for regression, ``targets`` the shape of an
    example's targets, ``example`` are a few rows, ``ignore_index`` is the target that does not count unless ``loss``
    says it.

    >>> list(make_objective((4,), 3, "logistic").init(Key.of(0))[0])
    ['output.weight', 'output.bias']
    """
    if unit not in typing.get_args(Unit):
        raise SpecError(f"unit '{unit}': {nearest(str(unit), typing.get_args(Unit))}")
    rule = choose(loss or LOSSES[kind or ("classification" if classes else "regression")])
    rule = _ignoring(rule, loss, ignore_index)
    _check_ignored(rule, targets, classes)
    if rule == ModelLoss() and kind == "multilabel":
        rule = ModelLoss("binary")
    factory = as_factory(model, input_shape, outputs_for(kind, rule, targets, classes), bounds)
    changes = as_augmentation(augment)
    if changes:
        x = zeros(input_shape, 1, torch.float32) if example is None else example
        changes.check(x, torch.zeros(1, *targets), rule.ignored)
    return ModuleObjective(
        factory, rule, trainable=trainable, dtype=as_precision(dtype), unit=unit, example=example, augment=changes,
        buckets=as_buckets(buckets),
    )  # fmt: skip


def _check_ignored(rule: Loss, targets: tuple[int, ...], classes: int) -> None:
    """Refuse to ignore a class where examples have one target: they would still count as examples."""
    if not targets and rule.ignored is not None and 0 <= rule.ignored < classes:
        raise SpecError(
            f"ignore_index = {rule.ignored} is a class, and examples have one target each: leave the examples of this "
            "class out of the data; ignore_index is for tokens and pixels"
        )


def as_buckets(buckets: Buckets | Sequence[int] | None) -> Buckets | None:
    """The lengths to which batches are cut, given as a list."""
    if buckets is None or isinstance(buckets, Buckets):
        return buckets
    return Buckets(tuple(convert(list(buckets), tuple[int, ...], "buckets")))


def with_floats(x: Inputs) -> Inputs:
    """The same examples with their whole numbers as floats, for a model that accepts only those."""
    return each(lambda leaf: leaf if leaf.is_floating_point() else leaf.to(read_as()), x)


def _in_floats(data: Dataset, dtype: torch.dtype) -> Dataset:
    with reading_as(dtype):
        test = None if data.test is None else replace(data.test, x=with_floats(data.test.x))
        return replace(data, x=with_floats(data.x), test=test)


def as_dataset(dataset: str | Spec | DatasetLoader | Dataset, key: Key) -> Dataset:
    """The dataset given by a value, a name or a spec."""
    if isinstance(dataset, Dataset):
        return dataset
    loader: DatasetLoader = dataset if isinstance(dataset, DatasetLoader) else from_spec("dataset", dataset, "dataset")
    return loader.load(key)


def as_partition(partition: str | Spec | Partition | None, data: Dataset) -> Partition:
    """The rule given by a value, a name or a spec; rules inside a rule may be specs too.

    >>> as_partition({"kind": "skewed", "label": "classes", "quantity": {"kind": "power_law"}}, None).label
    Classes(per_client=2)
    """
    if isinstance(partition, Partition):
        return partition
    named = partition.get("kind") if isinstance(partition, Mapping) else partition
    if is_partitioner(named):
        given = partition if isinstance(partition, Mapping) else {}
        return FlowerDatasets(named, {name: value for name, value in given.items() if name != "kind"})
    if partition is None:
        partition = "iid" if data.owner is None else "natural"
    if isinstance(partition, Mapping):
        partition = {name: _inner(name, value) for name, value in partition.items()}
    rule: Partition = from_spec("partition", partition, "partition")
    return rule


def as_factory(
    model: str | Spec | Callable[..., nn.Module] | None,
    input_shape: Shape,
    outputs: int,
    bounds: tuple[float, float] | None = None,
) -> Factory:
    """A function without arguments that builds the model for inputs of this shape and these bounds.

    The default ``model`` is ``cnn`` for images of at least 16 x 16, else ``logistic``. A function gets those of
    ``inputs``, ``input_shape``, ``classes`` and ``bounds`` (the data's lowest and highest value, None if not declared)
    that it has parameters for.
    """
    if not callable(model) and not is_one_shape(input_shape) and not _is_dotted(model):
        raise SpecError(f"examples with {_features(input_shape)}arguments: give the function that builds it as 'model'")
    if model is None:
        model = "cnn" if len(input_shape) == 3 and min(input_shape[1:]) >= _SMALLEST_IMAGE else "logistic"
    if isinstance(model, nn.Module):
        return BuiltModule(model)
    if callable(model):
        return _filled(model, input_shape, outputs, bounds)
    if not isinstance(model, str | Mapping):
        raise SpecError(
            f"model is a {type(model).__name__}: give an nn.Module, the function that builds one, or the name of one"
        )
    spec = {"kind": model} if isinstance(model, str) else dict(model)
    kind = spec.pop("kind", None)
    if not isinstance(kind, str):
        raise SpecError("model: needs a 'kind', the name of a model or 'package.module:function'")
    settings = checked(kind, spec)
    if "bounds" in typing.get_type_hints(resolve(kind)):
        settings = {"bounds": bounds, **settings}
    return NamedModel(kind, input_shape, outputs, settings)


def _inner(name: str, value: Any) -> Any:
    """The label and quantity rules of a composed partition."""
    is_rule = name in ("label", "quantity") or (isinstance(value, Mapping) and "kind" in value)
    return from_spec("partition", value, f"partition.{name}") if is_rule and not isinstance(value, Partition) else value


def _features(shapes: Any) -> str:
    """Features of several shapes in words, and how a model takes them."""
    if isinstance(shapes, Mapping):
        return f"the features {', '.join(shapes)} by name need a model that takes them as keyword "
    return f"{len(shapes)} features in a tuple need a model that takes them as "


def _is_dotted(model: Any) -> bool:
    """Whether a model is named by a function, ``package.module:function``."""
    kind = model.get("kind") if isinstance(model, Mapping) else model
    return isinstance(kind, str) and ":" in kind


def _filled(
    factory: Callable[..., nn.Module],
    input_shape: Shape,
    outputs: int,
    bounds: tuple[float, float] | None,
) -> Factory:
    known = {**sizes_of(input_shape), "classes": outputs, "bounds": bounds}
    taken = inspect.signature(factory).parameters
    wanted = {name: value for name, value in known.items() if name in taken}
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    needed = [name for name, one in taken.items() if one.default is one.empty and one.kind not in several]
    if lacking := [name for name in needed if name not in wanted]:
        called = getattr(factory, "__name__", repr(factory))
        raise SpecError(
            f"the model {called} needs the arguments {', '.join(lacking)}, of which nothing is known here: give a "
            f"function that passes them, lambda: {called}(...). Filled in are {', '.join(known)}"
        )
    return lambda: factory(**wanted)


def _dealing(
    partition: str | Spec | Partition | None, clients: int | None, data: Dataset
) -> tuple[Partition, int | None]:
    """The rule, and the number of clients: as given, as the rule defines it, or the default."""
    rule = as_partition(partition, data)
    told = clients is not None or rule.clients_for(data.owner) is not None
    return rule, clients if told else DEFAULT_CLIENTS


def task_key(seed: int) -> Key:
    """The key of all draws of a task."""
    return Key.of(seed).fold("task")


def as_standardise(standardise: Standardise) -> Standardise:
    """The setting, if it is one."""
    allowed = typing.get_args(Standardise)
    if standardise not in allowed:
        raise SpecError(f"standardise '{standardise}': {nearest(str(standardise), allowed)}")
    return standardise


def as_precision(dtype: Precision | torch.dtype) -> torch.dtype:
    """The dtype of a name."""
    if isinstance(dtype, torch.dtype) and dtype.is_floating_point:
        return dtype
    known = {"float32": torch.float32, "float64": torch.float64}
    if isinstance(dtype, torch.dtype) or dtype not in known:
        raise SpecError(f"dtype '{dtype}': {nearest(str(dtype), known)}")
    return known[dtype]
