"""Predictions for raw rows: they are prepared as the task prepared its own, also after saving and reading again."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import fedalloy
from fedalloy.core.errors import CheckpointError, DataError, SpecError
from fedalloy.tasks.features import cached_features

CLIENTS = 3
COLUMNS: dict[str, Any] = {"label": "ill", "categorical": {"ward": ["a", "b"]}, "missing": "median", "ignore": ["note"]}


def _arrays(client: int) -> dict[str, tuple[Any, Any]]:
    """One client's parts; every client measures in other units."""
    rng = np.random.default_rng(client)
    x = rng.normal(50.0 * client, client + 1.0, size=(30, 4))
    y = (x[:, 0] > 50.0 * client).astype(np.int64)
    return {"train": (x[:20], y[:20]), "test": (x[20:], y[20:])}


def _frames(client: int) -> dict[str, pd.DataFrame]:
    """The same as frames with a category and with gaps."""
    made = {}
    for part, (x, y) in _arrays(client).items():
        frame = pd.DataFrame({"dose": x[:, 0], "note": "x", "age": x[:, 1], "ill": y})
        frame["ward"] = np.where(np.arange(len(y)) % 3, "a", "b")
        frame.loc[::4, "age"], frame.loc[::5, "ward"] = np.nan, None
        made[part] = frame
    return made


def _task(kind: str, lazy: bool, standardise: Any = "client", dtype: str = "float32") -> Any:
    given: Any = {f"site {k}": (_frames if kind == "frames" else _arrays)(k) for k in range(CLIENTS)}
    more: dict[str, Any] = {"dtype": dtype, **({"columns": COLUMNS} if kind == "frames" else {})}
    if lazy:
        values = list(given.values())
        return fedalloy.task(
            lambda client: values[client], "logistic", clients=CLIENTS, lazy=True, classes=2, standardise=standardise,
            **more,
        )  # fmt: skip
    return fedalloy.task(given, "logistic", standardise=standardise, **more)


def _raw(kind: str, client: int) -> Any:
    found: Any = _frames(client)["test"] if kind == "frames" else _arrays(client)["test"][0]
    return found


CASES = [
    (kind, lazy, dtype) for kind in ("arrays", "frames") for lazy in (False, True) for dtype in ("float32", "float64")
]


@pytest.fixture(scope="module", params=CASES, ids=str)
def case(request):
    kind, lazy, dtype = request.param
    task = _task(kind, lazy, dtype=dtype)
    return kind, task, fedalloy.fit("ditto", task, rounds=2, engine="loop")


def test_raw_rows_are_prepared_to_the_bit_as_the_tasks_own(case):
    kind, task, result = case
    for client in range(CLIENTS):
        own = task.data("test", torch.tensor([client])).client(0).x
        assert torch.equal(result.prepare(_raw(kind, client), rows_of=client), own)
        assert torch.equal(result.predict(_raw(kind, client), rows_of=client), result.predict(own, prepared=True))
        mine = result.predict(_raw(kind, client), client=client)
        assert torch.equal(mine, result.predict(own, client=client, prepared=True))
    assert not torch.allclose(result.prepare(_raw(kind, 2), rows_of=2), result.prepare(_raw(kind, 2), rows_of=1))


def test_a_saved_result_prepares_and_predicts_the_same(case, tmp_path):
    kind, _, result = case
    saved = fedalloy.load(result.save(tmp_path / "kept", clients=[1], rows_of=[0, 1]))
    module = result.module()
    rows = _raw(kind, 1)
    assert torch.equal(saved.prepare(rows, rows_of=0), result.prepare(rows, rows_of=0))
    assert torch.equal(saved.predict(module, rows, rows_of=1), result.predict(rows, rows_of=1))
    assert torch.equal(saved.predict(module, rows, client=1), result.predict(rows, client=1))
    with pytest.raises(SpecError, match="client 2 are prepared: known are 0, 1"):
        saved.predict(module, rows, rows_of=2)
    with pytest.raises(SpecError, match="say whose rows these are"):
        saved.predict(module, rows)


