"""A task in float64 has the digits of its data, whatever their source; one in float32 has them rounded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedalloy
from fedalloy.flower.node.data import local_task
from fedalloy.flower.protocol.orders import TaskSpec

THIRD, LARGE = 1 / 3, 16777217
X = np.stack([np.full(24, THIRD), np.arange(24.0), np.full(24, float(LARGE))], 1)
Y = np.arange(24) % 2


def model() -> nn.Module:
    return nn.Linear(3, 2)


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, row):
        return torch.from_numpy(X[row]), int(Y[row])


def client(number):
    return X[number * 8 : number * 8 + 8], Y[number * 8 : number * 8 + 8]


def frame(_):
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(X, columns=["a", "b", "c"]).assign(label=Y, d=LARGE).drop(columns="c")
    return {"dataset": table, "columns": {"label": "label"}, "clients": 3}


def folder(tmp_path, lazy=False):
    for number in range(3):
        rows = [",".join(map(repr, row)) for row in X[number * 8 : number * 8 + 8].tolist()]
        lines = [f"{row},{label}" for row, label in zip(rows, Y.tolist(), strict=False)]
        (tmp_path / f"{number}.csv").write_text("\n".join(["a,b,c,label", *lines]) + "\n")
    return {"dataset": tmp_path, **({"lazy": True, "classes": 2} if lazy else {})}


SOURCES = {
    "arrays": lambda _: {"dataset": (X, Y), "clients": 3},
    "clients": lambda _: {"dataset": [client(number) for number in range(3)]},
    "rows": lambda _: {"dataset": Rows(), "clients": 3},
    "rows on demand": lambda _: {"dataset": Rows(), "clients": 3, "lazy": True},
    "function on demand": lambda _: {"dataset": client, "clients": 3, "classes": 2, "lazy": True},
    "frame": frame,
    "folder": folder,
    "folder on demand": lambda path: folder(path, lazy=True),
    "whole numbers": lambda _: {"dataset": ([[LARGE] * 3] * 24, Y), "clients": 3},
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_features_have_the_digits_of_the_task(name, dtype, tmp_path):
    task = fedalloy.task(model=model, dtype=dtype, **SOURCES[name](tmp_path))
    x = task.data("train", torch.arange(3)).x
    assert x.dtype == getattr(torch, dtype)
    values = set(x.flatten().tolist())
    assert (LARGE in values) is (dtype == "float64")
    assert (THIRD in values) is (dtype == "float64" and name != "whole numbers")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_quantities_have_the_digits_of_the_task(dtype):
    task = fedalloy.task((X, np.full(24, THIRD)), model=lambda: nn.Linear(3, 1), clients=3, dtype=dtype)
    assert (THIRD in task.data("train", torch.arange(3)).y.tolist()) is (dtype == "float64")


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_a_node_reads_its_data_as_the_task_says(dtype, tmp_path):
    np.savez(tmp_path / "own.npz", x=X, y=Y)
    spec = TaskSpec(shape=(3,), classes=2, seed=0, dtype=dtype, test_fraction=0.0, valid_fraction=0.0)
    x = local_task(str(tmp_path / "own.npz"), 0, spec).examples("train").x
    assert (THIRD in x.flatten().tolist()) is (dtype == "float64")
