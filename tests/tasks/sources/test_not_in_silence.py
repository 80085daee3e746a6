"""Data that would be dropped, joined, or change their kind without a word are refused or told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedalloy
from fedalloy.core.errors import DataError, SpecError
from tests.tasks.sources import doors

X = np.arange(24, dtype=np.float32).reshape(12, 2)
Y = np.tile([0, 1], 6)
FIRST = torch.tensor([0])


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


class TestLabelsWithGaps:
    """Gaps make decimals of whole numbers, and classes would become quantities."""

    def test_the_type_is_known_in_tables_of_text_and_typed_frames(self, tmp_path):
        pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
        nullable = pandas.DataFrame({"a": X[:, 0], "y": pandas.array([0, 1, None] * 4, dtype="Int64")})
        objects = pandas.DataFrame({"a": X[:, 0], "y": pandas.Series([0, 1, None] * 4, dtype=object)})
        others = (polars.DataFrame({"a": X[:, 0], "y": [0, 1, None] * 4}),)
        for source in (nullable, objects, *others, others[0].to_arrow()):
            task = fedalloy.task(source, "logistic", ids=[0] * 12, columns={"missing": "drop"}, test_fraction=0.0)
            assert (task.kind, task.classes) == ("classification", 2)
            assert task.data("train", FIRST).y.tolist() == [0, 1] * 4
        write(tmp_path, a="p,y\n1,0\n2,1\n3,\n", b="p,y\n1,1\n2,0\n")
        for lazy in (False, True):
            task = fedalloy.task(tmp_path, "logistic", columns={"missing": "drop"}, lazy=lazy, classes=2)
            assert task.kind == "classification"
            seen = [task.data(part, torch.arange(2)).y.tolist() for part in ("train", "test")]
            assert sorted(seen[0] + seen[1]) == [0, 0, 1, 1]

    def test_where_it_is_not_known_both_readings_are_told(self):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"a": X[:, 0], "y": [0, 1, None] * 4})
        with pytest.raises(DataError, match=r"can mean classes or quantities.*dropna\(subset=\['y'\]\)"):
            fedalloy.task(frame, "logistic", ids=[0] * 12, columns={"missing": "drop"})
        for more, kind in (({"classes": [0, 1]}, "classification"), ({"label": "q"}, "regression")):
            given = frame.assign(q=X[:, 1] + 0.5).drop(columns="y") if "label" in more else frame
            made = fedalloy.task(given, "logistic", ids=[0] * 12, columns={"missing": "drop", **more})
            assert made.kind == kind

    def test_whole_numbers_at_one_client_and_decimals_at_another_are_refused(self, tmp_path):
        write(tmp_path, a="p,y\n1,0\n2,1\n", b="p,y\n1,0.0\n2,1.0\n")
        with pytest.raises(DataError, match=r"whole numbers in .*a\.csv and decimals in .*b\.csv"):
            fedalloy.task(tmp_path, "logistic")
        write(tmp_path, b="p,y\n1,\n2,\n", c="p,y\n")
        task = fedalloy.task(tmp_path, "logistic", columns={"missing": "drop"})
        assert (task.kind, task.names) == ("classification", ("a",))


class TestNoNumbers:
    """Numbers that are none, and targets that are said to be quantities."""

    @pytest.mark.parametrize("targets", [Y, np.stack([Y + 3, Y + 5], 1)], ids=["one", "two"])
    def test_no_classes_means_quantities_also_where_they_are_whole_numbers(self, targets):
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame({"a": X[:, 0], "age": Y + 20, "s": Y})
        made = [
            fedalloy.task((X, targets), "logistic", clients=2, classes=0),
            fedalloy.task([(X, targets), (X, targets)], "logistic", classes=0),
            fedalloy.task(lambda client: (X, targets), "logistic", clients=2, classes=0),
            fedalloy.task(frame, "logistic", columns={"label": "age", "client": "s"}, classes=0),
        ]
        assert [task.kind for task in made] == ["regression"] * 4
        assert all(fedalloy.fit("fedavg", task, rounds=1, engine="loop").metric == "mae" for task in made)

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ({"classes": -1}, "classes must be a whole number of at least 0, got -1"),
            ({"classes": "2"}, "classes must be a whole number of at least 0, got '2'"),
            ({"clients": 2.5}, r"clients must be a whole number of at least 1, got 2\.5"),
            ({"clients": "3"}, "clients must be a whole number of at least 1, got '3'"),
            ({"clients": True}, "clients must be a whole number of at least 1, got True"),
            ({"test_fraction": "a"}, "test_fraction must be a number of at least 0 and below 1, got 'a'"),
            ({"valid_fraction": None}, "valid_fraction must be a number of at least 0 and below 1, got None"),
            ({"noise": 0.3}, "noise must be a table, such as"),
            ({"dtype": torch.int64}, r"dtype 'torch\.int64': allowed: float32, float64"),
        ],
    )
    def test_settings_of_another_type(self, settings, said):
        with pytest.raises(SpecError, match=said):
            fedalloy.task((X, Y), "logistic", **{"clients": 2, **settings})


class TestWhoHasWhichRows:
    """Two statements about clients, of which one would be ignored."""

    @pytest.fixture
    def frame(self) -> Any:
        pandas = pytest.importorskip("pandas")
        return pandas.DataFrame({"a": X[:, 0], "s": np.repeat(["u", "v", "w"], 4), "y": Y})

    @pytest.mark.parametrize("lazy", [None, True])
    def test_the_column_of_clients_beside_ids_or_a_partition(self, frame, lazy):
        hub = pytest.importorskip("datasets")
        columns = {"client": "s"}
        for source in (frame,) if lazy is None else (hub.Dataset.from_pandas(frame),):
            for more in ({"ids": [0] * 12}, {"partition": "iid", "clients": 2}, {"partition": "IidPartitioner"}):
                with pytest.raises(SpecError, match=r"ids and columns.client|columns.client and partition"):
                    fedalloy.task(source, "logistic", columns=columns, lazy=lazy, **more)
            assert fedalloy.task(source, "logistic", "natural", columns=columns, lazy=lazy).population == 3

    @pytest.mark.parametrize("lazy", [None, True])
    def test_the_column_of_clients_in_frames_of_one_client_each(self, frame, lazy):
        for source in ([frame, frame], {"p": frame, "q": frame}, lambda client: frame):
            with pytest.raises(DataError, match=r"a frame of its own, and columns\.client = 's' names clients too"):
                fedalloy.task(
                    source, "logistic", columns={"client": "s"}, lazy=lazy, clients=2 if callable(source) else None
                )

    def test_a_recipe_says_it_as_well(self):
        from fedalloy.experiment.recipe.reading import parse
        from fedalloy.experiment.recipe.resolving import resolve

        data = {"kind": "callable", "function": "tests.tasks.sources.doors:frame", "columns": {"client": "hospital"}}
        table = {"task": {"dataset": data, "model": "logistic"}, "partition": {"kind": "iid", "clients": 2}}
        with pytest.raises(SpecError, match=r"columns.client and partition both say"):
            resolve(parse(table, "recipe")).task()

    def test_some_of_the_clients_on_demand_are_those_in_memory(self):
        ids = np.repeat(["p", "q", "r", "s", "t", "u"], 2)
        lazy, eager = (
            fedalloy.task(torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y)), "logistic", clients=4,
                          ids=ids, lazy=lazy, test_fraction=0.0)
            for lazy in (True, False)
        )  # fmt: skip
        assert lazy.population == eager.population == 4
        assert lazy.names == eager.names
        one, two = (task.data("train", torch.arange(4)) for task in (lazy, eager))
        assert all(torch.equal(one.client(k).x, two.client(k).x) for k in range(4))

    def test_two_clients_of_one_name(self):
        with pytest.raises(DataError, match="two clients are called '1'"):
            fedalloy.task({1: (X, Y), "1": (X, Y)}, "logistic")


def test_columns_of_one_name_and_features_listed_twice_are_refused():
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError, match="the frame has two columns of the same name, '1'"):
        fedalloy.task(pandas.DataFrame({1: X[:, 0], "1": X[:, 1], "y": Y}), "logistic", ids=Y)
    arrow = pytest.importorskip("pyarrow")
    twice = arrow.table([X[:, 0], X[:, 1], Y], names=["a", "a", "y"])
    with pytest.raises(DataError, match="the frame has two columns of the same name, 'a'"):
        fedalloy.task(twice, "logistic", ids=Y)
    with pytest.raises(SpecError, match="'features' lists a column twice"):
        fedalloy.task(pandas.DataFrame({"a": Y, "y": Y}), "logistic", ids=Y, columns={"features": ["a", "a"]})


def test_options_that_would_be_ignored_are_refused():
    pandas, hub = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    frame = pandas.DataFrame({"a": X[:, 0], "y": Y})
    for source, what in (((X, Y), "arrays"), (frame, "a frame")):
        with pytest.raises(SpecError, match=f"lazy means nothing for {what}"):
            fedalloy.task(source, "logistic", ids=Y, lazy=True)
        assert fedalloy.task(source, "logistic", ids=Y, lazy=False).population == 2
    with pytest.raises(SpecError, match="tokenise means nothing here"):
        fedalloy.task(hub.Dataset.from_pandas(frame), "logistic", ids=Y, tokenise=doors.tokens)
    with pytest.raises(DataError, match=r"got DataLoader; give its \.dataset"):
        fedalloy.task(torch.utils.data.DataLoader(doors.Rows()), "logistic", ids=Y)


def test_a_hub_dataset_with_gaps_in_its_labels_or_a_transform_is_refused_in_words():
    hub = pytest.importorskip("datasets")
    gaps = hub.Dataset.from_dict({"a": X[:, 0].tolist(), "label": ["u", None] * 6})
    with pytest.raises(DataError, match="column 'label': 6 of 12 values are missing"):
        fedalloy.task(gaps, "logistic", ids=Y)
    changed = hub.Dataset.from_dict({"a": X[:, 0].tolist(), "label": Y.tolist()}).with_transform(
        lambda batch: {"pixels": batch["a"]}
    )
    with pytest.raises(DataError, match=r"column 'a' is not among what the dataset gives.*reset_format"):
        fedalloy.task(changed, "logistic", ids=Y)


class TestFolders:
    """Files that are passed over, and statements about columns that there are none of."""

    @pytest.mark.parametrize("lazy", [False, True])
    def test_files_that_are_not_read_are_named(self, tmp_path, lazy):
        (tmp_path / "a").mkdir()
        np.savez(tmp_path / "a" / "train.npz", x=X, y=Y)
        (tmp_path / "b.csv.gz").write_bytes(b"packed")
        (tmp_path / "c").mkdir()
        np.savez(tmp_path / "c" / "train.npz", x=X, y=Y)
        (tmp_path / "c" / "test.tsv").write_text("p\ty\n")
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "table.xlsx").write_bytes(b"table")
        told = [one for one in fedalloy.task(tmp_path, "logistic", lazy=lazy, classes=2).notices if "not read" in one]
        assert told == ["not read, because they are no data of a client: b.csv.gz, d, c/test.tsv"]

    @pytest.mark.parametrize("lazy", [False, True])
    def test_arrays_beside_x_and_y_are_named(self, tmp_path, lazy):
        np.savez(tmp_path / "a.npz", x=X, y=Y, ids=Y, xy=Y)
        np.savez(tmp_path / "b.npz", x=X, y=Y)
        told = [one for one in fedalloy.task(tmp_path, "logistic", lazy=lazy, classes=2).notices if "not read" in one]
        assert told == ["arrays beside x and y are not read: ids, xy in a.npz"]
        np.savez(tmp_path / "a.npz", x=X, y=Y)
        assert not [one for one in fedalloy.task(tmp_path, "logistic").notices if "not read" in one]

    def test_pictures_of_another_format_are_named(self, tmp_path):
        pytest.importorskip("PIL")
        doors.write_images(tmp_path)
        assert not [one for one in fedalloy.task(tmp_path, "logistic").notices if "not read" in one]
        (tmp_path / "north" / "cat" / "9.heic").write_bytes(b"picture")
        assert any("north/cat/9.heic" in one for one in fedalloy.task(tmp_path, "logistic").notices)

    @pytest.mark.parametrize("lazy", [False, True])
    def test_roles_of_columns_mean_nothing_for_arrays(self, tmp_path, lazy):
        doors.write_folder("npz", tmp_path)
        (tmp_path / "schema.toml").write_text('missing = "mean"\n')
        with pytest.raises(SpecError, match=r"schema\.toml\) say what columns mean, and these files have none"):
            fedalloy.task(tmp_path, "logistic", lazy=lazy, classes=2)

    def test_arrays_beside_tables_are_not_filled(self, tmp_path):
        np.savez(tmp_path / "a.npz", x=X, y=Y)
        write(tmp_path, b="p,q,y\n1,,0\n2,3,1\n")
        with pytest.raises(SpecError, match=r"columns\.missing fills tables, and some clients have arrays"):
            fedalloy.task(tmp_path, "logistic", columns={"missing": "mean"})


class TestPixels:
    """Pictures whose numbers are no brightness between 0 and 255."""

    def test_sixteen_bits_are_refused(self, tmp_path):
        image, hub = pytest.importorskip("PIL.Image"), pytest.importorskip("datasets")
        deep = image.fromarray((np.arange(16).reshape(4, 4) * 4000).astype(np.uint16))
        for label in ("cat", "dog"):
            (tmp_path / "a" / label).mkdir(parents=True)
            deep.save(tmp_path / "a" / label / "1.png")
        rows = hub.Dataset.from_dict({"image": [deep] * 4, "label": [0, 1] * 2}).cast_column("image", hub.Image())
        for source, ids in ((tmp_path, None), (rows, [0] * 4)):
            with pytest.raises(DataError, match="more than 8 bits per pixel"):
                fedalloy.task(source, "logistic", ids=ids)

    def test_palettes_are_colours_through_both_doors(self, tmp_path):
        image, hub = pytest.importorskip("PIL.Image"), pytest.importorskip("datasets")
        picture = image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).convert("P")
        picture.putpalette([value for k in range(256) for value in (255 - k, k, 7)])
        for label in ("cat", "dog"):
            (tmp_path / "a" / label).mkdir(parents=True)
            picture.save(tmp_path / "a" / label / "1.png")
        rows = hub.Dataset.from_dict({"image": [picture] * 2, "label": [0, 1]}).cast_column("image", hub.Image())
        folder = fedalloy.task(tmp_path, "logistic", test_fraction=0.0).data("train", FIRST).x
        dataset = fedalloy.task(rows, "logistic", ids=[0] * 2, test_fraction=0.0).data("train", FIRST).x
        assert folder.shape == (2, 3, 4, 4)
        assert torch.equal(folder, dataset)
        assert folder[0, 2].unique().tolist() == [pytest.approx(7 / 255)]


class TestNumbers:
    """Values that would change on their way into tensors."""

    def test_masks_are_not_forgotten(self):
        for pair in ((np.ma.masked_array(X, mask=X > 20), Y), (X, np.ma.masked_array(Y, mask=Y > 0))):
            with pytest.raises(DataError, match="a masked array, whose gaps would count"):
                fedalloy.task([pair], "logistic")
        assert fedalloy.task([(np.ma.masked_array(X), Y)], "logistic").population == 1

    def test_raw_and_scaled_pixels_are_not_mixed(self):
        raw, scaled = (X.astype(np.uint8), Y), (X / 255, Y)
        with pytest.raises(DataError, match=r"client 1: .*bytes \(uint8\) beside decimals"):
            fedalloy.task([raw, scaled], "logistic")
        lazy = fedalloy.task(lambda k: (raw, scaled)[k], "logistic", clients=2, classes=2)
        with pytest.raises(DataError, match="client 1: features are bytes and those of the first decimals, or the rev"):
            lazy.data("train", torch.tensor([1]))
        whole = (X.astype(np.int64), Y)
        assert fedalloy.task([(X, Y), whole], "logistic").data("train", torch.arange(2)).x.dtype == torch.float32

    def test_large_whole_numbers_are_told_and_decimals_are_numbers(self):
        from decimal import Decimal

        pandas, polars = pytest.importorskip("pandas"), pytest.importorskip("polars")
        frame = pandas.DataFrame({"time": [1_700_000_000 + k for k in range(12)], "y": Y})
        told = fedalloy.task(frame, "logistic", ids=Y).notices
        assert any("numbers above 16777216 in time are rounded to 32 bits" in one for one in told)
        prices = [Decimal("1.50"), Decimal("2.25"), None] * 4
        for source in (pandas.DataFrame({"p": prices, "y": Y}), polars.DataFrame({"p": prices, "y": Y}),
                       polars.DataFrame({"p": prices, "y": Y}).to_arrow()):  # fmt: skip
            task = fedalloy.task(source, "logistic", ids=[0] * 12, columns={"missing": "drop"}, test_fraction=0.0)
            assert task.data("train", FIRST).x.flatten().tolist() == [1.5, 2.25] * 4
        with pytest.raises(DataError, match="'p' holds list values"):
            fedalloy.task(polars.DataFrame({"p": [[1, 2]] * 12, "y": Y}), "logistic", ids=Y)


def test_a_client_of_a_frame_whose_rows_are_all_dropped_is_named():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [None] * 3 + [1.0] * 9, "s": ["p"] * 3 + ["q"] * 9, "y": Y})
    columns = {"missing": "drop"}
    for source, more in (
        (frame, {"ids": "s", "columns": columns}),
        (frame.drop(columns="s"), {"ids": frame["s"], "columns": columns}),
        ({"train": frame, "test": frame}, {"columns": {**columns, "client": "s"}}),
    ):
        task = fedalloy.task(source, "logistic", **more)
        assert task.names == ("q",)
        assert "clients without any example are left out: p" in task.notices
