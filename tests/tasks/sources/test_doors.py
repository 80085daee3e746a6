"""Equal data through different doors are equal tasks, and train to equal models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.protocols import Task
from fedalloy.experiment.recipe.reading import parse
from fedalloy.experiment.recipe.resolving import resolve
from fedalloy.tasks.lazy import LazyTask
from tests.tasks.sources import doors

EVERYONE = torch.arange(3)
SETTINGS: dict[str, Any] = {"model": "logistic", "valid_fraction": 0.1}


def make(source: Any, **more: Any) -> Task:
    return fedalloy.task(source, **SETTINGS, **more)


def by_id(**more: Any) -> dict[str, Any]:
    return {"ids": doors.rows()[2], **more}


def frame(library: str) -> Any:
    return pytest.importorskip(library).DataFrame(doors.table())


def hub() -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict(doors.table())


def federated(tmp_path: Path) -> Any:
    """Flower Datasets reads a folder of files with the same loader that reads the hub."""
    flower = pytest.importorskip("flwr_datasets")
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    (tmp_path / "hub").mkdir()
    frame("pandas").to_parquet(tmp_path / "hub" / "train.parquet")
    natural = partitioners.NaturalIdPartitioner(partition_by="hospital")
    return flower.FederatedDataset(dataset=str(tmp_path / "hub"), partitioners={"train": natural}, shuffle=False)


COLUMNS = {"ignore": ["hospital"]}
DOORS: dict[str, Callable[[Path], Task]] = {
    "list": lambda _: make(doors.clients()),
    "list of mappings": lambda _: make([{"x": x, "y": y} for x, y in doors.clients()]),
    "list of tensors": lambda _: make([(torch.tensor(x), torch.tensor(y)) for x, y in doors.clients()]),
    "mapping": lambda _: make(dict(zip(doors.NAMES, doors.clients(), strict=True))),
    "mapping on demand": lambda _: make(
        doors.Shelf(zip(doors.NAMES, doors.clients(), strict=True)), lazy=True, classes=2
    ),
    "function": lambda _: make(doors.client, clients=3, classes=2),
    "function, read now": lambda _: make(doors.client, clients=3, lazy=False),
    "function of everyone": lambda _: make(doors.everyone),
    "arrays": lambda _: make(doors.rows()[:2], **by_id()),
    "torch Dataset": lambda _: make(doors.Rows(), **by_id()),
    "torch Dataset on demand": lambda _: make(doors.Rows(), **by_id(lazy=True)),
    "torch datasets": lambda _: make(
        [torch.utils.data.TensorDataset(*map(torch.tensor, one)) for one in doors.clients()]
    ),
    "stream": lambda _: make(doors.Stream(), **by_id()),
    "stream on demand": lambda _: make(doors.Stream(), **by_id(lazy=True)),
    "pandas": lambda _: make(frame("pandas"), ids="hospital"),
    "pandas by role": lambda _: make(frame("pandas"), columns={"client": "hospital", "label": "y"}),
    "polars": lambda _: make(frame("polars"), ids="hospital"),
    "frame per client": lambda _: make(
        {str(name): part.drop(columns="hospital") for name, part in frame("pandas").groupby("hospital")}
    ),
    "datasets": lambda _: make(hub(), ids="hospital"),
    "datasets on demand": lambda _: make(hub(), ids="hospital", lazy=True),
    "DatasetDict": lambda _: make(pytest.importorskip("datasets").DatasetDict(train=hub()), ids="hospital"),
    "FederatedDataset": lambda path: make(federated(path), columns=COLUMNS),
    **{
        f"folder of {kind}": lambda path, kind=kind: make(doors.write_folder(kind, path))  # type: ignore[misc]
        for kind in ("npz", "npy", "csv", "parquet")
    },
    "folder on demand": lambda path: make(doors.write_folder("csv", path), lazy=True, classes=2),
    "folder's path": lambda path: make(str(doors.write_folder("npz", path))),
    "dotted name": lambda _: make("tests.tasks.sources.doors:everyone"),
    "dotted name of a client": lambda _: make("tests.tasks.sources.doors:client", clients=3, classes=2),
}
RECIPES: dict[str, Callable[[Path], Any]] = {
    "folder's path": lambda path: str(doors.write_folder("npz", path)),
    "folder": lambda path: {"kind": "folder", "path": str(doors.write_folder("csv", path))},
    "folder on demand": lambda path: {
        "kind": "folder", "path": str(doors.write_folder("parquet", path)), "lazy": True, "classes": 2,
    },
    "dotted name": lambda _: "tests.tasks.sources.doors:everyone",
    "frame": lambda _: {"kind": "callable", "function": "tests.tasks.sources.doors:frame", "ids": "hospital"},
    "function": lambda _: {
        "kind": "callable", "function": "tests.tasks.sources.doors:client", "clients": 3, "classes": 2,
    },
}  # fmt: skip


def same(task: Task, other: Task) -> None:
    """All parts of all clients are equal, and so is the common test set."""
    assert task.population == 3
    for part in ("train", "valid", "test"):
        one, two = task.data(part, EVERYONE), other.data(part, EVERYONE)
        for client in range(3):
            assert torch.equal(one.client(client).x, two.client(client).x), part
            assert torch.equal(one.client(client).y, two.client(client).y), part
    assert task.global_test is not None
    assert other.global_test is not None
    assert torch.equal(task.global_test.x, other.global_test.x)


@pytest.fixture(scope="module")
def plain() -> Task:
    return make(doors.clients())


def trained(task: Task) -> dict[str, torch.Tensor]:
    result = fedalloy.fit(fedalloy.algorithms.fedavg(lr=0.3, batch_size=4), task, rounds=2, engine="loop")
    return result.model


@pytest.mark.parametrize("door", DOORS)
def test_every_door_gives_the_same_clients_and_the_same_model(door, plain, tmp_path):
    task = DOORS[door](tmp_path)
    same(task, plain)
    assert isinstance(task, LazyTask) == (door.endswith("on demand") or door in ("function", "dotted name of a client"))
    model, expected = trained(task), trained(plain)
    assert all(torch.equal(model[name], expected[name]) for name in expected)


@pytest.mark.parametrize("door", RECIPES)
def test_recipes_have_the_doors_that_are_paths_or_names(door, plain, tmp_path):
    table = {"dataset": RECIPES[door](tmp_path), "model": "logistic", "valid_fraction": 0.1}
    same(resolve(parse({"task": table}, "recipe")).task(), plain)


def test_images_in_folders_are_the_images_that_were_written(tmp_path):
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 2, 3, 6, 5, 3), dtype=np.uint8)  # client, class, image
    for client, some in enumerate(pixels):
        for label, pictures in enumerate(some):
            place = tmp_path / f"site-{client}" / ("cat", "dog")[label]
            place.mkdir(parents=True)
            for number, picture in enumerate(pictures):
                image.fromarray(picture).save(place / f"{number}.png")
    whole = torch.from_numpy(pixels).permute(0, 1, 2, 5, 3, 4).float() / 255
    clients = [(whole[k].flatten(0, 1), torch.tensor([0, 0, 0, 1, 1, 1])) for k in range(2)]
    expected = fedalloy.task(clients, "logistic")
    for lazy in (False, True):
        task = fedalloy.task(tmp_path, "logistic", lazy=lazy)
        assert task.encoding == {"label": ("cat", "dog")}
        one, two = (made.data("train", torch.arange(2)) for made in (task, expected))
        assert torch.equal(one.x, two.x)
        assert torch.equal(one.y, two.y)


@pytest.mark.parametrize("rule", ["iid", {"kind": "dirichlet", "alpha": 1.0}])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_partition_deals_rows_alike_wherever_they_are(rule, lazy):
    expected = fedalloy.task(doors.rows()[:2], "logistic", rule, 4)
    for source in (doors.Rows(), doors.Stream(), hub().remove_columns("hospital")):
        task = fedalloy.task(source, "logistic", rule, 4, lazy=lazy)
        assert isinstance(task, LazyTask) == lazy
        for part in ("train", "test"):
            one, two = (made.data(part, torch.arange(4)) for made in (task, expected))
            assert all(torch.equal(one.client(k).x, two.client(k).x) for k in range(4))


def test_the_partitioners_of_flower_datasets_are_rules_by_name(tmp_path):
    partitioners = pytest.importorskip("flwr_datasets.partitioner")
    spec = {"kind": "PathologicalPartitioner", "num_partitions": 3, "num_classes_per_partition": 1, "seed": 3}
    task = fedalloy.task(doors.rows()[:2], "logistic", spec)
    given = partitioners.PathologicalPartitioner(
        partition_by="label", num_partitions=3, num_classes_per_partition=1, seed=3
    )
    other = fedalloy.task(doors.rows()[:2], "logistic", given)
    same_rows = [
        torch.equal(task.data("train", EVERYONE).client(k).x, other.data("train", EVERYONE).client(k).x)
        for k in range(3)
    ]
    assert all(same_rows)
    assert all(len(task.data("train", EVERYONE).client(k).y.unique()) == 1 for k in range(3))


def test_a_stream_is_read_once_and_the_user_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    doors.Stream.passes = 0
    task = make(doors.Stream(), **by_id(lazy=True))
    trained(task)
    assert doors.Stream.passes == 1
    assert any("read once: 41 rows" in one and str(tmp_path) in one for one in task.notices)
