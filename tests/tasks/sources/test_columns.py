"""Frames and hub datasets: roles, categories whose numbers are kept, gaps, images, text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.errors import DataError, SpecError

EVERYONE = torch.arange(2)
TABLE: dict[str, list[Any]] = {
    "age": [30.0, 40.0, 50.0, 60.0, 70.0, 80.0],
    "sex": ["f", "m", "f", "f", "m", "m"],
    "site": ["b", "b", "b", "a", "a", "a"],
    "ill": ["no", "yes", "no", "yes", "no", "yes"],
}
ROLES: dict[str, Any] = {"label": "ill", "client": "site", "categorical": ["sex"]}


def frame(library: str, **columns: Any) -> Any:
    return pytest.importorskip(library).DataFrame({**TABLE, **columns})


def make(source: Any, columns: dict[str, Any] = ROLES, **more: Any) -> Any:
    return fedalloy.task(source, "logistic", columns=columns, test_fraction=0.0, **more)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_categories_become_columns_and_their_values_are_kept(library):
    task = make(frame(library))
    assert task.names == ("a", "b")
    assert task.encoding == {"sex": ("f", "m"), "ill": ("no", "yes")}
    assert task.train.x.tolist() == [[60, 1, 0], [70, 0, 1], [80, 0, 1], [30, 1, 0], [40, 0, 1], [50, 1, 0]]
    assert task.train.y.tolist() == [1, 0, 1, 0, 1, 0]
    assert any("label 'ill' (text), client 'site', features age (number), sex (text)" in one for one in task.notices)
    assert any("sex = f, m; ill = no, yes" in one for one in task.notices)


def test_declared_categories_decide_the_numbers():
    pandas = pytest.importorskip("pandas")
    by_frame = frame("pandas")
    by_frame["sex"] = pandas.Categorical(by_frame["sex"], categories=["m", "x", "f"])
    plain = {"label": "ill", "client": "site"}
    assert make(by_frame, plain).encoding["sex"] == ("m", "x", "f")
    told = {**plain, "categorical": {"sex": ["m", "x", "f"]}, "classes": ["yes", "no"], "encoding": "codes"}
    task = make(frame("polars"), told)
    assert task.train.x[:, 1].tolist() == [2, 0, 0, 2, 0, 2]
    assert task.train.y.tolist() == [0, 1, 0, 1, 0, 1]
    with pytest.raises(DataError, match="column 'sex' has the value 'f', allowed are m"):
        make(frame("pandas"), {**plain, "categorical": {"sex": ["m"]}})


def test_text_is_refused_unless_it_is_declared():
    with pytest.raises(DataError, match=r"must hold numbers \('sex' holds text\): name it in 'categorical'"):
        make(frame("pandas"), {"label": "ill", "client": "site"})
    assert make(frame("pandas"), {"label": "ill", "client": "site", "ignore": ["sex"]}).train.x.shape == (6, 1)
    with pytest.raises(DataError, match="has no column 'sick'"):
        make(frame("pandas"), {"label": "sick"})
    with pytest.raises(DataError, match="needs feature columns and one column 'y' or 'label'"):
        make(frame("polars"), {})
    with pytest.raises(SpecError, match="unknown argument 'labels'"):
        make(frame("polars"), {"labels": "ill"})
    with pytest.raises(SpecError, match=r"columns=\{'label': 'ill', 'client': 'site'\}, got 'ill'"):
        make(frame("polars"), "ill")  # type: ignore[arg-type]


GAPS: dict[str, list[Any]] = {"age": [30.0, None, 50.0, 60.0, None, 90.0], "sex": ["f", None, "f", "f", "m", "m"]}


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_gaps_are_refused_dropped_or_filled_as_asked(library):
    gaps = frame(library, **GAPS)
    with pytest.raises(DataError, match=r"values are missing in 'age' \(2 of 6\), 'sex' \(1 of 6\)"):
        make(gaps)
    dropped = make(gaps, {**ROLES, "missing": "drop"})
    assert dropped.train.size.tolist() == [2, 2]
    assert "2 of 6 rows have missing values and are dropped" in dropped.notices
    filled = make(gaps, {**ROLES, "missing": "mean"})
    assert filled.train.x[:, 0].tolist() == [60, 75, 90, 30, 40, 50]
    assert filled.encoding["sex"] == ("f", "m", "(missing)")
    assert filled.train.x[4, 1:].tolist() == [0, 0, 1]
    with pytest.raises(DataError, match="a missing label cannot be imputed"):
        make(frame(library, ill=["no", None, "no", "yes", "no", "yes"]), {**ROLES, "missing": "median"})


def test_gaps_are_filled_from_the_training_part_alone():
    pandas = pytest.importorskip("pandas")
    rows = {
        "v": [1.0, 3.0, None, 100.0],
        "part": ["train", "train", "train", "test"],
        "y": [0, 1, 0, 1],
        "c": ["a"] * 4,
    }
    task = make(pandas.DataFrame(rows), {"client": "c", "split": "part", "missing": "median"})
    assert task.train.x.flatten().tolist() == [1, 3, 2]
    assert task.test.x.flatten().tolist() == [100]


def test_infinity_is_refused_where_gaps_are_filled():
    pandas = pytest.importorskip("pandas")
    rows = {"v": [1.0, np.inf, np.nan], "y": [0, 1, 0], "c": ["a"] * 3}
    with pytest.raises(DataError, match="NaN or infinity"):
        make(pandas.DataFrame(rows), {"client": "c", "missing": "mean"})


# ------------------------------------------------------------------------------------------------------- hub datasets


def pictures() -> tuple[np.ndarray, Any]:
    hub, image = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), dtype=np.uint8)
    features = hub.Features(
        {"image": hub.Image(), "label": hub.ClassLabel(names=["cat", "dog"]), "writer": hub.Value("string")}
    )
    rows = {"image": [image.fromarray(one) for one in pixels], "label": [0, 1, 0, 1, 0, 1], "writer": list("bbbaaa")}
    return pixels, hub.Dataset.from_dict(rows, features=features)


def test_image_columns_are_decoded_and_class_names_are_kept():
    pixels, dataset = pictures()
    for lazy in (False, True):
        task = fedalloy.task(dataset, "logistic", ids="writer", test_fraction=0.0, lazy=lazy)
        found = task.data("train", EVERYONE)
        expected = torch.from_numpy(pixels[[3, 4, 5, 0, 1, 2]]).permute(0, 3, 1, 2).float() / 255
        assert torch.equal(found.x, expected)
        assert task.encoding == {"label": ("cat", "dog")}


def test_text_needs_a_tokenising_function():
    hub = pytest.importorskip("datasets")
    rows = {"text": ["a b", "b", "c a", "b b"], "label": [0, 1, 1, 0], "user": ["u", "u", "v", "v"]}
    dataset = hub.DatasetDict(
        train=hub.Dataset.from_dict(rows), test=hub.Dataset.from_dict(rows), other=hub.Dataset.from_dict(rows)
    )

    def tokens(texts: list[str]) -> list[list[int]]:
        return [[" abc".index(letter) for letter in text[::2].ljust(2)] for text in texts]

    task = fedalloy.task(dataset, "logistic", ids="user", tokenise=tokens, test_fraction=0.0)
    assert task.data("train", EVERYONE).x.tolist() == [[1, 2], [2, 0], [3, 1], [2, 2]]
    assert task.global_test is not None
    assert len(task.global_test) == 4
    assert "splits that are not used: other" in task.notices
    with pytest.raises(DataError, match="column 'text' holds text: give tokenise="):
        fedalloy.task(dataset, "logistic", ids="user")
    with pytest.raises(DataError, match="all of the same length: pad and truncate"):
        fedalloy.task(dataset, "logistic", ids="user", tokenise=lambda texts: [0] * len(texts))


def test_columns_of_a_dataset_are_known_by_name():
    hub = pytest.importorskip("datasets")
    dataset = hub.Dataset.from_dict({"v": [1.0, None], "label": [0, 1]})
    with pytest.raises(DataError, match="no column 'w'"):
        fedalloy.task(dataset, "logistic", columns={"features": ["w"]})
    with pytest.raises(DataError, match="column 'v': 1 of 2 values are missing"):
        fedalloy.task(dataset, "logistic", "iid", 1)