def test_without_being_told_all_clients_in_memory_are_saved_and_others_as_far_as_their_models_are(case, tmp_path):
    kind, task, result = case
    saved = fedalloy.load(result.save(tmp_path / "kept", clients=[1]))
    assert torch.equal(saved.prepare(_raw(kind, 1), rows_of=1), result.prepare(_raw(kind, 1), rows_of=1))
    if task.pools:
        assert torch.equal(saved.prepare(_raw(kind, 2), rows_of=2), result.prepare(_raw(kind, 2), rows_of=2))
    else:
        with pytest.raises(SpecError, match="known are 1"):
            saved.prepare(_raw(kind, 2), rows_of=2)


def test_rows_of_nobody_are_refused_where_every_client_has_its_own_scale(case):
    kind, _, result = case
    with pytest.raises(SpecError, match=r"say whose rows these are \(rows_of=3\)"):
        result.predict(_raw(kind, 0))
    with pytest.raises(SpecError, match="give one"):
        result.predict(_raw(kind, 0), rows_of=1, prepared=True)
    with pytest.raises(SpecError, match=f"clients are 0 to {CLIENTS - 1}"):
        result.predict(_raw(kind, 0), rows_of=CLIENTS)


@pytest.mark.parametrize("case", [("frames", lazy, "float32") for lazy in (False, True)], indirect=True, ids=str)
def test_a_frame_that_the_task_does_not_know_is_refused(case):
    kind, _, result = case
    rows = _raw(kind, 0)
    with pytest.raises(DataError, match=r"no column 'dose', a feature of the task"):
        result.predict(rows.drop(columns="dose"), rows_of=0)
    with pytest.raises(DataError, match="'ward' has the value 'c', the task knows a, b"):
        result.predict(rows.assign(ward="c"), rows_of=0)
    shuffled = rows[["ward", "age", "dose"]]  # neither the order of columns nor the label matters
    assert torch.equal(result.predict(shuffled, rows_of=0), result.predict(rows, rows_of=0))


@pytest.mark.parametrize("case", [(kind, False, "float32") for kind in ("arrays", "frames")], indirect=True, ids=str)
def test_rows_of_another_width_are_refused_and_one_column_is_not_taken_for_all(case, tmp_path):
    kind, _, result = case
    kept = fedalloy.load(result.save(tmp_path / "kept"))
    width = result.prepare(_raw(kind, 0), rows_of=0).shape[1]
    for wide in (1, width - 1, width + 1):
        rows = np.ones((2, wide))
        said = rf"rows of shape \({wide},\), an example of the task has shape \({width},\)"
        with pytest.raises(DataError, match=said + ("; give a frame" if kind == "frames" else "$")):
            result.predict(rows, rows_of=0)
        with pytest.raises(DataError, match=said):
            kept.prepare(rows, rows_of=0)


@pytest.mark.parametrize("encoding", ["one_hot", "codes"])
def test_arrays_for_a_frames_task_need_its_encoded_width(encoding):
    columns = {"label": "ill", "categorical": ["ward"], "encoding": encoding}
    rows = pd.DataFrame({"dose": np.arange(12.0), "ward": list("abc") * 4, "ill": [0, 1] * 6})
    result = fedalloy.fit("fedavg", fedalloy.task({"a": rows}, "logistic", columns=columns), rounds=1, engine="loop")
    width = {"one_hot": 4, "codes": 2}[encoding]
    assert torch.equal(result.predict(np.zeros((1, width))), result.predict(np.zeros((1, width)), prepared=True))
    assert result.prepare(rows).shape == (12, width)
    with pytest.raises(DataError, match=rf"an example of the task has shape \({width},\); give a frame"):
        result.predict(np.zeros((1, 3)))


