"""What can be read in two ways is refused with both readings, and bad data are refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.errors import DataError, SpecError
from fedalloy.tasks.sources.client_data import read_client
from tests.tasks.sources import doors

X, Y = np.zeros((4, 2), np.float32), np.array([0, 1, 0, 1])
PAIR = (X, Y)


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ((X, Y), [""]),
        ([X, Y], [""]),
        (([[0.0], [1.0]], [0, 1]), [""]),
        ((X, [0, 1, 0, 1]), [""]),
        (({"a": X, "b": X}, Y), [""]),
        ((np.zeros((2, 2)), np.zeros(2)), [""]),  # two rows are no parts
        ({"x": X, "y": Y}, [""]),
        ((PAIR, PAIR), ["train", "test"]),
        ((([[0.0]], [0]), ([[1.0]], [1])), ["train", "test"]),
        ((PAIR, PAIR, PAIR), ["train", "valid", "test"]),
        ({"train": PAIR, "test": {"x": X, "y": Y}}, ["train", "test"]),
        ({"train": PAIR}, ["train"]),
    ],
)
def test_forms_of_one_clients_data(value, parts):
    assert list(read_client(value, "client 0")) == parts


@pytest.mark.parametrize(
    "value",
    [
        ([X, Y], [X, Y]),  # two examples and two targets, or two parts
        ([[1.0, 2.0], [3.0, 4.0]], [[1, 0], [0, 1]]),
        ([[1.0, 2.0]] * 3, [[1, 0]] * 3),  # whatever the length
        (((1.0, 2.0), (3.0, 4.0)), ((1, 0), (0, 1))),
        ((X, Y), [X, Y]),
    ],
)
def test_an_ambiguous_value_is_refused_with_both_readings(value):
    with pytest.raises(DataError, match=r"client 0: .* can mean \(x, y\), .* or \(train, test\)"):
        read_client(value, "client 0")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ((X, Y, Y), "got 3 values .* client's data are"),
        (X, r"got ndarray of shape \(4, 2\)"),
        ({"x": X}, "a mapping with the keys x"),
        ({"train": PAIR, "tset": PAIR}, "keys train, tset"),
        ((PAIR, (X, Y, Y)), r"client 0 \[test\]: got a tuple of 3 groups"),
        ((7, Y), "a int holds no examples"),
    ],
)
def test_what_is_no_clients_data_is_refused(value, words):
    with pytest.raises(DataError, match=words):
        read_client(value, "client 0")


def test_parts_are_kept_as_they_were_given():
    given = {"train": (X + 1, Y), "valid": (X[:1] + 2, Y[:1]), "test": (X[:2] + 3, Y[:2])}
    for lazy in (False, True):
        task = fedalloy.task({"a": given, "b": {"train": PAIR}}, "logistic", lazy=lazy, classes=2)
        sizes = {part: task.data(part, torch.arange(2)).size.tolist() for part in ("train", "valid", "test")}
        assert sizes == {"train": [4, 4], "valid": [1, 0], "test": [2, 0]}
        assert task.data("test", torch.tensor([0])).client(0).x.unique().tolist() == [3.0]


WRONG: list[tuple[str, Any, dict[str, Any], str]] = [
    ("two clients or parts", (PAIR, PAIR), {}, "a tuple of 2 can mean clients, or a pair of arrays, or parts"),
    ("clients called train and test", {"train": PAIR, "test": PAIR}, {}, "can mean clients of these names, or one set"),
    ("ids and partition", PAIR, {"ids": [0] * 4, "partition": "iid"}, "both say which client"),
    ("too few ids", PAIR, {"ids": [0] * 3}, "3 client ids for 4 rows"),
    ("an id is missing", PAIR, {"ids": [0, None, 1, 1]}, "have no client id"),
    ("partition of a list", [PAIR], {"partition": "iid"}, "neither ids nor partition"),
    ("a whole and parts", [PAIR, (PAIR, PAIR)], {}, "give all clients in the same form"),
    ("numbers", [1.0, 2.0], {}, "the list holds numbers"),
    ("no clients", [], {}, "there are no clients"),
    ("nothing known", 3.5, {}, "fedalloy.task got float; allowed: the name of a data set"),
    ("text labels", [(X, ["a", "b", "a", "b"])], {}, "labels must be numbers, not text .* 'a'; number the classes"),
    ("NaN", [(X + np.nan, Y)], {}, r"4 of 4 examples have NaN or infinity in their features: client 0 \(4 of 4\)"),
    ("shapes", [PAIR, (X[:, :1], Y)], {}, "client 1: examples have shape .1,., those of client 0 .2,."),
    ("lengths", [(X, Y[:3])], {}, "x has shape .4, 2. and y .3,."),
    ("a class too many", PAIR, {"ids": [0] * 4, "classes": 1}, r"not a class number in 0\.\.0"),
    ("columns of arrays", PAIR, {"ids": [0] * 4, "columns": {"label": "y"}}, "columns means nothing for arrays"),
    ("a class", dict, {}, "dict is a class: give an object of it"),
    ("a class with arguments", torch.utils.data.Subset, {}, "Subset is a class"),
    ("ids by a wrong name", PAIR, {"ids": "tests.tasks.sources.doors:idz"}, "has no function 'idz'.*'ids'"),
    ("no folder", "nowhere/at/all", {}, "is not a folder"),
    ("no such set", "mnits", {}, "did you mean 'mnist'"),
]


@pytest.mark.parametrize(("source", "more", "words"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG])
def test_sources_that_make_no_sense_are_refused_in_words(source, more, words):
    with pytest.raises((DataError, SpecError), match=words):
        fedalloy.task(source, "logistic", **more)


def test_functions_need_the_numbers_that_they_cannot_tell():
    with pytest.raises(SpecError, match="give the number of clients, clients=100"):
        fedalloy.task(doors.client, "logistic")
    with pytest.raises(SpecError, match=r"give classes=10 .* or lazy=False"):
        fedalloy.task(doors.client, "logistic", clients=3)
    with pytest.raises(SpecError, match="gives every client its data"):
        fedalloy.task(doors.client, "logistic", "iid", 3)
    with pytest.raises(DataError, match="<lambda> of client 1 raised IndexError"):
        fedalloy.task(lambda k: doors.clients()[5] if k else PAIR, "logistic", clients=2, lazy=False)


def test_a_lazy_client_is_checked_when_it_is_read():
    def client(number: int) -> Any:
        return (X * np.nan, Y) if number == 7 else (X[:, :1], Y) if number == 8 else PAIR

    task = fedalloy.task(client, "logistic", clients=1000, classes=2)
    assert len(task.data("train", torch.tensor([3])).client(0)) == 3
    with pytest.raises(DataError, match=r"NaN or infinity in their features: client 7 \(4 of 4\)"):
        task.data("train", torch.tensor([3, 7]))
    with pytest.raises(DataError, match=r"client 8: examples have shape \(1,\), those of the first \(2,\)"):
        task.data("train", torch.tensor([8]))


def test_clients_without_examples_are_named():
    empty = (np.zeros((0, 2)), np.zeros(0, np.int64))
    task = fedalloy.task({"a": PAIR, "b": empty}, "logistic")
    assert task.names == ("a",)
    assert "clients without any example are left out: b" in task.notices
    lazy = fedalloy.task({"a": PAIR, "b": empty}, "logistic", lazy=True, classes=2)
    assert lazy.data("train", torch.arange(2)).size.tolist() == [3, 0]


def test_errors_in_a_dataset_of_ones_own_are_told_with_its_lines():
    class Broken(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, row: int) -> Any:
            raise OSError("the disk is gone")

    class Ending(torch.utils.data.IterableDataset):
        def __iter__(self) -> Any:
            yield X[0], 0
            raise OSError("the disk is gone")

    for source in (Broken(), Ending(), [Broken()]):
        more: dict[str, Any] = {} if isinstance(source, list) else {"partition": "iid", "clients": 2}
        with pytest.raises(DataError, match=r"(Dataset|iterable) raised OSError: the disk is gone\n.*test_refusals"):
            fedalloy.task(source, "logistic", **more)
