"""Datasets, and the interface of their loaders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedalloy.core import inputs, registry, renamed
from fedalloy.core.errors import DataError, SpecError
from fedalloy.core.inputs import Inputs
from fedalloy.core.keys import Key
from fedalloy.core.types import Examples
from fedalloy.tasks.examining import ENCODING, LabelLimits, check_examples
from fedalloy.tasks.imputing import Impute, without_gaps
from fedalloy.tasks.precision import read_as
from fedalloy.tasks.preparing import FrameColumns

_MOST_CLASSES = 1 << 16


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples before they are partitioned.

    ``x`` is a tensor, or a dict of tensors for a model with several inputs.
    ``y`` holds class numbers (int64) or targets (float, then ``classes`` is 0), one or many per example; where there
    are many, ``ignore_index`` is the class number of those that do not count. ``owner`` is the natural
    client of every example (-1: none), ``held_out`` its natural test flag, ``test`` a global test set that
    comes with the data, ``names`` the names of the natural clients, ``bounds`` the lowest and highest value that the
    features can have (None: any), ``notices`` texts about the data for the user. ``part`` says for every example
    whether it is for training (0), validation (1) or testing (2); then nothing is drawn. ``encoding`` maps columns to
    what their numbers mean. Features that are NaN or infinite and labels that are not class numbers are refused; with
    ``impute``, NaN is a missing value, which every client fills from its own training part
    (:mod:`fedalloy.tasks.imputing`). ``columns`` says how a frame's columns became ``x``.
    """

    x: Inputs
    y: Tensor
    classes: int
    owner: Tensor | None = None
    held_out: Tensor | None = None
    test: Examples | None = None
    names: tuple[str, ...] | None = None
    bounds: tuple[float, float] | None = None
    notices: tuple[str, ...] = ()
    ignore_index: int = -100
    part: Tensor | None = None
    encoding: Mapping[str, tuple[str, ...]] | None = None
    impute: Impute = "none"
    columns: FrameColumns | None = None

    def __post_init__(self) -> None:
        for name in ("x", "owner", "held_out", "part"):
            column = getattr(self, name)
            for rows in () if column is None else map(len, inputs.leaves(column)):
                if rows != len(self.y):
                    raise DataError(
                        f"dataset has {len(self.y)} labels but {rows} rows of '{name}': give one per example"
                    )
        if len(self.y) == 0:
            raise DataError("dataset has no examples")
        if self.owner is not None and self.names is not None and int(self.owner.max()) >= len(self.names):
            raise DataError(f"dataset names {len(self.names)} clients but has an owner number {int(self.owner.max())}")
        limits = LabelLimits(self.classes or None, self.ignore_index)
        seen = self.x if self.impute == "none" else without_gaps(self.x)
        check_examples(seen, self.y, limits, self.owner, self._name)
        if self.test is not None:
            check_examples(self.test.x, self.test.y, limits, torch.full((len(self.test),), -1), self._name)

    def __len__(self) -> int:
        return len(self.y)

    def _name(self, client: int) -> str:
        return f"{client} '{self.names[client]}'" if self.names is not None else str(client)


Standardise = Literal["none", "client"]


@dataclass(frozen=True)
class DatasetDefaults:
    """Default settings of a task with this dataset.

    ``standardise = "client"`` scales every client's features by the mean and standard deviation of its training part.
    The first of ``metrics`` is the one used for targets and tables; None: those of the kind of task.
    """

    model: str | None = None
    loss: str | None = None
    metrics: tuple[str, ...] | None = None
    standardise: Standardise = "none"


TWO_CLASSES = DatasetDefaults(loss="binary", metrics=("auroc", "accuracy", "loss"))
"""One logit, binary cross-entropy, scored by AUROC."""


class DatasetLoader(ABC):
    """Loads a dataset: a frozen dataclass of options, registered with ``@register("dataset", name)``."""

    summary: ClassVar[str] = ""
    """One line for listings."""
    files: ClassVar[Mapping[str, str]] = {}
    """The files it reads, with their SHA-256."""
    hint: ClassVar[str] = ""
    """How to get these files."""
    defaults: ClassVar[DatasetDefaults] = DatasetDefaults()
    """The defaults of tasks with this dataset."""

    def __init_subclass__(cls, **given: Any) -> None:
        """Refuse a class that defines its defaults by their old name."""
        super().__init_subclass__(**given)
        renamed.refuse_old_members(cls, renamed.DATASET)

    @abstractmethod
    def load(self, key: Key) -> Dataset:
        """The examples; ``key`` is used only for data that are drawn at random."""

    def open(self, key: Key) -> Any:
        """The examples in memory, or clients that are read on demand (:mod:`fedalloy.tasks.lazy`)."""
        return self.load(key)