@pytest.fixture(scope="module")
def plain():
    task = _task("arrays", lazy=False, standardise="none")
    return task, fedalloy.fit("fedavg", task, rounds=1, engine="loop")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (np.zeros(4), "the first axis must be the rows"),
        (torch.tensor(1.0), "the first axis must be the rows"),
        (np.zeros((2, 4), np.uint8), "has bytes"),
        (np.array([[np.nan, 0, 0, 0]]), "missing"),
        (np.array([[np.inf, 0, 0, 0]]), "infinite"),
        ({"age": np.zeros((2, 4))}, "the rows have the features age, those of the task one array"),
        ([["a", "b", "c", "d"]], "must be numbers, not text"),
    ],
)
def test_rows_that_the_task_would_refuse_are_refused(rows, said, plain):
    with pytest.raises(DataError, match=said):
        plain[1].predict(rows)


def test_without_a_preparation_rows_are_taken_as_they_are_and_whole_numbers_as_decimals(plain, tmp_path):
    _, result = plain
    rows = np.arange(8).reshape(2, 4)
    expected = result.module()(torch.from_numpy(rows).float()).detach()
    for given in (rows, rows.astype(float), torch.from_numpy(rows), rows.tolist(), pd.DataFrame(rows)):
        assert torch.equal(result.predict(given), expected)
    assert torch.equal(result.predict(rows, rows_of=1), expected)
    saved = fedalloy.load(result.save(tmp_path / "kept"))
    assert torch.equal(saved.predict(result.module(), rows), expected)
    assert sorted(file.name for file in (tmp_path / "kept").iterdir()) == ["model.safetensors", "result.json"]


def test_rows_that_the_model_does_not_take_are_refused_with_their_shapes(plain, tmp_path):
    said = r"predict: the model called with x of \(2, 3\) float64 \(which must be rows like those of the task\) raised"
    _, result = plain
    with pytest.raises(DataError, match=said):
        result.predict(np.zeros((2, 3)))
    kept = fedalloy.load(result.save(tmp_path / "kept"))
    with pytest.raises(DataError, match=r"x of .2, 3. float64"):
        kept.predict(kept.module(), np.zeros((2, 3)))


def test_several_inputs_are_standardised_by_name_whatever_their_order():
    rng = np.random.default_rng(0)

    def client(k: int) -> Any:
        x = {"a": rng.normal(k, 1, (12, 2)), "b": rng.normal(9 * k, 3, (12, 2))}
        return {"train": (x, np.arange(12) % 2), "test": (x, np.arange(12) % 2)}

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(2, 2)

        def forward(self, a, b):
            return self.one(a - 2 * b)

    data = [client(k) for k in range(2)]
    task: Any = fedalloy.task(data, Two, standardise="client")
    result = fedalloy.fit("fedavg", task, rounds=1, engine="loop")
    raw = data[1]["test"][0]
    own = task.data("test", torch.tensor([1])).client(0).x
    expected = result.predict(own, prepared=True)
    assert torch.equal(result.predict(dict(reversed(raw.items())), rows_of=1), expected)
    for more in ({"rows_of": 1}, {"prepared": True}):
        with pytest.raises(DataError, match="the features have 5 and 12 rows"):
            result.predict({"a": raw["a"][:5], "b": raw["b"]}, **more)


def test_features_of_a_frozen_part_cannot_be_made_from_raw_rows():
    def model(inputs, classes):
        return nn.Sequential(nn.Linear(inputs, 4), nn.Linear(4, classes))

    task: Any = fedalloy.task([_arrays(0), _arrays(1)], model, trainable=("1.*",))
    result = fedalloy.fit("fedavg", cached_features(task, "0"), rounds=1, engine="loop")
    with pytest.raises(SpecError, match=r"features up to '0' were computed beforehand.*prepared=True"):
        result.predict(np.zeros((2, 4)))
    assert result.predict(np.zeros((2, 4)), prepared=True).shape == (2, 2)


