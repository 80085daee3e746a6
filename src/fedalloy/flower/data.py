"""A node's own data: from a folder, from a function, or (for trials) its share of the recipe's data.

A folder holds one file for each part, ``train``, ``valid`` and ``test``, or a single file of any name, which is then
split as the recipe says; files are ``.npz`` (x, y) or ``.parquet`` (features and y or label). A function returns a pair
``(x, y)``, which is split, or a dict of pairs by part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedalloy.core.errors import DataError
from fedalloy.core.keys import Key
from fedalloy.core.protocols import DataPart, Objective
from fedalloy.core.types import Examples
from fedalloy.engines.flower import Refused
from fedalloy.flower.config import FROM_RECIPE
from fedalloy.tasks.assembly import make_objective
from fedalloy.tasks.datasets.base import as_pair
from fedalloy.tasks.datasets.callable import resolve
from fedalloy.tasks.datasets.folder import client_files, read_client
from fedalloy.tasks.examining import check_examples
from fedalloy.tasks.splits import split
from fedalloy.tasks.standardise import Scaler

PARTS: tuple[DataPart, ...] = ("train", "valid", "test")
_NAMED_BY_NODES_ONLY = frozenset({"callable", "folder", "nodes"})
Parts = dict[DataPart, Examples]
_REMEMBERED = 2


@dataclass(frozen=True)
class LocalTask:
    """The model and one client's examples."""

    objective: Objective
    parts: Parts

    def examples(self, part: DataPart) -> Examples:
        """The examples of a part."""
        return self.parts[part]


def local_task(source: str, client: int, spec: Mapping[str, Any], device: str = "cpu") -> LocalTask:
    """The task of one client; ``spec`` is what the server says about model and data (:mod:`.remote_task`)."""
    if source == FROM_RECIPE:
        return _share(client, spec, device)
    model = {name: spec[name] for name in ("model", "loss", "dtype")}
    shape, trainable = tuple(spec["shape"]), tuple(spec["trainable"])
    bounds = tuple(spec["bounds"]) if spec.get("bounds") else None
    objective = make_objective(shape, spec["classes"], **model, trainable=trainable, bounds=bounds).to(device)
    found = _from_function(source) if ":" in source else _from_folder(Path(source).expanduser())
    parts = {name: _checked(*pair, spec, source) for name, pair in found.items()}
    if set(parts) == {""}:
        parts = _split(parts[""], client, spec)
    empty = parts["train"].x[:0], parts["train"].y[:0]
    whole: Parts = {part: parts.get(part, Examples(*empty)) for part in PARTS}
    if spec["standardise"] == "client":
        whole = _standardised(whole)
    return LocalTask(objective, {part: _placed(one, device, spec["dtype"]) for part, one in whole.items()})


def remembering(make: Callable[..., LocalTask]) -> Callable[..., LocalTask]:
    """The same function with a short memory: a process that carries out many orders reads its data once, and again
    when a server asks for another task or a file in the node's folder has changed."""
    known: dict[str, LocalTask] = {}

    def remembered(source: str, client: int, spec: Mapping[str, Any], device: str = "cpu") -> LocalTask:
        what = json.dumps([source, client, spec, device, _stamps(source)], sort_keys=True)
        known[what] = known.pop(what) if what in known else make(source, client, spec, device)
        for oldest in list(known)[:-_REMEMBERED]:
            del known[oldest]
        return known[what]

    return remembered


def _stamps(source: str) -> list[tuple[str, int, int]]:
    """When the files of a folder were written, and how large they are."""
    folder = Path(source).expanduser()
    if ":" in source or source == FROM_RECIPE or not folder.is_dir():
        return []
    stats = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
    return [(name, stat.st_mtime_ns, stat.st_size) for name, stat in stats]


def _share(client: int, spec: Mapping[str, Any], device: str) -> LocalTask:
    """What the recipe's own data give this client."""
    # Imported here: every order is a process of its own, and those of real nodes need no recipes.
    from fedalloy.recipe import parse
    from fedalloy.recipe.resolving import task_of

    recipe = parse(spec["recipe"], "the server's recipe")
    dataset = recipe.task.dataset
    kind = dataset.get("kind") if isinstance(dataset, dict) else dataset
    if kind in _NAMED_BY_NODES_ONLY:
        raise Refused(
            f"the recipe's data are of the kind '{kind}', which only a node itself may name: set its 'fedalloy-data' "
            "to its folder or function"
        )
    task = task_of(recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"device": device})}))
    return LocalTask(task.objective, {part: task.data(part, torch.tensor([client])).client(0) for part in PARTS})


def _from_folder(folder: Path) -> dict[str, tuple[Any, Any]]:
    files = {file.stem: file for file in client_files(folder)}
    if len(files) == 1 and "train" not in files:
        return {"": read_client(next(iter(files.values())))}
    if "train" not in files or not files.keys() <= set(PARTS):
        raise DataError(
            f"{folder} holds the files {', '.join(sorted(files))}; allowed: one file, or train and any of valid, test"
        )
    return {name: read_client(file) for name, file in files.items()}


def _from_function(path: str) -> dict[str, tuple[Any, Any]]:
    made = resolve(path)()
    if isinstance(made, tuple | list) and len(made) == 2:
        return {"": (made[0], made[1])}
    if isinstance(made, Mapping) and "train" in made and made.keys() <= set(PARTS):
        return dict(made)
    raise DataError(f"{path} must return a pair (x, y), or a dict of pairs with 'train' and any of 'valid', 'test'")


def _checked(x: Any, y: Any, spec: Mapping[str, Any], source: str) -> Examples:
    """One part as tensors, fitting what the recipe expects."""
    classes = spec["classes"]
    features, labels = as_pair(x, y, source)
    if not len(labels):  # whose shape and type say nothing
        features = torch.empty(0, *spec["shape"])
        labels = labels.to(torch.int64 if classes else torch.float32)
    if tuple(features.shape[1:]) != tuple(spec["shape"]):
        shape = tuple(features.shape[1:])
        raise DataError(f"{source}: examples have shape {shape}, the recipe's {tuple(spec['shape'])}")
    if labels.is_floating_point() != (classes == 0):
        raise DataError(f"{source}: labels are {labels.dtype}, the recipe expects {classes or 'no'} classes")
    check_examples(features, labels, classes, torch.zeros(len(labels), dtype=torch.int64), lambda _: source)
    return Examples(features, labels)


def _split(examples: Examples, client: int, spec: Mapping[str, Any]) -> dict[str, Examples]:
    """As the client of this number would be split in a simulation of all clients."""
    rows = [torch.arange(0)] * client + [torch.arange(len(examples))]
    key = Key.of(spec["seed"]).fold("task").fold("federation")
    fractions = {name: spec[name] for name in ("test_fraction", "valid_fraction")}
    mine = split(rows, examples.y, key, **fractions)[client]
    chosen = {"train": mine.train, "valid": mine.valid, "test": mine.test}
    return {part: Examples(examples.x[index], examples.y[index]) for part, index in chosen.items()}


def _standardised(parts: Parts) -> Parts:
    def size(one: Examples) -> torch.Tensor:
        return torch.tensor([len(one)])

    scaler = Scaler.learn(parts["train"].x, size(parts["train"]))
    return {part: Examples(scaler.apply(one.x, size(one)), one.y) for part, one in parts.items()}


def _placed(examples: Examples, device: str, dtype: str) -> Examples:
    precision = getattr(torch, dtype)
    x, y = examples.x.to(device, precision), examples.y.to(device)
    return Examples(x, y.to(precision) if y.is_floating_point() else y)