def defaults_of(dataset: object) -> DatasetDefaults:
    """The defaults of a loader, given as object, name or spec; those of the base class for anything else.

    >>> defaults_of("berka").metrics
    ('auroc', 'accuracy', 'loss')
    """
    kind = dataset.get("kind") if isinstance(dataset, Mapping) else dataset
    loader = registry.everything("dataset").get(kind) if isinstance(kind, str) else kind
    renamed.refuse_old_attributes(loader, renamed.DATASET)
    found: DatasetDefaults = getattr(loader, "defaults", DatasetDefaults())
    return found


def check_count(dataset: str, name: str, value: int | None, least: int = 0) -> None:
    """Refuse a number below ``least``; None is a number that is not given."""
    if value is not None and value < least:
        raise SpecError(f"dataset '{dataset}': {name} is {value}, allowed is {least} or more")


def from_clients(
    clients: Iterable[tuple[Any, Any]],
    names: Sequence[str] | None = None,
    classes: int | None = None,
    ignore_index: int = -100,
) -> Dataset:
    """A dataset from one ``(x, y)`` per client: arrays, lists or tensors.

    ``classes`` defaults to the largest label plus one; ``ignore_index`` is that of :class:`Dataset`. Clients
    without examples are left out, with a note in the dataset's ``notices``.

    >>> from_clients([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])]).owner
    tensor([0, 0, 1])
    """
    given = _pairs(clients)
    if not given:
        raise DataError("there are no clients: give at least one pair (x, y)")
    labels = list(names) if names is not None else [f"client {k}" for k in range(len(given))]
    made = [as_pair(x, y, label) for (x, y), label in zip(given, labels, strict=True)]
    empty = [label for (_, y), label in zip(made, labels, strict=True) if not len(y)]
    labels = [label for (_, y), label in zip(made, labels, strict=True) if len(y)]
    pairs = [pair for pair in made if len(pair[1])]
    if not pairs:
        raise DataError("no client has an example: give at least one pair (x, y) with rows")
    _check_alike(pairs, labels)
    y = torch.cat([pair[1] for pair in pairs])
    sizes = torch.tensor([len(pair[1]) for pair in pairs])
    owner = torch.repeat_interleave(torch.arange(len(pairs)), sizes)
    if classes is None:
        classes = 0 if y.is_floating_point() else counted_classes(y, ignore_index)
    kept = tuple(labels) if names or empty else None
    told = (*left_out(empty), *regression_notice(y))
    x = inputs.joined([pair[0] for pair in pairs])
    return Dataset(x, y, classes, owner, names=kept, notices=told, ignore_index=ignore_index)


def _pairs(clients: Any) -> list[tuple[Any, Any]]:
    """One pair per client, from any iterable."""
    made = None if isinstance(clients, str | Mapping) or not isinstance(clients, Iterable) else list(clients)
    if made is None or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in made):
        raise DataError("clients must be a list with one pair (x, y) per client")
    return made


def counted_classes(y: Tensor, ignored: int = -100) -> int:
    """The number of classes; refuses numbers that are plainly no labels, such as patient ids."""
    counted = y if y.dim() == 1 else y[y != ignored]
    classes = max(1, int(counted.max()) + 1) if counted.numel() else 1
    if classes > max(_MOST_CLASSES, y.numel()):
        raise DataError(
            f"labels go up to {classes - 1}, with {len(y.unique())} different ones in {len(y)} examples: is this the "
            f"column of labels? If so, {ENCODING}; or give the number of classes"
        )
    return classes


def regression_notice(y: Tensor) -> tuple[str, ...]:
    """A notice if floating-point targets are whole numbers: class numbers would silently be treated as regression."""
    if y.dim() > 1 or not y.is_floating_point() or not bool((y == y.round()).all()):
        return ()
    return (f"targets are of type {y.dtype} and therefore quantities (regression); for classes give whole numbers",)


def third_party(module: str, package: str, purpose: str) -> Any:
    """Import a library that only this purpose needs, or raise an error that names the package to install."""
    try:
        return registry.load(module)
    except ImportError as missing:
        raise DataError(
            f"{purpose} needs the package '{package}', which is not installed: pip install {package}, or the "
            "extra 'data' of fedalloy, which has everything for reading data"
        ) from missing


def as_pair(x: Any, y: Any, who: str) -> tuple[Any, Tensor]:
    """One client's arrays as tensors of the types every model expects; features may be several, in a mapping or in a
    tuple of arrays."""
    if isinstance(x, Mapping):
        named = {name: as_pair(leaf, y, f"{who}, x['{name}']") for name, leaf in x.items()}
        if not named:
            raise DataError(f"{who}: x is a mapping without arrays")
        return {name: pair[0] for name, pair in named.items()}, next(iter(named.values()))[1]
    if isinstance(x, tuple) and x and all(isinstance(leaf, Tensor | np.ndarray) and leaf.ndim for leaf in x):
        placed = [as_pair(leaf, y, f"{who}, x[{place}]") for place, leaf in enumerate(x)]
        return tuple(pair[0] for pair in placed), placed[0][1]
    _check_no_text(x, y, who)
    _check_index(x, y, who)
    try:
        features, targets = _tensor(x), _tensor(y)
        if features.is_complex() or targets.is_complex():
            raise TypeError("they are complex; give real and imaginary parts as separate features")
        features = features.to(read_as()) if features.is_floating_point() else features
    except (TypeError, ValueError, RuntimeError) as cause:
        raise DataError(f"{who}: x and y must be arrays of numbers ({cause})") from cause
    targets = targets.to(read_as() if targets.is_floating_point() else torch.int64)
    if targets.dim() < 1 or features.dim() < 1 or len(features) != len(targets):
        raise DataError(
            f"{who}: x has shape {tuple(features.shape)} and y {tuple(targets.shape)}; "
            "both must have one row per example"
        )
    if targets.dim() == 2 and targets.shape[1] == 1 and not targets.is_floating_point():
        raise DataError(
            f"{who}: y has shape {tuple(targets.shape)}, a column of class numbers; give one number per example, "
            "y.reshape(-1)"
        )
    return features, targets


