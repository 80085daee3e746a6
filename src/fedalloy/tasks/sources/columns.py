"""Tables: which column means what, and how columns become numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedalloy.core.arguments import checked
from fedalloy.core.errors import DataError, SpecError, nearest
from fedalloy.tasks.datasets.base import Dataset, as_pair, counted_classes, left_out, regression_notice
from fedalloy.tasks.imputing import Impute
from fedalloy.tasks.precision import read_as
from fedalloy.tasks.preparing import FrameColumns

LABELS = ("y", "label")
"""Names of the label column that need not be declared."""
UNKNOWN = "(missing)"
"""The category of missing values, where they are imputed."""
_PARTS = {"train": 0, "valid": 1, "validation": 1, "test": 2}


@checked("columns")
@dataclass(frozen=True)
class Columns:
    """The roles of a table's columns.

    ``label`` is the target (default: the column ``y`` or ``label``), ``client`` the natural client of a row, ``split``
    a column with train, valid or test. ``features`` are all other columns unless they are listed, or listed in
    ``ignore``. Columns of text or category become numbers if they are in ``categorical``, a list or a table of the
    allowed values of each; categories that the table itself declares need not be listed. ``encoding`` makes a
    categorical feature one column per value, or one number. ``missing``: values that are missing are refused, their
    rows dropped, or filled with the mean or median of the client's training part; a missing category is then a value
    of its own. ``classes`` are the labels in the order of their numbers (default: sorted).
    """

    label: str | None = None
    features: tuple[str, ...] = ()
    client: str | None = None
    split: str | None = None
    ignore: tuple[str, ...] = ()
    categorical: tuple[str, ...] | dict[str, Any] = ()
    encoding: Literal["one_hot", "codes"] = "one_hot"
    missing: Literal["refuse", "drop", "mean", "median"] = "refuse"
    classes: tuple[str | int, ...] = ()

    def __post_init__(self) -> None:
        for name, values in self.declared.items():
            if len({*values}) < len(values):
                raise SpecError(f"columns: categorical '{name}' lists a value twice")

    @property
    def declared(self) -> dict[str, tuple[str, ...]]:
        """Allowed values of categorical columns, as far as they are given."""
        given = self.categorical if isinstance(self.categorical, Mapping) else {}
        return {name: tuple(map(str, values)) for name, values in given.items()}

    @property
    def impute(self) -> Impute:
        """How the task fills missing numbers."""
        return self.missing if self.missing in ("mean", "median") else "none"


@dataclass(frozen=True, eq=False)
class Column:
    """A column: numbers (missing: NaN), or text (missing: None) with the values that the table declares for it.
    ``whole``: the numbers are whole ones, and decimals only because some are missing."""

    values: NDArray[Any]
    categories: tuple[str, ...] | None = None
    whole: bool = False

    @property
    def kind(self) -> str:
        """number, category, text, or what numpy calls it."""
        if self.categories is not None:
            return "category"
        kinds = {"b": "number", "i": "number", "u": "number", "f": "number", "O": "text", "U": "text", "S": "text"}
        first = next((one for one in self.values if not is_gap(one)), "") if self.values.dtype.kind == "O" else ""
        if not isinstance(first, str | bytes | int | float | np.generic):
            return f"{type(first).__name__} values"
        return kinds.get(self.values.dtype.kind, str(self.values.dtype))

    @property
    def gaps(self) -> NDArray[Any]:
        """Where a value is missing."""
        if self.values.dtype.kind in "fmM":
            empty: NDArray[Any] = np.isnan(self.values)
            return empty
        if self.values.dtype.kind == "O":
            return np.array([is_gap(value) for value in self.values], dtype=bool)
        return np.zeros(len(self.values), dtype=bool)

    def take(self, rows: NDArray[Any]) -> Column:
        """Some rows."""
        return Column(self.values[rows], self.categories, self.whole)


def is_gap(value: Any) -> bool:
    """Whether a value is missing: None, NaN, or the NA and NaT of pandas, which is not imported for it."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating | np.datetime64 | np.timedelta64) and bool(value != value)


Table = dict[str, Column]


