"""Every source in one test: equal data through different doors are equal tasks, and train to equal models."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import fedalloy
from fedalloy.core.protocols import Task
from fedalloy.experiment.recipe.reading import parse
from fedalloy.experiment.recipe.resolving import resolve
from fedalloy.tasks.lazy import LazyTask
from tests.tasks.sources import doors

HERE = "tests.tasks.sources.doors"
LIBRARIES = ("pandas", "polars", "datasets", "flwr_datasets", "PIL", "pyarrow")
Door = Callable[[Path], Task]


def python(source: Callable[[Path], Any], **more: Any) -> Door:
    """A task from Python."""

    def made(path: Path) -> Task:
        given = {name: value() if callable(value) and name == "ids" else value for name, value in more.items()}
        return fedalloy.task(source(path), "logistic", **given)

    return made


def recipe(dataset: Callable[[Path], Any], partition: dict[str, Any] | None = None, **more: Any) -> Door:
    """A task from a recipe."""

    def made(path: Path) -> Task:
        tables = {"task": {"dataset": dataset(path), "model": "logistic", **more}}
        return resolve(parse(tables | ({"partition": partition} if partition else {}), "recipe")).task()

    return made


def named(function: str, **more: Any) -> Callable[[Path], Any]:
    """A function in a recipe's table ``dataset``."""
    return lambda _: {"kind": "callable", "function": f"{HERE}:{function}", **more}


def folder(write: Callable[[Path], Path], **more: Any) -> Callable[[Path], Any]:
    """A folder in a recipe's table ``dataset``."""
    return lambda path: {"kind": "folder", "path": str(write(path)), **more}


def federated(path: Path) -> Any:
    """Flower Datasets reads a folder of files with the same loader that reads the hub."""
    from flwr_datasets import FederatedDataset
    from flwr_datasets.partitioner import NaturalIdPartitioner

    (path / "hub").mkdir()
    doors.frame().to_parquet(path / "hub" / "train.parquet")
    natural = NaturalIdPartitioner(partition_by="hospital")
    return FederatedDataset(dataset=str(path / "hub"), partitioners={"train": natural}, shuffle=False)


def datasets_of(parts: dict[str, Any]) -> dict[str, Any]:
    return {part: torch.utils.data.TensorDataset(*map(torch.tensor, pair)) for part, pair in parts.items()}


