"""What a look at the data tells before anybody trains."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import fedalloy
from fedalloy.cli.data import app
from tests.tasks.sources import doors

X = np.arange(12, dtype=np.float32).reshape(6, 2)


def test_sizes_classes_skew_and_duplicates_are_counted():
    clients = {"a": (X, [0, 0, 0, 1, 1, 1]), "b": (X[:4] + 100, [2, 2, 2, 2]), "c": (X[:2], [0, 0])}
    found = fedalloy.task(clients, "logistic", test_fraction=0.0).describe()
    assert (found.clients, found.seen, found.names) == (3, 3, ("a", "b", "c"))
    assert found.sizes["train"] == (6, 4, 2)
    assert found.class_counts == (5, 3, 4)
    assert found.client_classes == ((3, 3, 0), (0, 0, 4), (2, 0, 0))
    whole = np.array([5, 3, 4]) / 12
    distances = [np.abs(np.array(one) / sum(one) - whole).sum() / 2 for one in found.client_classes]
    assert found.skew == pytest.approx(np.mean(distances))
    assert (found.shared, found.leaked, found.missing) == (4, 0, 0)
    assert "4 examples are at several clients" in str(found)
    assert "2 to 6, median 4" in str(found)


@pytest.mark.parametrize("lazy", [None, False])
def test_values_that_were_missing_and_are_filled_are_counted(lazy):
    pandas = pytest.importorskip("pandas")

    def client(number: int) -> Any:
        x = np.arange(12.0)
        x[: number + 1] = np.nan
        return pandas.DataFrame({"p": x, "q": 1.0, "y": [0, 1] * 6})

    task = fedalloy.task(client, "logistic", clients=2, classes=2, columns={"missing": "mean"}, lazy=lazy)
    found = task.describe()
    assert (found.missing, found.filled) == (0, 3)
    assert "0 values; 3 that were missing are filled" in str(found)


def test_a_test_example_that_is_trained_on_is_found():
    parts = {"train": (X, [0, 1] * 3), "test": (X[:2], [0, 1])}
    assert fedalloy.task([parts], "logistic").describe().leaked == 2


def test_the_picture_has_a_bar_per_client_with_its_classes():
    found = fedalloy.task({"<a>": (X, [0, 1] * 3), "b": (X[:2], [0, 0])}, "logistic").describe()
    html = found._repr_html_()
    assert "one bar per client, from left to right &lt;a&gt;, b: its examples, by class (" in html
    bars = ElementTree.fromstring(found.picture()).findall("{*}g")
    assert len(bars) == 2
    assert [len(bar.findall("{*}rect")) for bar in bars] == [2, 2]
    assert "&lt;a&gt;: 6 examples" in html
    assert "<a>" not in html


@pytest.mark.parametrize("lazy", [False, True])
def test_the_picture_calls_classes_by_their_names(lazy):
    pandas = pytest.importorskip("pandas")

    def client(number: int) -> Any:
        return pandas.DataFrame({"sex": ["f", "m"] * 4, "q": range(8), "ill": ["no", "<yes>"] * 4})

    columns = {"label": "ill", "categorical": {"sex": ["f", "m"]}, "classes": ["no", "<yes>"], "missing": "mean"}
    task = fedalloy.task(client, "logistic", clients=2, classes=2, columns=columns, lazy=lazy)
    found = task.describe()
    assert found.class_names == ("no", "<yes>")
    assert "</span> no <span" in found._repr_html_()
    assert "&lt;yes&gt;)" in found._repr_html_()


def test_quantities_have_no_classes_and_lazy_data_are_sampled():
    def client(number: int):
        return X + number, (X[:, 0] / 3).astype(np.float32)

    found = fedalloy.task(client, "logistic", clients=5000).describe()
    assert (found.clients, found.seen, found.classes, found.skew) == (5000, 1000, 0, None)
    assert "5000 (1000 looked at)" in str(found)
    assert any("on demand" in notice for notice in found.notices)


def test_the_command_line_tells_it_of_sets_folders_functions_and_recipes(tmp_path):
    doors.write_folder("csv", tmp_path)
    recipe = tmp_path / "r.toml"
    recipe.write_text(f'[task]\ndataset = "{tmp_path}"\nmodel = "logistic"\n')
    sources = ([str(tmp_path)], ["tests.tasks.sources.doors:client", "--clients", "3", "--classes", "2"], [str(recipe)],
               ["tests.tasks.sources.doors:frame", "--ids", "hospital"])  # fmt: skip
    told = []
    for source in sources:
        result = CliRunner().invoke(app, ["describe", *source, "--json"], catch_exceptions=False)
        told.append(json.loads(result.output))
        assert told[-1]["class_counts"] == told[0]["class_counts"]
    assert sum(told[0]["class_counts"]) == 41
    plain = CliRunner().invoke(
        app, ["describe", "digits", "--clients", "4", "--partition", "iid"], catch_exceptions=False
    )
    assert "label skew" in plain.output


def test_every_part_is_looked_at_for_numbers_that_are_not_finite():
    task = fedalloy.task([(X, [0, 1] * 3)], "logistic")
    task.data("test", torch.tensor([0])).x[0, 0] = torch.inf
    assert task.describe().missing == 1


def test_a_task_on_demand_is_shown_after_a_glance():
    reads: set[int] = set()

    def client(number: int) -> Any:
        reads.add(number)
        return X + number, [0, 1] * 3

    task = fedalloy.task(client, "logistic", clients=100_000, classes=2)
    html = task._repr_html_()
    assert len(reads) <= 51
    assert repr(task) == "<task of 100000 clients, read on demand; classification>"
    assert "<svg" in html
    assert "100000 (50 looked at)" in html