@dataclass(frozen=True)
class Roles:
    """The columns of one table by role, all present."""

    label: str
    features: tuple[str, ...]
    client: str | None
    split: str | None

    def in_words(self, table: Table) -> str:
        """The chosen, to be shown before a run."""
        told = ", ".join(f"{name} ({table[name].kind})" for name in self.features[:12])
        more = f" and {len(self.features) - 12} more" if len(self.features) > 12 else ""
        client = f", client '{self.client}'" if self.client else ""
        return f"columns: label '{self.label}' ({table[self.label].kind}){client}, features {told}{more}"


def roles_of(table: Table, columns: Columns, where: str) -> Roles:
    """The role of every column of a table, or an error that names what is missing."""
    names = list(table)
    wanted = [columns.label, columns.client, columns.split, *columns.features, *columns.ignore, *columns.categorical]
    for name in wanted:
        if name is not None and name not in table:
            raise DataError(f"{where} has no column '{name}': {nearest(name, names)}")
    label = columns.label or next((name for name in LABELS if name in table), None)
    both = columns.label is None and all(name in table for name in LABELS)
    taken = {label, columns.client, columns.split, *columns.ignore}
    features = columns.features or tuple(name for name in names if name not in taken)
    if label is None or not features or both:
        raise DataError(
            f"{where} needs feature columns and one column 'y' or 'label'; it has {', '.join(names)}. Name other "
            "columns by role: columns = { label = ..., client = ..., ignore = [...] }"
        )
    check_features(features, label, columns, where)
    return Roles(label, tuple(features), columns.client, columns.split)


def check_features(features: Sequence[str], label: str, columns: Columns, where: str) -> None:
    """Refuse features that have another role as well: a model that sees the label learns nothing else."""
    if len({*features}) < len(features):
        raise SpecError(f"{where}: 'features' lists a column twice")
    taken = {"the label": (label,), "the split": (columns.split or "",), "in 'ignore'": columns.ignore}
    for use, names in taken.items():
        both = [name for name in names if name in features]
        if both:
            raise SpecError(f"{where}: column '{both[0]}' is listed in 'features' and is {use}; give it one meaning")


def encode(
    table: Table,
    columns: Columns,
    where: str,
    owner: Tensor | None = None,
    part: Tensor | None = None,
    names: tuple[str, ...] | None = None,
) -> Dataset:
    """A table as a dataset; ``owner`` and ``part`` are those of every row, unless columns say them."""
    chosen = roles_of(table, columns, where)
    keep, told = _kept(table, columns, chosen, where)
    _check_label_gaps(table[chosen.label], chosen.label, columns, where)
    everyone = _client_names(table, chosen) if not keep.all() else ()
    if not keep.all():
        table = {name: one.take(keep) for name, one in table.items()}
        owner, part = (None if one is None else one[torch.from_numpy(keep)] for one in (owner, part))
    values = category_values(table, columns, chosen, where)
    form = FrameColumns(
        chosen.features, {name: values[name] for name in chosen.features if name in values}, columns.encoding
    )
    x = features_of(table, form, where)
    y, classes = _labels(table[chosen.label], values.get(chosen.label), where)
    features, targets = as_pair(x, y, where)
    if chosen.client is not None:
        owner, names = numbered(table[chosen.client].values, f"{where}: column '{chosen.client}'")
    part = part if chosen.split is None else part_of(table[chosen.split], chosen.split, where)
    lost = [name for name in chosen.features if name not in values and _is_rounded(table[name])]
    told = (*told, *left_out([name for name in everyone if name not in (names or ())]))
    notices = (chosen.in_words(table), *told, *regression_notice(targets), *_told(values), *_rounded(lost))
    classes = classes if classes is not None else 0 if targets.is_floating_point() else counted_classes(targets)
    return Dataset(
        features, targets, classes, owner, names=names, part=part, encoding=values or None, impute=columns.impute,
        notices=notices, columns=form,
    )  # fmt: skip