VALID: dict[str, Any] = {"valid_fraction": 0.1}
BY_ID: dict[str, Any] = {"ids": doors.ids, **VALID}
LAZY: dict[str, Any] = {"lazy": True}
KINDS = ("npz", "npy", "csv", "parquet")
WHOLE: dict[str, Door] = {
    "list": python(lambda _: doors.clients(), **VALID),
    "list of mappings": python(lambda _: [{"x": x, "y": y} for x, y in doors.clients()], **VALID),
    "list of tensors": python(lambda _: [tuple(map(torch.tensor, one)) for one in doors.clients()], **VALID),
    "mapping": python(lambda _: doors.mapping(), **VALID),
    "mapping, lazy": python(lambda _: doors.Shelf(doors.mapping()), classes=2, **LAZY, **VALID),
    "function, lazy": python(lambda _: doors.client, clients=3, classes=2, **VALID),
    "function, read now": python(lambda _: doors.client, clients=3, lazy=False, **VALID),
    "function of everyone": python(lambda _: doors.everyone, **VALID),
    "arrays": python(lambda _: doors.arrays(), **BY_ID),
    "arrays in a mapping": python(lambda _: dict(zip("xy", doors.arrays(), strict=True)), **BY_ID),
    "torch Dataset": python(lambda _: doors.Rows(), **BY_ID),
    "torch Dataset, id of an example": python(lambda _: doors.Rows(), ids=lambda: doors.id_of, **VALID),
    "torch Dataset, lazy": python(lambda _: doors.Rows(), **BY_ID, **LAZY),
    "torch Dataset of each": python(lambda _: [datasets_of({"": one})[""] for one in doors.clients()], **VALID),
    "iterable": python(lambda _: doors.Stream(), **BY_ID),
    "iterable, id of an example": python(lambda _: doors.Stream(), ids=lambda: doors.id_of, **VALID),
    "iterable, lazy": python(lambda _: doors.Stream(), **BY_ID, **LAZY),
    "pandas": python(lambda _: doors.frame(), ids="hospital", **VALID),
    "pandas, ids by row": python(lambda _: doors.frame().drop(columns="hospital"), **BY_ID),
    "pandas by role": python(lambda _: doors.frame(), columns={"client": "hospital", "label": "y"}, **VALID),
    "polars": python(lambda _: doors.polars_frame(), ids="hospital", **VALID),
    "polars, lazy frame": python(lambda _: doors.polars_frame().lazy(), ids="hospital", **VALID),
    "pyarrow": python(lambda _: doors.polars_frame().to_arrow(), ids="hospital", **VALID),
    "frames by client": python(lambda _: doors.frames(), **VALID),
    "hub": python(lambda _: doors.hub(), ids="hospital", **VALID),
    "hub, ids by row": python(lambda _: doors.plain_hub(), **BY_ID),
    "hub, lazy": python(lambda _: doors.hub(), ids="hospital", **LAZY, **VALID),
    "DatasetDict": python(lambda _: doors.hub_dict(), ids="hospital", **VALID),
    "FederatedDataset": python(federated, columns={"ignore": ["hospital"]}, **VALID),
    "FederatedDataset, lazy": python(federated, columns={"ignore": ["hospital"]}, **LAZY, **VALID),
    **{f"folder of {kind}": python(partial(doors.write_folder, kind), **VALID) for kind in KINDS},
    "folder, lazy": python(lambda path: doors.write_folder("csv", path), classes=2, **LAZY, **VALID),
    "folder's path": python(lambda path: str(doors.write_folder("npz", path)), **VALID),
    "dotted name": python(lambda _: f"{HERE}:everyone", **VALID),
    "dotted name of a client, lazy": python(lambda _: f"{HERE}:client", clients=3, classes=2, **VALID),
    "recipe: folder's path": recipe(lambda path: str(doors.write_folder("npz", path)), **VALID),
    **{
        f"recipe: folder of {kind}": recipe(folder(partial(doors.write_folder, kind)), **VALID)
        for kind in KINDS
    },
    "recipe: folder, lazy": recipe(
        folder(lambda path: doors.write_folder("parquet", path), classes=2, **LAZY), **VALID
    ),
    "recipe: dotted name": recipe(lambda _: f"{HERE}:everyone", **VALID),
    "recipe: function, lazy": recipe(named("client", clients=3, classes=2), **VALID),
    "recipe: mapping": recipe(named("mapping"), **VALID),
    "recipe: arrays": recipe(named("arrays", ids=f"{HERE}:ids"), **VALID),
    "recipe: torch Dataset": recipe(named("Rows", ids=f"{HERE}:ids"), **VALID),
    "recipe: iterable": recipe(named("Stream", ids=f"{HERE}:id_of"), **VALID),
    "recipe: iterable, lazy": recipe(named("Stream", ids=f"{HERE}:ids", **LAZY), **VALID),
    "recipe: pandas": recipe(named("frame", ids="hospital"), **VALID),
    "recipe: polars": recipe(named("polars_frame", ids="hospital"), **VALID),
    "recipe: frames by client": recipe(named("frames"), **VALID),
    "recipe: hub": recipe(named("hub", ids="hospital"), **VALID),
    "recipe: hub, lazy": recipe(named("hub", ids="hospital", **LAZY), **VALID),
    "recipe: DatasetDict": recipe(named("hub_dict", ids="hospital"), **VALID),
}  # fmt: skip
SPLIT: dict[str, Any] = {"client": "hospital", "split": "part"}
PARTS: dict[str, Door] = {
    "mappings": python(lambda _: doors.split()),
    "(train, valid, test)": python(lambda _: doors.tuples()),
    "mappings of mappings": python(lambda _: [{part: {"x": x, "y": y} for part, (x, y) in one.items()}
                                              for one in doors.split()]),
    "torch Datasets": python(lambda _: [datasets_of(one) for one in doors.split()]),
    "function, lazy": python(lambda _: doors.parts_of_client, clients=3, classes=2),
    "frames": python(lambda _: doors.split_frames()),
    "frames in tuples": python(lambda _: [tuple(one.values()) for one in doors.split_frames()]),
    "column of a frame": python(lambda _: doors.split_frame(), columns=SPLIT),
    "column of a dataset": python(lambda _: doors.split_hub(), columns=SPLIT),
    "column of a dataset, lazy": python(lambda _: doors.split_hub(), columns=SPLIT, **LAZY),
    **{f"folder of {kind}": python(partial(doors.write_parts, kind)) for kind in KINDS},
    "folder, lazy": python(lambda path: doors.write_parts("npz", path), classes=2, **LAZY),
    "recipe: tuples": recipe(named("tuples")),
    "recipe: function, lazy": recipe(named("parts_of_client", clients=3, classes=2)),
    "recipe: folder": recipe(folder(lambda path: doors.write_parts("csv", path))),
    "recipe: column of a frame": recipe(named("split_frame", columns=SPLIT)),
    "recipe: frames": recipe(named("split_frames")),
}  # fmt: skip
TWO_PARTS: dict[str, Door] = {
    "mappings": python(lambda _: doors.split(valid=False)),
    "(train, test)": python(lambda _: doors.pairs_of_parts()),
    "recipe: (train, test)": recipe(named("pairs_of_parts")),
}
DEALT: dict[str, Any] = {"partition": {"kind": "dirichlet", "alpha": 1.0}, "clients": 4}
DIRICHLET: dict[str, Any] = {"kind": "dirichlet", "alpha": 1.0, "clients": 4}
PARTITION: dict[str, Door] = {
    "arrays": python(lambda _: doors.arrays(), **DEALT),
    "torch Dataset": python(lambda _: doors.Rows(), **DEALT),
    "torch Dataset, lazy": python(lambda _: doors.Rows(), **DEALT, **LAZY),
    "iterable": python(lambda _: doors.Stream(), **DEALT),
    "iterable, lazy": python(lambda _: doors.Stream(), **DEALT, **LAZY),
    "pandas": python(lambda _: doors.frame(), columns={"ignore": ["hospital"]}, **DEALT),
    "polars": python(lambda _: doors.polars_frame(), columns={"ignore": ["hospital"]}, **DEALT),
    "hub": python(lambda _: doors.plain_hub(), **DEALT),
    "hub, lazy": python(lambda _: doors.plain_hub(), **DEALT, **LAZY),
    "recipe: arrays": recipe(named("arrays"), DIRICHLET),
    "recipe: torch Dataset": recipe(named("Rows"), DIRICHLET),
    "recipe: iterable, lazy": recipe(named("Stream", **LAZY), DIRICHLET),
    "recipe: hub": recipe(named("plain_hub"), DIRICHLET),
}
FLOWER: dict[str, Any] = {
    "kind": "PathologicalPartitioner",
    "num_partitions": 3,
    "num_classes_per_partition": 1,
    "seed": 3,
}


