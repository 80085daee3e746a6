"""Datasets of Hugging Face ``datasets`` and Flower Datasets: columns by role, images decoded, text tokenised."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedalloy.core.errors import DataError, SpecError, nearest
from fedalloy.core.own_code import own_code
from fedalloy.core.types import Examples
from fedalloy.tasks.sources.client_data import Pair
from fedalloy.tasks.sources.columns import LABELS, Column, Columns, check_features, numbered, part_of, text_of
from fedalloy.tasks.sources.rows import LazyRows, RowReader

Tokenise = Callable[[list[str]], Any]
_IMAGE_LABELS = (*LABELS, "labels", "fine_label", "target")


@dataclass(frozen=True, eq=False)
class HubRows(RowReader):
    """The rows of a ``datasets.Dataset``: features and label as arrays."""

    dataset: Any
    features: tuple[str, ...]
    label: str
    classes: tuple[str, ...] | None = None
    tokenise: Tokenise | None = None
    _place: dict[str, int] = field(init=False, default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._place.update({name: number for number, name in enumerate(self.classes or ())})

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, rows: Sequence[int]) -> Pair:
        found = self.dataset[list(rows)]
        missing = [name for name in (*self.features, self.label) if name not in found]
        if missing:
            raise DataError(
                f"column '{missing[0]}' is not among what the dataset gives, {', '.join(found)}: take its transform "
                "off (dataset.reset_format()), or map it into columns"
            )
        arrays = {name: self._feature(name, found[name]) for name in self.features}
        return _together(arrays), self._labels(found[self.label])

    def labels(self) -> Tensor:
        """The label column alone: images and texts are not read."""
        return torch.as_tensor(self._labels(self.dataset.select_columns([self.label])[:][self.label]))

    def _labels(self, values: list[Any]) -> NDArray[Any]:
        _check_there(values, self.label)
        if self.classes is None or not values:
            return np.asarray(values)
        feature = self.dataset.features[self.label]
        names = feature.names if kind_of(feature) == "class" else None
        called = [names[value] if names and value >= 0 else text_of(value) for value in values]
        strange = next((value for value in called if value not in self._place), None)
        if strange is not None:
            raise DataError(f"label '{strange}' is none of the classes {', '.join(self.classes)}")
        return np.array([self._place[value] for value in called], dtype=np.int64)

    def _feature(self, name: str, values: list[Any]) -> Any:
        kind = kind_of(self.dataset.features[name])
        if kind == "image":
            return _images(values, name)
        if kind == "text":
            assert self.tokenise is not None
            with own_code("the tokenising function", DataError):
                made = self.tokenise(list(values))
            return _tokens(made, len(values))
        _check_there(values, name)
        try:
            return np.asarray(values)
        except ValueError as cause:
            raise DataError(f"column '{name}' has lists of different lengths ({cause}); pad them first") from cause


def from_hub(
    dataset: Any, columns: Columns, tokenise: Tokenise | None = None, owner: Tensor | None = None, **more: Any
) -> LazyRows:
    """A ``datasets.Dataset`` as rows, or a ``DatasetDict``: its ``train`` for clients, its ``test`` for all."""
    refuse_stream(dataset)
    notices: tuple[str, ...] = ()
    test: Examples | None = None
    if isinstance(dataset, Mapping):
        if "train" not in dataset:
            raise DataError(f"the DatasetDict has the splits {', '.join(dataset)} and no 'train'; give one split of it")
        unused = [name for name in dataset if name not in ("train", "test")]
        notices = (f"splits that are not used: {', '.join(unused)}",) if unused else ()
        reader = _reader(dataset["train"], columns, tokenise)
        if "test" in dataset:
            test = HubRows(dataset["test"], reader.features, reader.label, reader.classes, tokenise).examples(
                range(len(dataset["test"]))
            )
        dataset = dataset["train"]
    else:
        reader = _reader(dataset, columns, tokenise)
    names = more.pop("names", None)
    if columns.client is not None and owner is None:
        owner, names = numbered(_column(dataset, columns.client), f"column '{columns.client}'")
    if columns.split is not None:
        if more.get("part") is not None or test is not None:
            raise SpecError(
                f"columns.split names '{columns.split}', and the dataset has a split 'test'; use one of them"
            )
        told_parts = np.array(_column(dataset, columns.split), dtype=object)
        more["part"] = part_of(Column(told_parts), columns.split, "the dataset")
    kinds = ", ".join(f"{name} ({kind_of(dataset.features[name])})" for name in reader.features)
    told = f"columns: label '{reader.label}', features {kinds}"
    encoding = {reader.label: reader.classes} if reader.classes else None
    return LazyRows(
        reader, len(reader.classes) if reader.classes else None, owner, names, (told, *notices),
        test=test, encoding=encoding, **more,
    )  # fmt: skip


def refuse_stream(dataset: Any) -> None:
    """Refuse a dataset, or a dict of them, that was loaded with ``streaming=True``."""
    kinds = {type(one).__name__ for one in (dataset.values() if isinstance(dataset, Mapping) else [dataset])}
    if "IterableDataset" in kinds:
        raise DataError("an IterableDataset of Hugging Face has no rows by number: load it without streaming=True")


def _column(dataset: Any, name: str) -> list[Any]:
    """One column alone; the others are not read."""
    return list(dataset.select_columns([name])[:][name])


def from_flower(source: Any, columns: Columns, tokenise: Tokenise | None = None) -> LazyRows:
    """A ``FederatedDataset`` of Flower Datasets: its partitions are the clients, an unpartitioned ``test`` is "
    "for all."""
    splits = list(source.partitioners)
    unknown = [split for split in splits if split not in ("train", "test")]
    if unknown or "train" not in splits:
        raise DataError(
            f"the FederatedDataset partitions {', '.join(splits)}; partition 'train', and 'test' as well if "
            "clients have test parts of their own"
        )
    from fedalloy.tasks.datasets.base import third_party

    hub = third_party("datasets", "datasets", "a FederatedDataset")
    pieces, owner, part = [], [], []
    for number, split in ((0, "train"), (2, "test")):
        if split not in splits:
            continue
        source.load_partition(0, split)
        for client in range(source.partitioners[split].num_partitions):
            pieces.append(source.load_partition(client, split))
            owner.append(torch.full((len(pieces[-1]),), client))
            part.append(torch.full((len(pieces[-1]),), number))
    parts = torch.cat(part) if "test" in splits else None
    made = from_hub(hub.concatenate_datasets(pieces), columns, tokenise, owner=torch.cat(owner), part=parts)
    return made if made.part is not None else _with_test(made, source, tokenise)