def numbered(ids: Any, where: str) -> tuple[Tensor, tuple[str, ...]]:
    """The client number of every row from its id, numbered in sorted order, and the ids as names.

    >>> numbered(["b", "a", "b"], "ids")
    (tensor([1, 0, 1]), ('a', 'b'))
    """
    given = ids.numpy() if isinstance(ids, Tensor) else np.asarray(ids)
    if given.ndim != 1:
        raise DataError(f"{where}: client ids must be one value per row, got an array of shape {given.shape}")
    # numpy makes the text "nan" of a gap in a list of texts, so the list itself is looked at
    if Column(given).gaps.any() or (isinstance(ids, list | tuple) and any(is_gap(one) for one in ids)):
        raise DataError(f"{where}: some rows have no client id; fill them or leave these rows out")
    some = ids if isinstance(ids, list | tuple) else given if given.dtype.kind == "O" else ()
    text = {isinstance(one, str) for one in some}
    if len(text) > 1:
        raise DataError(f"{where}: some client ids are text and some are not; make all numbers, or all text")
    if given.dtype.kind == "O":
        whole = all(isinstance(one, int | np.integer) for one in given)
        given = given.astype(np.int64 if whole else str)  # numbers have one order, whatever holds them
    known, owner = np.unique(given, return_inverse=True)
    return torch.from_numpy(owner.astype(np.int64)), tuple(map(str, known.tolist()))


def category_values(table: Table, columns: Columns, chosen: Roles, where: str) -> dict[str, tuple[str, ...]]:
    """The values of every encoded column, in the order of their numbers."""
    wanted = set(columns.categorical) | {name for name in chosen.features if table[name].kind == "category"}
    wanted |= {chosen.label} if table[chosen.label].kind in ("category", "text") or columns.classes else set()
    found: dict[str, tuple[str, ...]] = {}
    for name in [*chosen.features, chosen.label]:
        if name not in wanted:
            continue
        there = sorted({text_of(value) for value in table[name].values[~table[name].gaps]})
        given = tuple(map(str, columns.classes)) if name == chosen.label and columns.classes else None
        known = given or columns.declared.get(name) or table[name].categories or tuple(there)
        strange = sorted(set(there) - set(known))
        if strange:
            raise DataError(f"{where}: column '{name}' has the value '{strange[0]}', allowed are {', '.join(known)}")
        gaps = bool(table[name].gaps.any()) or (columns.impute != "none" and name in columns.declared)
        found[name] = (*known, UNKNOWN) if gaps and name != chosen.label and UNKNOWN not in known else known
    return found


def _client_names(table: Table, chosen: Roles) -> tuple[str, ...]:
    """The clients that a column names, before rows are dropped."""
    if chosen.client is None:
        return ()
    column = table[chosen.client]
    return numbered(column.values[~column.gaps], f"column '{chosen.client}'")[1]


def whole_rows(table: Table, chosen: Roles) -> NDArray[Any]:
    """Where neither the label nor a feature is missing."""
    found: NDArray[Any] = ~np.any([table[name].gaps for name in (chosen.label, *chosen.features)], axis=0)
    return found


def _kept(table: Table, columns: Columns, chosen: Roles, where: str) -> tuple[NDArray[Any], tuple[str, ...]]:
    """The rows that are kept, and a notice; missing values that nobody asked to fill or drop are refused."""
    gaps = {name: table[name].gaps for name in (chosen.label, *chosen.features)}
    missing = {name: int(found.sum()) for name, found in gaps.items() if found.any()}
    keep = whole_rows(table, chosen)
    if not missing:
        return np.ones_like(keep), ()
    if columns.missing == "drop":
        if not keep.any():
            raise DataError(f"{where}: every row has a missing value; impute them: columns = {{ missing = 'mean' }}")
        return keep, (f"{int((~keep).sum())} of {len(keep)} rows have missing values and are dropped",)
    refused = (
        missing if columns.missing == "refuse" else {name: missing[name] for name in missing if name == chosen.label}
    )
    if refused:
        counts = ", ".join(f"'{name}' ({count} of {len(keep)})" for name, count in refused.items())
        label = "; a missing label cannot be imputed" if chosen.label in refused else ""
        raise DataError(
            f"{where}: values are missing in {counts}{label}; set columns = {{ missing = 'drop' }} to leave these rows "
            "out, or 'mean' or 'median' to fill features from each client's training part"
        )
    told = ", ".join(f"'{name}' ({count})" for name, count in missing.items())
    return np.ones_like(keep), (f"missing values are filled with each client's {columns.missing}: {told}",)