def partitioner(_: Path) -> Task:
    """An object of Flower Datasets itself."""
    from flwr_datasets.partitioner import PathologicalPartitioner

    rule = PathologicalPartitioner(partition_by="label", num_partitions=3, num_classes_per_partition=1, seed=3)
    return fedalloy.task(doors.arrays(), "logistic", rule)


PARTITIONERS: dict[str, Door] = {
    "object": partitioner,
    "name": python(lambda _: doors.arrays(), partition=FLOWER),
    "name, lazy": python(lambda _: doors.Rows(), partition=FLOWER, **LAZY),
    "recipe: name": recipe(named("arrays"), FLOWER),
}
PEOPLE: dict[str, Door] = {
    "by hand": python(lambda _: doors.encoded_people()),
    "pandas": python(lambda _: doors.people_frame(), ids="hospital", columns=doors.PEOPLE),
    "pandas, inferred": python(lambda _: doors.people_frame(), ids="hospital",
                               columns={"label": "ill", "categorical": ["sex"]}),
    "pandas, own categories": python(lambda _: doors.people_frame().astype({"sex": "category"}), ids="hospital",
                                     columns={"label": "ill"}),
    "folder of csv": python(lambda path: doors.write_people("csv", path)),
    "folder of parquet": python(lambda path: doors.write_people("parquet", path)),
    "folder of csv, lazy": python(lambda path: doors.write_people("csv", path), **LAZY),
    "recipe: folder": recipe(lambda path: str(doors.write_people("parquet", path))),
    "recipe: folder, lazy": recipe(folder(lambda path: doors.write_people("parquet", path), **LAZY)),
    "recipe: frame": recipe(named("people_frame", ids="hospital", columns=doors.PEOPLE)),
}  # fmt: skip
TEXTS: dict[str, Door] = {
    "by hand": python(lambda _: doors.encoded_texts()),
    "hub": python(lambda _: doors.texts_hub(), ids="hospital", tokenise=doors.tokens),
    "hub, lazy": python(lambda _: doors.texts_hub(), ids="hospital", tokenise=doors.tokens, **LAZY),
    "recipe: hub": recipe(named("texts_hub", ids="hospital", tokenise=f"{HERE}:tokens")),
}
IMAGES: dict[str, Door] = {
    "arrays": python(lambda _: doors.images()),
    "folder": python(lambda path: doors.write_images(path)),
    "folder, lazy": python(lambda path: doors.write_images(path), **LAZY),
    "folder with a schema": python(lambda path: doors.write_images(path, schema=True)),
    "hub": python(lambda _: doors.images_hub(), ids="hospital"),
    "hub, lazy": python(lambda _: doors.images_hub(), ids="hospital", **LAZY),
    "recipe: folder": recipe(lambda path: str(doors.write_images(path))),
    "recipe: hub": recipe(named("images_hub", ids="hospital")),
}
ALL = {
    "whole": WHOLE, "parts": PARTS, "two parts": TWO_PARTS, "partition": PARTITION, "partitioners": PARTITIONERS,
    "people": PEOPLE, "texts": TEXTS, "images": IMAGES,
}  # fmt: skip


