"""``fedalloy.task``: a task from any source of data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, Unpack

import torch
from torch import nn

from fedalloy.core.arguments import build
from fedalloy.core.errors import SpecError, nearest
from fedalloy.core.keys import Key
from fedalloy.tasks.assembly import (
    DEFAULT_CLIENTS,
    Spec,
    as_partition,
    as_precision,
    as_standardise,
    kind_and_loss,
    make_task,
    objective_on,
    task_key,
)
from fedalloy.tasks.datasets.base import Dataset, DatasetDefaults, DatasetLoader, defaults_of
from fedalloy.tasks.federation import FederatedTask
from fedalloy.tasks.kinds import METRICS, told
from fedalloy.tasks.lazy import CACHE_MB, LazyClients, LazyTask
from fedalloy.tasks.noise import as_noise
from fedalloy.tasks.partitions.base import Partition
from fedalloy.tasks.partitions.flower_datasets import uses_clients
from fedalloy.tasks.precision import reading_as
from fedalloy.tasks.settings import TaskSettings
from fedalloy.tasks.source import TaskSource, source_of
from fedalloy.tasks.sources.columns import Columns
from fedalloy.tasks.sources.hugging_face import Tokenise
from fedalloy.tasks.sources.opening import as_loader, open_source
from fedalloy.tasks.sources.options import Collate, SourceOptions
from fedalloy.tasks.sources.rows import LazyRows

_NO_CLIENTS = f"neither client ids nor a partition are given: {DEFAULT_CLIENTS} clients are drawn iid"


@dataclass(frozen=True)
class _Opened(DatasetLoader):
    """A dataset that is open, with the defaults of its loader."""

    data: Any
    defaults: DatasetDefaults  # type: ignore[misc]  # a class attribute of other loaders

    def load(self, key: Key) -> Dataset:
        """The dataset."""
        opened: Dataset = self.data
        return opened


def task(
    dataset: Any = "digits",
    model: str | Spec | Callable[..., nn.Module] | nn.Module | None = None,
    partition: str | Spec | Partition | None = None,
    clients: int | None = None,
    *,
    ids: Any = None,
    columns: Columns | Mapping[str, Any] | None = None,
    classes: int | None = None,
    tokenise: Tokenise | None = None,
    collate: Collate | None = None,
    lazy: bool | None = None,
    cache_mb: float = CACHE_MB,
    **settings: Unpack[TaskSettings],
) -> FederatedTask | LazyTask:
    """Clients with data, a model and a loss; all random draws depend on ``seed`` only.

    ``dataset`` is a data set's name or spec, or any source of data (:data:`fedalloy.tasks.sources.opening.SOURCES`). A
    client's data are ``(x, y)``, or ``(train, test)`` or ``(train, valid, test)`` of such pairs, or a mapping with
    these names. Rows that are not sorted by client need ``ids``, the client of every row (or the name of a column, or
    for a torch ``Dataset`` a function of an example), or a ``partition``. ``columns`` says what columns mean
    (:class:`fedalloy.tasks.sources.columns.Columns`), ``tokenise`` makes numbers of a list of texts, ``collate`` one
    batch of all rows (as in a ``DataLoader``), ``classes`` is the number of classes where it is not known (0:
    quantities). Large sources are read on demand (``lazy`` decides), with a cache of ``cache_mb`` megabytes.
    ``settings`` are the other arguments of :func:`fedalloy.tasks.assembly.make_task`: ``seed``, ``loss``, ...

    >>> task([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])], "logistic").population
    2
    """
    given = _columns(columns)
    dealt = partition is not None, uses_clients(partition)
    options = SourceOptions(ids, given, classes, lazy, tokenise, clients, *dealt, collate=collate)
    asked = _settings(settings, classes, clients)
    key, defaults = task_key(asked["seed"]), defaults_of(as_loader(dataset) or dataset)
    opened = _open(dataset, options, key.fold("dataset"), as_precision(asked["dtype"]))
    if isinstance(opened, Dataset):
        data = _told(opened, as_loader(dataset) is None and partition is None and clients is None)
        made = make_task(_Opened(data, defaults), model, partition, _number(clients, dataset, opened), **asked)
        said = {"dataset": dataset, "model": model, "partition": partition, "clients": clients, **asked}
        return _made_from(source_of(said) if options.is_default else None, made)
    if isinstance(opened, LazyRows):
        rule = as_partition(partition, opened)  # type: ignore[arg-type]
        number = clients or rule.clients_for(opened.owner) or DEFAULT_CLIENTS
        opened = opened.deal(rule, number, key.fold("federation"))
    return _lazy_task(opened, model, defaults, key, cache_mb, **asked)


_MORE = {name: one for name, one in inspect.signature(make_task).parameters.items() if one.kind is one.KEYWORD_ONLY}
_OWN = [one for one in inspect.signature(task).parameters.values() if one.kind is not one.VAR_KEYWORD]
task.__signature__ = inspect.signature(task).replace(parameters=[*_OWN, *_MORE.values()])  # type: ignore[attr-defined]


def _open(source: Any, options: SourceOptions, key: Key, dtype: torch.dtype) -> Any:
    """The source, read in the precision of the task."""
    with reading_as(dtype):
        return open_source(source, options, key)


def _columns(given: Columns | Mapping[str, Any] | None) -> Columns | None:
    """The roles of columns, from a table too."""
    if given is None or isinstance(given, Columns):
        return given
    if not isinstance(given, Mapping):
        raise SpecError(f"columns says what columns mean, columns={{'label': 'ill', 'client': 'site'}}, got {given!r}")
    made: Columns = build(Columns, given, "columns")
    return made


def _made_from(source: TaskSource | None, task: FederatedTask) -> FederatedTask:
    """The task with its source, which is no argument, so that no changed copy inherits it."""
    object.__setattr__(task, "source", source)
    return task


def _settings(given: Mapping[str, Any], classes: int | None, clients: int | None) -> dict[str, Any]:
    """All settings of a task, with their defaults."""
    _check_number("classes", classes, 0)
    _check_number("clients", clients, 1)
    for name in given:
        if name not in _MORE:
            allowed = [*_MORE, *(one.name for one in _OWN)]
            raise SpecError(f"fedalloy.task: unknown argument '{name}'; {nearest(name, allowed)}")
    return _of_quantities({name: one.default for name, one in _MORE.items()} | dict(given), classes)


def _check_number(name: str, given: object, least: int) -> None:
    """Refuse what is no count."""
    if given is not None and (not isinstance(given, Integral) or isinstance(given, bool) or given < least):
        raise SpecError(f"fedalloy.task: {name} must be a whole number of at least {least}, got {given!r}")


def _of_quantities(settings: dict[str, Any], classes: int | None) -> dict[str, Any]:
    """``classes=0`` says that targets are quantities, also where they are whole numbers and nothing else says it."""
    open_still = settings["kind"] is None and settings["loss"] is None
    return {**settings, "kind": "regression"} if classes == 0 and open_still else settings


def _told(data: Dataset, undivided: bool) -> Dataset:
    if data.owner is not None or not undivided:
        return data
    return replace(data, notices=(*data.notices, _NO_CLIENTS))


def _number(clients: int | None, source: Any, opened: Dataset) -> int | None:
    """The number of clients that a partition makes; a function of a client's number has used it already."""
    return None if callable(source) and opened.owner is not None else clients


