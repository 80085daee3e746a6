"""What would be read wrongly without a word: gaps in ids, ignored columns, files that look like clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.errors import DataError, SpecError
from fedalloy.tasks.imputing import Imputer
from fedalloy.tasks.sources.columns import numbered
from fedalloy.tasks.sources.files import list_clients, read_table

X = np.arange(24, dtype=np.float32).reshape(12, 2)
Y = np.tile([0, 1], 6)
ROWS = "a,b,y\n1,2,0\n3,4,1\n"


def test_gaps_in_client_ids_are_no_client():
    pandas = pytest.importorskip("pandas")
    dates = pandas.Series(pandas.to_datetime(["2020-01-01", None])).to_numpy()
    for ids in (["a", float("nan")], pandas.Series(["a", pandas.NA], dtype="string"), dates, [1.0, float("nan")]):
        with pytest.raises(DataError, match="some rows have no client id"):
            numbered(ids, "ids")


def test_client_ids_of_two_kinds_are_refused_and_numbers_have_one_order():
    for ids in ([1, "1"], np.array([1, "1"], dtype=object)):
        with pytest.raises(DataError, match="some client ids are text"):
            numbered(ids, "ids")
    assert numbered(np.array([10, 2], dtype=object), "ids")[1] == numbered([10, 2], "ids")[1] == ("2", "10")


def test_missing_text_of_pandas_and_categories_of_numbers():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["p", "q"]).assign(y=Y, c=pandas.Series(["u", pandas.NA] * 6, dtype="string"))
    columns = {"categorical": ["c"], "missing": "mean"}
    assert fedalloy.task(frame, "logistic", ids=Y, columns=columns).encoding == {"c": ("u", "(missing)")}
    numbers = frame.assign(c=pandas.Categorical([1.0, 2.5] * 6))
    assert fedalloy.task(numbers, "logistic", ids=Y).encoding == {"c": ("1", "2.5")}


def test_frames_by_client_know_the_given_number_of_classes():
    pandas = pytest.importorskip("pandas")
    frames = [pandas.DataFrame({"p": X[:, 0], "y": Y}) for _ in range(2)]
    assert fedalloy.task(frames, "logistic", classes=5).classes == 5


def test_the_split_column_of_a_dataset_decides_the_parts():
    hub = pytest.importorskip("datasets")
    data = hub.Dataset.from_dict({"p": X[:, 0], "label": Y, "set": ["train"] * 9 + ["test"] * 3})
    task = fedalloy.task(data, "logistic", ids=[0] * 12, columns={"split": "set"})
    assert task.data("test", torch.tensor([0])).x.flatten().tolist() == X[9:, 0].tolist()


def test_classes_of_a_dataset_are_matched_by_name():
    hub = pytest.importorskip("datasets")
    data = hub.Dataset.from_dict({"p": X[:, 0], "label": Y})
    named = data.cast_column("label", hub.ClassLabel(names=["neg", "pos"]))
    other = hub.Dataset.from_dict({"p": X[:, 0], "label": 1 - Y}).cast_column(
        "label", hub.ClassLabel(names=["pos", "neg"])
    )
    turned = fedalloy.task(named, "logistic", ids=[0] * 12, columns={"classes": ["pos", "neg"]}, test_fraction=0.0)
    assert turned.data("train", torch.tensor([0])).y.tolist() == (1 - Y).tolist()
    both = fedalloy.task(hub.DatasetDict(train=named, test=other), "logistic", ids=[0] * 12)
    assert both.global_test is not None
    assert both.global_test.y.tolist() == Y.tolist()


def test_a_folder_that_is_split_already_is_not_taken_for_clients(tmp_path):
    for name in ("train.csv", "test.csv"):
        (tmp_path / name).write_text(ROWS)
    with pytest.raises(DataError, match="holds test and train, which can mean clients of these names, or one set"):
        list_clients(tmp_path)


def test_every_file_of_a_client_counts(tmp_path):
    for name in ("a.csv", "b.CSV", ".hidden.csv"):
        (tmp_path / name).write_text(ROWS)
    for part in ("train", "test"):
        (tmp_path / "c" / part).mkdir(parents=True)
        (tmp_path / "c" / part / "table.csv").write_text(ROWS)
    found = {one.name: one.parts for one in list_clients(tmp_path)}
    assert list(found) == ["a", "b", "c"]
    assert {part: path.name for part, path in found["c"].items()} == {"train": "table.csv", "test": "table.csv"}
    np.savez(tmp_path / "c" / "train.npz", x=X, y=Y)
    with pytest.raises(DataError, match="two of the same name"):
        list_clients(tmp_path)


def test_text_with_underscores_is_no_number(tmp_path):
    path = Path(tmp_path / "a.csv")
    path.write_text("id,y\n1_1,0\n11,1\n")
    assert read_table(path)["id"].values.tolist() == ["1_1", "11"]


def test_rows_on_demand_have_the_clients_of_their_partitioner():
    pytest.importorskip("flwr_datasets")
    from flwr_datasets.partitioner import IidPartitioner

    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    rule = IidPartitioner(num_partitions=3)
    for lazy in (True, False):  # the same object twice
        assert fedalloy.task(rows, "logistic", partition=rule, lazy=lazy).population == 3


def test_targets_on_demand_are_of_one_kind(tmp_path):
    (tmp_path / "a.csv").write_text(ROWS)
    (tmp_path / "b.csv").write_text("a,b,y\n1,2,0.5\n")
    task = fedalloy.task(tmp_path, "logistic", lazy=True, classes=2)
    with pytest.raises(DataError, match="client 1 'b': targets have decimals"):
        task.data("train", torch.tensor([1]))


def test_the_median_of_an_even_number_lies_in_the_middle():
    rows = torch.tensor([[1.0], [2.0], [torch.nan], [4.0], [9.0]])
    assert Imputer.learn(rows, torch.tensor([5]), "median").fill.tolist() == [[3.0]]


def test_a_validation_part_that_nobody_has_is_refused():
    with pytest.raises(SpecError, match=r"valid_fraction = 0.3 is not used"):
        fedalloy.task([{"train": (X, Y), "test": (X, Y)}], "logistic", valid_fraction=0.3)


def test_a_validation_part_that_nobody_has_is_refused_on_demand_too():
    def some(part: str) -> Any:
        return lambda k: {"train": (X, Y), "test": (X, Y)} | ({part: (X, Y)} if k == 3 else {})

    options: dict[str, Any] = {"clients": 5, "classes": 2, "valid_fraction": 0.3}
    with pytest.raises(SpecError, match=r"valid_fraction = 0.3 is not used"):
        fedalloy.task(some("test"), "logistic", **options)
    for source, sizes in ((some("valid"), [0, 12]), (lambda k: (X, Y), [4, 4])):
        task = fedalloy.task(source, "logistic", **options)
        assert task.data("valid", torch.tensor([0, 3])).size.tolist() == sizes


def test_ids_are_not_ignored_where_a_named_data_set_is_partitioned():
    with pytest.raises(SpecError, match="both say which client"):
        fedalloy.task("digits", "logistic", ids=[0] * 1797, partition="iid")


def test_a_feature_has_no_other_role():
    pandas, hub = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    frame = pandas.DataFrame({"p": X[:, 0], "y": Y})
    for source in (frame, hub.Dataset.from_pandas(frame)):
        for columns, role in (
            ({"features": ["p", "y"]}, "the label"),
            ({"features": ["p"], "ignore": ["p"]}, "ignore"),
        ):
            with pytest.raises(SpecError, match=rf"listed in 'features' and is .*{role}"):
                fedalloy.task(source, "logistic", ids=Y, columns=columns)


def test_a_split_column_is_not_ignored_on_demand_and_an_ignored_column_is_not_missed(tmp_path):
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("p,s,y\n1,train,0\n3,test,1\n5,train,1\n")
    with pytest.raises(SpecError, match=r"columns\.split needs all rows at once"):
        fedalloy.task(tmp_path, "logistic", columns={"split": "s"}, lazy=True, classes=2)
    task = fedalloy.task(tmp_path, "logistic", columns={"ignore": ["s"]}, test_fraction=0.0)
    assert task.data("train", torch.tensor([0])).client(0).x.flatten().tolist() == [1, 3, 5]


def test_rows_of_pandas_are_not_joined_by_place_where_their_indexes_differ():
    pandas = pytest.importorskip("pandas")
    x, y = pandas.DataFrame(X), pandas.Series(Y)
    for source, ids in (((x, y[::-1]), Y), ([(x, y[::-1])], None), ([{"x": x, "y": y[::-1]}], None)):
        with pytest.raises(DataError, match=r"x and y have different indexes.*y\.loc\[x\.index\]"):
            fedalloy.task(source, "logistic", ids=ids)
    assert fedalloy.task([(x, y), (x, Y)], "logistic").population == 2


def test_a_stream_of_hugging_face_is_refused_in_words():
    hub = pytest.importorskip("datasets")
    stream = hub.Dataset.from_dict({"p": X[:, 0], "y": Y, "c": Y}).to_iterable_dataset()
    with pytest.raises(DataError, match="load it without streaming=True"):
        fedalloy.task(stream, "logistic", ids="c")
    with pytest.raises(DataError, match="load it without streaming=True"):
        fedalloy.task(stream, "logistic", ids=Y)


def test_ids_of_pandas_are_not_joined_by_place_where_their_index_differs():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["p", "q"]).assign(y=Y)
    ids = pandas.Series(np.repeat(["a", "b"], 6))
    turned = ids[::-1]
    sources = (frame, (frame[["p", "q"]], frame["y"]), (X, frame["y"]), {"train": frame, "test": frame})
    for source in sources:
        with pytest.raises(DataError, match=r"ids and the rows have different indexes.*ids\.to_numpy\(\)"):
            fedalloy.task(source, "logistic", ids=turned)
        assert fedalloy.task(source, "logistic", ids=ids).population == 2
        assert fedalloy.task(source, "logistic", ids=turned.to_numpy()).population == 2
    assert fedalloy.task((X, Y), "logistic", ids=turned).population == 2, "rows without names are taken in their order"


def test_two_frames_are_not_taken_for_features_and_targets():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=["p", "y"])
    with pytest.raises(DataError, match="a tuple of 2 can mean clients"):
        fedalloy.task((frame, frame), "logistic", ids=Y)
    assert fedalloy.task((frame[["p"]], pandas.Series(Y)), "logistic", ids=Y).population == 2