def _with_test(made: LazyRows, source: Any, tokenise: Tokenise | None) -> LazyRows:
    """The same with the whole split ``test``, if there is one, as the test set for all."""
    from dataclasses import replace

    try:
        test = source.load_split("test")
    except (ValueError, KeyError):  # how Flower Datasets says that there is no such split
        return made
    reader = made.reader
    assert isinstance(reader, HubRows)
    rows = HubRows(test, reader.features, reader.label, reader.classes, tokenise)
    return replace(made, test=rows.examples(range(len(test))))


def kind_of(feature: Any) -> str:
    """What a column of ``datasets`` holds: image, text, class, number or array."""
    name = type(feature).__name__
    if name in ("Image", "ClassLabel"):
        return {"Image": "image", "ClassLabel": "class"}[name]
    if name == "Value":
        return "text" if "string" in feature.dtype else "number"
    return "array"


def _reader(dataset: Any, columns: Columns, tokenise: Tokenise | None) -> HubRows:
    if columns.categorical or columns.missing != "refuse":
        raise SpecError("columns: 'categorical' and 'missing' are for frames and tables; give dataset.to_pandas()")
    names = list(dataset.features)
    for name in (columns.label, columns.client, columns.split, *columns.features, *columns.ignore):
        if name is not None and name not in names:
            raise DataError(f"the dataset has no column '{name}': {nearest(name, names)}")
    labels = [name for name in _IMAGE_LABELS if name in names]
    if columns.label is None and len(labels) != 1:
        raise DataError(f"which column is the label? The dataset has {', '.join(names)}: columns = {{ label = ... }}")
    label = columns.label or labels[0]
    features = columns.features or tuple(
        name for name in names if name not in {label, columns.client, columns.split, *columns.ignore}
    )
    check_features(features, label, columns, "the dataset")
    texts = [name for name in features if kind_of(dataset.features[name]) == "text"]
    if tokenise is not None and not texts:
        raise SpecError("tokenise means nothing here, because no feature column holds text; leave it out")
    if texts and tokenise is None:
        raise DataError(
            f"column '{texts[0]}' holds text: give tokenise=, a function from a list of texts to an array of "
            "numbers, or name it in columns 'ignore'"
        )
    if not features:
        raise DataError(f"no feature column is left; the dataset has {', '.join(names)}")
    return HubRows(dataset, features, label, _class_names(dataset, label, columns), tokenise)