def indexes_differ(first: Any, second: Any) -> bool:
    """Whether two values of pandas have rows of other names, or in another order."""
    one: Any = getattr(first, "index", None)
    other: Any = getattr(second, "index", None)
    return hasattr(one, "equals") and hasattr(other, "equals") and not one.equals(other)


def bytes_beside_decimals(one: Inputs, other: Inputs) -> bool:
    """Whether features are bytes on one side and decimals on the other, as raw and scaled images are."""
    pairs = zip(inputs.leaves(one), inputs.leaves(other), strict=True)
    return any(a.dtype != b.dtype and torch.uint8 in (a.dtype, b.dtype) and (a + b).is_floating_point()
               for a, b in ((a[:0].flatten(), b[:0].flatten()) for a, b in pairs))  # fmt: skip


def _check_index(x: Any, y: Any, who: str) -> None:
    """Refuse a frame and a series of pandas whose rows have other names, or another order: rows are joined by place."""
    if indexes_differ(x, y):
        raise DataError(
            f"{who}: x and y have different indexes, so it is not known which target belongs to which row. Bring them "
            "in one order, y = y.loc[x.index], or give arrays, whose rows are taken in their order: x.to_numpy(), "
            "y.to_numpy()"
        )


def _check_no_text(x: Any, y: Any, who: str) -> None:
    """Refuse text, with a clearer error than the conversion to tensors would raise."""
    for what, values in (("labels", y), ("features", x)):
        if np.ma.is_masked(values):
            raise DataError(f"{who}: {what} are a masked array, whose gaps would count; fill it, or leave rows out")
        array = values if isinstance(values, Tensor | np.ndarray) else _array(values, what, who)
        if isinstance(array, np.ndarray) and array.dtype.kind in "OSU" and array.size:
            example = next((one for one in array.flat if isinstance(one, str | bytes)), array.flat[0])
            advice = ENCODING if what == "labels" else "turn them into numbers first"
            raise DataError(f"{who}: {what} must be numbers, not text or objects such as {str(example)!r}; {advice}")


def _array(values: Any, what: str, who: str) -> Any:
    try:
        return np.array(values)
    except (TypeError, ValueError, RuntimeError) as cause:
        raise DataError(f"{who}: {what} must be an array of numbers ({cause})") from cause


def left_out(names: Sequence[str]) -> tuple[str, ...]:
    """A notice about clients without examples, if there are any."""
    if not names:
        return ()
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (f"clients without any example are left out: {', '.join(names[:3])}{more}",)


def _tensor(values: Any) -> Tensor:
    return values if isinstance(values, Tensor) else torch.from_numpy(np.array(values))


def _check_alike(pairs: Sequence[tuple[Any, Tensor]], labels: Sequence[str]) -> None:
    """Refuse clients whose features or kinds of label differ."""
    x, y = pairs[0]
    for (other_x, other_y), label in zip(pairs, labels, strict=True):
        if inputs.shape_of(other_x) != inputs.shape_of(x):
            raise DataError(
                f"{label}: examples have shape {inputs.shape_of(other_x)}, those of {labels[0]} "
                f"{inputs.shape_of(x)}; all clients must have the same features"
            )
        if bytes_beside_decimals(other_x, x):
            raise DataError(
                f"{label}: features are of another type than those of {labels[0]}, bytes (uint8) beside decimals, so "
                "that one of them is 255 times larger, or seems so; give all clients the same type"
            )
        if other_y.shape[1:] != y.shape[1:]:
            raise DataError(
                f"{label}: targets have shape {tuple(other_y.shape[1:])}, those of {labels[0]} {tuple(y.shape[1:])}; "
                "pad them to one length (class numbers with ignore_index, -100)"
            )
        if other_y.dtype != y.dtype:
            raise DataError(f"{label}: labels are {other_y.dtype}, those of {labels[0]} {y.dtype}; use one kind")


if not TYPE_CHECKING:  # old names, kept for one version
    __getattr__ = renamed.old_names(__name__, {"Usual": "DatasetDefaults", "usual_of": "defaults_of"})