def _lazy_task(
    opened: LazyClients, model: Any, defaults: DatasetDefaults, key: Key, cache_mb: float, **settings: Any
) -> LazyTask:
    """A task whose data are read on demand; settings that need all examples at once are refused."""
    device, dtype = settings["device"], settings["dtype"]
    if settings["synthetic"]:
        raise SpecError("synthetic needs all examples in memory, and these data are read on demand: set lazy=False")
    newcomers = settings["newcomers"]
    opened = opened.with_unseen_last(newcomers, key.fold("federation").fold("newcomers"))
    scaling = as_standardise(settings["standardise"] or defaults.standardise)
    if scaling == "client" and opened.test is not None:
        raise SpecError("standardise = 'client' has no scale for the common test set of these data; leave it out")
    kind, rule = kind_and_loss(opened.first, settings["loss"] or defaults.loss, settings["kind"])
    learn = partial(objective_on, opened.first, device, dtype=dtype, loss=rule, kind=kind, unit=settings["unit"])
    objective = learn(
        defaults.model if model is None else model, trainable=settings["trainable"], augment=settings["augment"],
        buckets=settings["buckets"],
        bounds=opened.bounds if scaling == "none" else None,
    )  # fmt: skip
    if settings["kind"] is None:
        opened = replace(opened, notices=(*opened.notices, *told(kind, opened.sample.y)))
    fractions = {name: settings[name] for name in ("test_fraction", "valid_fraction")}
    made = LazyTask(
        objective, opened, key.fold("federation"), **fractions, standardise=scaling, cache_mb=cache_mb,
        metrics=defaults.metrics or METRICS.get(kind or "", ("loss",)), kind=kind,
        takes_integers=objective.takes_integers, device=device, dtype=as_precision(dtype), newcomers=newcomers,
        noise=as_noise(settings["noise"]), classifier=learn(settings["classifier"]) if settings["classifier"] else None,
    )  # fmt: skip
    opened.check_valid_fraction(made.valid_fraction)
    return made
