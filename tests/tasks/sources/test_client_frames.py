"""Frames by client: with parts, by name, and from a function of a client's number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.errors import DataError, SpecError
from fedalloy.tasks.sources.client_frames import frames_of

pandas = pytest.importorskip("pandas")
ROLES = {"label": "sick", "classes": ["no", "yes"], "categorical": {"sex": ["f", "m"]}, "ignore": ["row"]}
ALL = torch.arange(2)


def frame(seed: int, rows: int = 6) -> Any:
    draw = np.random.default_rng(seed)
    return pandas.DataFrame({
        "age": draw.uniform(20, 80, rows), "sex": ["f", "m", "m"] * (rows // 3), "row": range(rows),
        "sick": ["yes", "no", "no"] * (rows // 3),
    })  # fmt: skip


def pair(seed: int) -> tuple[Any, Any]:
    return frame(seed), frame(seed + 10, 3)


def by_name(seed: int) -> dict[str, Any]:
    return dict(zip(("train", "test"), pair(seed), strict=True))


@pytest.mark.parametrize("client", [pair, by_name])
def test_frames_by_part_are_the_parts(client):
    sources: list[Any] = [[client(0), client(1)], {"a": client(0), "b": client(1)}]
    for task in [fedalloy.task(source, "logistic", columns=ROLES) for source in sources]:
        train, test = task.data("train", ALL), task.data("test", ALL)
        assert train.size.tolist() == [6, 6]
        assert test.size.tolist() == [3, 3]
        ages = np.concatenate([frame(10, 3)["age"], frame(11, 3)["age"]])
        torch.testing.assert_close(test.x[:, 0], torch.tensor(ages, dtype=torch.float32))
        assert test.y.tolist() == [1, 0, 0] * 2
    assert task.names == ("a", "b")


@pytest.mark.parametrize("client", [frame, pair, by_name])
def test_a_function_that_returns_frames_gives_the_same_on_demand_and_in_memory(client):
    lazy, whole = (
        fedalloy.task(client, "logistic", clients=2, columns=ROLES, lazy=lazy, seed=3) for lazy in (None, False)
    )
    assert type(lazy) is not type(whole)
    assert lazy.classes == whole.classes == 2
    for part in ("train", "test"):
        one, other = lazy.data(part, ALL), whole.data(part, ALL)
        assert one.size.tolist() == other.size.tolist()
        torch.testing.assert_close(one.x, other.x)
        torch.testing.assert_close(one.y, other.y)


def test_three_frames_have_a_validation_part():
    task = fedalloy.task([(frame(0), frame(1, 3), frame(2, 9))] * 2, "logistic", columns=ROLES)
    assert [int(task.data(part, ALL).size[0]) for part in ("train", "valid", "test")] == [6, 3, 9]


def test_features_and_targets_in_two_frames_are_no_parts():
    both = frame(0)
    assert frames_of((both[["age"]], both[["sick"]])) is None


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(DataError, match="client 0 has one frame and client 1 has frames for training"):
        fedalloy.task([frame(0), pair(1)], "logistic", columns=ROLES)
    with pytest.raises(DataError, match="give one"):
        fedalloy.task([pair(0)], "logistic", columns={"label": "sick", "split": "sex"})
    with pytest.raises(SpecError, match="set lazy=False"):
        fedalloy.task(frame, "logistic", clients=2, columns={"label": "sick", "split": "sex"})
    with pytest.raises(DataError, match="values of column 'sick' must be declared in columns: classes"):
        fedalloy.task(frame, "logistic", clients=2, columns={"label": "sick", "ignore": ["sex"]})
    with pytest.raises(SpecError, match="columns means nothing for"):
        fedalloy.task(lambda k: (np.zeros((4, 2)), [0, 1] * 2), "logistic", clients=2, classes=2, columns=ROLES)


class TestCommonTestSet:
    """One frame whose rows are given to clients, and one that is everybody's test set."""

    def frames(self) -> tuple[Any, Any]:
        pandas = pytest.importorskip("pandas")
        train = pandas.DataFrame({
            "a": range(8), "sex": ["f", "m"] * 4, "site": ["x"] * 4 + ["y"] * 4, "y": ["no", "yes"] * 4,
        })  # fmt: skip
        return train, pandas.DataFrame({"y": ["yes", "no"], "sex": ["m", "other"], "a": [90, 91]})

    def test_both_are_encoded_alike(self):
        train, test = self.frames()
        columns = {"categorical": ["sex"], "client": "site"}
        task = fedalloy.task({"train": train, "test": test}, "logistic", columns=columns, test_fraction=0.0)
        assert task.encoding == {"sex": ("f", "m", "other"), "y": ("no", "yes")}
        assert task.names == ("x", "y")
        assert task.global_test is not None
        assert task.global_test.x.tolist() == [[90, 0, 1, 0], [91, 0, 0, 1]]
        assert task.global_test.y.tolist() == [1, 0]
        first = task.data("train", torch.tensor([0])).client(0)
        assert first.x.tolist() == [[k, 1.0 - k % 2, k % 2, 0] for k in range(4)]

    @pytest.mark.parametrize("how", [{"ids": "site"}, {"ids": [0] * 4 + [1] * 4}, {"partition": "iid", "clients": 2}])
    def test_ids_and_partitions_deal_the_rows_for_training(self, how):
        train, test = self.frames()
        columns = {"categorical": ["sex"], **({} if how.get("ids") == "site" else {"ignore": ["site"]})}
        if "ignore" in columns:
            test = test.assign(site="x")
        task = fedalloy.task({"train": train, "test": test}, "logistic", columns=columns, test_fraction=0.0, **how)
        assert task.data("train", torch.arange(2)).size.tolist() == [4, 4]
        assert task.global_test is not None
        assert task.global_test.x[:, 0].tolist() == [90, 91]

    def test_what_nobody_can_fill_or_what_is_said_twice_is_refused(self):
        train, test = self.frames()
        columns: dict[str, Any] = {"categorical": ["sex"], "client": "site", "missing": "mean"}
        gaps = {"train": train, "test": test.assign(a=[None, 1])}
        with pytest.raises(DataError, match="'test' has missing values, and it is no client's"):
            fedalloy.task(gaps, "logistic", columns=columns)
        dropped = fedalloy.task(gaps, "logistic", columns={**columns, "missing": "drop"})
        assert dropped.global_test is not None
        assert len(dropped.global_test) == 1
        with pytest.raises(DataError, match="were dropped"):
            fedalloy.task({**gaps, "test": test.assign(a=None)}, "logistic", columns={**columns, "missing": "drop"})
        with pytest.raises(DataError, match="says parts too"):
            fedalloy.task(gaps, "logistic", columns={**columns, "split": "sex"})
        with pytest.raises(DataError, match="can mean clients of these names, or one set"):
            fedalloy.task({"train": train, "test": test}, "logistic")