def features_of(table: Table, form: FrameColumns, where: str) -> NDArray[Any]:
    """The features of a table as one matrix of numbers."""
    return np.concatenate([_feature(table[name], name, form, where) for name in form.features], axis=1)


def _feature(column: Column, name: str, form: FrameColumns, where: str) -> NDArray[Any]:
    """A feature as a matrix of numbers."""
    values = form.values
    if name not in values:
        return numbers(column, name, where).reshape(-1, 1)
    codes = _codes(column, values[name])
    if form.encoding == "codes":
        return codes.astype(np.float32).reshape(-1, 1)
    table: NDArray[Any] = np.eye(len(values[name]), dtype=np.float32)
    found: NDArray[Any] = table[codes]
    return found


def numbers(column: Column, name: str, where: str) -> NDArray[Any]:
    """A column as numbers; dates and text, also text that looks like numbers, are refused."""
    if column.kind != "number":
        raise DataError(
            f"{where}: every feature column must hold numbers ('{name}' holds {column.kind}): name it in 'categorical' "
            "of the columns (in a folder: schema.toml) to encode it, or in 'ignore' to leave it out"
        )
    return column.values.astype(_float_type())


def _is_rounded(column: Column) -> bool:
    """Whether whole numbers are so large that features in 32 bits cannot tell them apart."""
    if column.values.dtype.kind not in "iu":
        return False
    return bool((column.values.astype(_float_type()).astype(np.float64) != column.values).any())


def _float_type() -> type[np.floating[Any]]:
    return np.float64 if read_as() == torch.float64 else np.float32


def _rounded(names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    return (
        f"numbers above 16777216 in {', '.join(names[:3])} are rounded to 32 bits: subtract an offset, or scale them",
    )


def _codes(column: Column, values: Sequence[str]) -> NDArray[Any]:
    place = {value: number for number, value in enumerate(values)}
    gap = place.get(UNKNOWN, -1)
    codes = [gap if hole else place[text_of(one)] for one, hole in zip(column.values, column.gaps, strict=True)]
    return np.array(codes, dtype=np.int64)


def _check_label_gaps(column: Column, name: str, columns: Columns, where: str) -> None:
    """Refuse whole numbers that are decimals perhaps only because some are missing: classes would be quantities."""
    if column.values.dtype.kind != "f" or column.whole or columns.classes or not column.gaps.any():
        return
    there = column.values[~column.gaps]
    if len(there) and bool((there == np.rint(there)).all()):
        raise DataError(
            f"{where}: labels are missing in '{name}', and the others are whole numbers of a decimal type, which can "
            "mean classes or quantities. Drop these rows first and give the type that you mean: "
            f"frame.dropna(subset=['{name}']).astype({{'{name}': 'int64'}}) for classes, 'float64' for quantities"
        )


def _labels(column: Column, values: Sequence[str] | None, where: str) -> tuple[Any, int | None]:
    if values is not None:
        return _codes(column, values), len(values)
    if column.kind != "number":
        raise DataError(f"{where}: the label column holds {column.kind}, not numbers or text")
    return (column.values.astype(np.int64) if column.whole else column.values), None


def part_of(column: Column, name: str, where: str) -> Tensor:
    """The part of every row from a column with train, valid or test."""
    texts = [text_of(value) for value in column.values]
    strange = sorted(set(texts) - set(_PARTS))
    if strange:
        raise DataError(f"{where}: column '{name}' says '{strange[0]}'; allowed are train, valid and test")
    return torch.tensor([_PARTS[text] for text in texts])


def text_of(value: Any) -> str:
    """A value of a category as text; whole numbers without a decimal point."""
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return value.decode() if isinstance(value, bytes) else str(value)


def _told(values: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    if not values:
        return ()
    told = [f"{name} = {', '.join(some[:6])}{', ...' if len(some) > 6 else ''}" for name, some in values.items()]
    return (f"categories and their order: {'; '.join(told)}",)