def test_a_folder_of_an_earlier_version_says_that_it_does_not_know_the_preparation(plain, tmp_path):
    _, result = plain
    folder = result.save(tmp_path / "kept")
    told = json.loads((folder / "result.json").read_text())
    told["format"] = 1
    del told["preparation"], told["floats"]
    (folder / "result.json").write_text(json.dumps(told))
    old, rows = fedalloy.load(folder), np.ones((2, 4), np.float32)
    with pytest.raises(SpecError, match="did not save how raw rows are prepared"):
        old.predict(result.module(), rows)
    assert torch.equal(old.predict(result.module(), rows, prepared=True), result.predict(rows))


@pytest.mark.parametrize("damage", [None, 3, {"columns": {"features": 1}}, {"columns": None, "strange": 1}])
def test_a_damaged_preparation_is_refused_in_words(damage, plain, tmp_path):
    folder = plain[1].save(tmp_path / "kept")
    told = json.loads((folder / "result.json").read_text())
    told["preparation"] = damage
    (folder / "result.json").write_text(json.dumps(told))
    with pytest.raises(CheckpointError, match="how rows are prepared cannot be read"):
        fedalloy.load(folder)


def test_a_missing_file_of_the_preparation_is_refused(case, tmp_path):
    result = case[2]
    folder = result.save(tmp_path / "kept", rows_of=[0])
    (folder / "preparation.safetensors").unlink()
    with pytest.raises(CheckpointError, match="how rows are prepared cannot be read"):
        fedalloy.load(folder)


@pytest.mark.parametrize("lazy", [False, True])
def test_clients_may_be_given_by_name(lazy, tmp_path):
    folder = tmp_path / "sites"
    folder.mkdir()
    for number, name in enumerate(["south", "north", "east"]):
        np.savez(
            folder / f"{name}.npz", x=np.random.default_rng(number).normal(number, 1, (20, 3)), y=np.arange(20) % 2
        )
    more: dict[str, Any] = {"lazy": True, "classes": 2} if lazy else {}
    task: Any = fedalloy.task(str(folder), "logistic", standardise="client", **more)
    result = fedalloy.fit("ditto", task, rounds=1, engine="loop")
    north, rows = list(task.names).index("north"), np.ones((2, 3))
    own = result.predict(rows, client=north)
    assert torch.equal(result.predict(rows, client="north"), own)
    assert torch.equal(result.predict(rows, rows_of="north"), result.predict(rows, rows_of=north))
    assert torch.equal(result.module("north")(result.prepare(rows, "north")), own)
    kept = fedalloy.load(result.save(tmp_path / "kept", ["north"]))
    assert torch.equal(kept.predict(kept.module(), rows, client="north"), own)
    assert fedalloy.load(result.save(tmp_path / "for one", rows_of=["north"])).names == {"north": north}
    with pytest.raises(SpecError, match=rf"client east was not saved; saved clients: {north} \(north\)"):
        fedalloy.load(result.save(tmp_path / "again", ["north"], rows_of=["north", "east"])).module(client="east")
    with pytest.raises(SpecError, match="no client is called 'nort': did you mean 'north'"):
        result.predict(rows, client="nort")
    with pytest.raises(SpecError, match=r"by its number, 0 to 2, or by its name, got 1\.5"):
        result.module(1.5)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="rows_of must be a list of clients"):
        result.save(tmp_path / "text", rows_of="north")


def test_classes_keep_their_names(tmp_path):
    task = fedalloy.task({f"site {k}": _frames(k) for k in range(CLIENTS)}, "logistic", columns=COLUMNS)
    kept = fedalloy.load(fedalloy.fit("fedavg", task, rounds=1, engine="loop").save(tmp_path / "kept"))
    assert kept.encoding == task.encoding
    assert fedalloy.load(tmp_path / "kept").names["site 1"] == 1