@pytest.fixture(scope="module")
def firsts(tmp_path_factory) -> dict[str, tuple[Task, dict[str, torch.Tensor]]]:
    """The first door of every kind of data, with the model it trains to."""
    for library in LIBRARIES:
        pytest.importorskip(library)
    tasks = {kind: next(iter(some.values()))(tmp_path_factory.mktemp("first")) for kind, some in ALL.items()}
    return {kind: (task, trained(task)) for kind, task in tasks.items()}


def same(task: Task, other: Task) -> None:
    """All parts of all clients are equal, and so is the common test set."""
    assert task.population == other.population
    everyone = torch.arange(task.population)
    for part in ("train", "valid", "test"):
        one, two = task.data(part, everyone), other.data(part, everyone)
        for client in everyone.tolist():
            assert torch.equal(one.client(client).x, two.client(client).x), part
            assert torch.equal(one.client(client).y, two.client(client).y), part
            assert one.client(client).x.dtype == two.client(client).x.dtype, part
    assert task.global_test is not None
    assert other.global_test is not None
    assert torch.equal(task.global_test.x, other.global_test.x)


def trained(task: Task) -> dict[str, torch.Tensor]:
    result = fedalloy.fit(fedalloy.algorithms.fedavg(lr=0.3, batch_size=4), task, rounds=1, engine="loop")
    return result.model


@pytest.mark.parametrize(("kind", "door"), [(kind, door) for kind, some in ALL.items() for door in some])
def test_every_door_gives_the_same_clients_and_the_same_model(kind, door, firsts, tmp_path):
    task = ALL[kind][door](tmp_path)
    first, model = firsts[kind]
    same(task, first)
    assert isinstance(task, LazyTask) == door.endswith("lazy")
    found = trained(task)
    assert all(torch.equal(found[name], model[name]) for name in model)


def test_a_stream_is_read_once_and_the_user_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    doors.Stream.passes = 0
    task = fedalloy.task(doors.Stream(), "logistic", ids=doors.ids(), lazy=True)
    trained(task)
    assert doors.Stream.passes == 1
    assert any("read once: 41 rows" in one and str(tmp_path) in one for one in task.notices)


def test_names_and_meanings_are_kept(tmp_path):
    pytest.importorskip("PIL")
    task = fedalloy.task(doors.write_images(tmp_path), "logistic")
    assert task.names == doors.NAMES
    assert task.encoding == {"label": ("cat", "dog")}
    people = fedalloy.task(doors.people_frame(), "logistic", ids="hospital", columns=doors.PEOPLE)
    assert people.encoding == {"sex": ("f", "m"), "ill": ("no", "yes")}
    assert people.names == doors.NAMES


def test_columns_that_are_inferred_are_shown(tmp_path):
    task = fedalloy.task(doors.write_folder("csv", tmp_path), "logistic")
    told = "columns: label 'y' (number), features a (number), b (number), c (number)"
    assert told in task.notices
    assert told in str(task.describe())