def _class_names(dataset: Any, label: str, columns: Columns) -> tuple[str, ...] | None:
    if columns.classes:
        return tuple(map(str, columns.classes))
    feature = dataset.features[label]
    if kind_of(feature) == "class":
        return tuple(feature.names)
    if kind_of(feature) != "text":
        return None
    found = dataset.unique(label)
    if None in found:
        _check_there(_column(dataset, label), label)
    return tuple(sorted(found))


def _together(arrays: dict[str, Any]) -> Any:
    """One array where possible: a single feature, or numbers side by side; otherwise features by name."""
    if len(arrays) == 1:
        only = next(iter(arrays.values()))
        return only if isinstance(only, Mapping) or only.ndim > 1 else only.reshape(-1, 1)
    if all(not isinstance(one, Mapping) and one.ndim == 1 for one in arrays.values()):
        return np.stack(list(arrays.values()), axis=1)
    flat: dict[str, Any] = {}
    for name, one in arrays.items():
        flat.update(one if isinstance(one, Mapping) else {name: one})
    return flat


def _images(values: list[Any], name: str) -> NDArray[Any]:
    """Pictures as ``[N, channels, height, width]`` in [0, 1]."""
    _check_there(values, name)
    return stack_images([pixels_of(value, f"column '{name}'") for value in values], f"column '{name}'")


def pixels_of(picture: Any, where: str) -> NDArray[Any]:
    """The pixels of a picture, grey or in colour; 16 bits and more are refused, because Pillow would cut them off."""
    mode = getattr(picture, "mode", None)
    if mode in (None, "L", "RGB"):
        return np.asarray(picture)
    if mode.startswith(("I", "F")):
        raise DataError(
            f"{where}: an image has more than 8 bits per pixel (mode {mode}); scale it to 8 bits, or give arrays"
        )
    return np.asarray(picture.convert("RGB"))  # palettes and others: their numbers are no colours


def stack_images(pictures: Sequence[NDArray[Any]], where: str) -> NDArray[Any]:
    """Arrays ``[H, W]`` or ``[H, W, C]`` of bytes as ``[N, C, H, W]`` in [0, 1]; all must have one size."""
    shapes = sorted({picture.shape for picture in pictures})
    if len(shapes) > 1:
        raise DataError(f"{where}: images have the sizes {shapes[0]} and {shapes[1]}; resize them to one first")
    if any(picture.dtype != np.uint8 for picture in pictures):
        raise DataError(f"{where}: images must have 8 bits per channel, got {pictures[0].dtype}")
    stacked = np.stack(pictures).astype(np.float32) / 255
    return stacked[:, None] if stacked.ndim == 3 else np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))


def _tokens(made: Any, rows: int) -> Any:
    """The tokeniser's result: an array, or arrays by name."""
    found = {name: np.asarray(one) for name, one in made.items()} if isinstance(made, Mapping) else np.asarray(made)
    for one in found.values() if isinstance(found, Mapping) else [found]:
        if one.dtype.kind not in "iufb" or len(one) != rows or one.ndim < 2:
            raise DataError(
                f"the tokenising function returned an array of type {one.dtype} and shape {one.shape} for {rows} "
                "texts; it must return one row of numbers per text, all of the same length: pad and truncate"
            )
    return found


def _check_there(values: list[Any], name: str) -> None:
    missing = sum(value is None for value in values)
    if missing:
        raise DataError(
            f"column '{name}': {missing} of {len(values)} values are missing; fill them or filter these rows"
        )
