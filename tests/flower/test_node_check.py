"""``fedalloy node check``: any source as a node's data, one step, and what would be sent."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedalloy.cli.app import app
from fedalloy.core.errors import FedalloyError
from fedalloy.experiment.records import toml
from fedalloy.flower.node.data import local_task
from fedalloy.flower.protocol.orders import check_task
from tests.flower import shares

pytestmark = pytest.mark.flower
BYTES = 4 * (shares.FEATURES * 8 + 8 + 8 * shares.CLASSES + shares.CLASSES)


def own_pair() -> Any:
    return shares.share(0)


def own_client(number: int) -> Any:
    return shares.share(number)


def own_dataset() -> Any:
    x, y = shares.share(0)
    return torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))


def own_frame() -> Any:
    import pandas

    x, y = shares.share(0)
    columns = {f"f{k}": x[:, k] for k in range(shares.FEATURES)}
    return pandas.DataFrame({**columns, "kind": [("a", "b", "c")[label] for label in y], "note": "x"}), {
        "label": "kind", "classes": ["a", "b", "c"], "ignore": ["note"],
    }  # fmt: skip


def own_hub() -> Any:
    import datasets

    frame, columns = own_frame()
    return datasets.Dataset.from_pandas(frame.astype({"kind": str, "note": str})), columns


def table(folder: Path) -> str:
    """A csv file with a schema beside it."""
    frame, columns = own_frame()
    frame.to_csv(folder / "mine.csv", index=False)
    (folder / "schema.toml").write_text(toml.dumps(columns))
    return str(folder / "mine.csv")


def arrays(folder: Path) -> str:
    x, y = shares.share(0)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    return str(folder)


SOURCES: dict[str, Any] = {
    "pair": lambda _: f"{__name__}:own_pair",
    "function of the client": lambda _: f"{__name__}:own_client",
    "torch Dataset": lambda _: f"{__name__}:own_dataset",
    "frame with columns": lambda _: f"{__name__}:own_frame",
    "hub dataset": lambda _: f"{__name__}:own_hub",
    "csv": table,
    "npy": arrays,
}
SPEC = {"shape": [shares.FEATURES], "classes": shares.CLASSES, "model": {"kind": "logistic"}}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_is_the_same_client_on_a_node(source, tmp_path):
    shares.write_share(tmp_path / "plain", 0)
    expected = local_task(str(tmp_path / "plain"), 0, check_task(SPEC))
    (tmp_path / "own").mkdir()
    found = local_task(SOURCES[source](tmp_path / "own"), 0, check_task(SPEC))
    for part in ("train", "test"):
        assert torch.equal(found.examples(part).x, expected.examples(part).x)
        assert torch.equal(found.examples(part).y, expected.examples(part).y)


def node(folder: Path, data: str, **more: Any) -> Path:
    folder.mkdir()
    settings = {"server": "127.0.0.1:9092", "secure": False, "client": "0", "data": data, **more}
    (folder / "node.toml").write_text(toml.dumps(settings))
    return folder


def recipe(folder: Path, **task: Any) -> Path:
    made = shares.tables(3)
    made["task"] |= task
    made |= {"algorithm": {"name": "fedavg", "lr": 0.1, "batch_size": 16}}
    (folder / "recipe.toml").write_text(toml.dumps(made))
    return folder / "recipe.toml"


def check(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["node", "check", *map(str, arguments)], catch_exceptions=True)


def test_the_command_says_what_would_be_sent_and_sends_nothing(tmp_path):
    shares.write_share(tmp_path / "data", 0)
    place, told = node(tmp_path / "node", str(tmp_path / "data")), recipe(tmp_path)
    result = check(place, told, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["examples"] == {"train": 28, "valid": 4, "test": 8}
    assert (found["batch"], found["bytes"]) == (16, BYTES)
    assert {one["part"] for one in found["sent"]} == {"delta"}
    assert sum(one["bytes"] for one in found["sent"]) == BYTES
    assert found["statistics"]["num_examples"] == 16
    assert found["loss"] > 0
    assert sorted(path.name for path in place.iterdir()) == ["node.toml"], "nothing is stored"
    plain = check(place, told)
    assert f"{BYTES} bytes in a round" in plain.output
    assert "Examples are never sent" in plain.output


@pytest.mark.parametrize(
    ("task", "policy", "words"),
    [
        ({"dataset": {"kind": "nodes", "shape": [5], "classes": 3}}, "", "examples have shape"),
        ({"dataset": {"kind": "nodes", "shape": [6], "classes": 2}}, "", "not a class number"),
        ({}, "max_examples = 5\n", "max_examples"),
        ({}, "forbid = ['num_examples']\n", "num_examples"),
    ],
)
def test_what_would_go_wrong_is_told_before_anybody_connects(tmp_path, task, policy, words):
    shares.write_share(tmp_path / "data", 0)
    place = node(tmp_path / "node", str(tmp_path / "data"), **({"policy": "policy.toml"} if policy else {}))
    (place / "policy.toml").write_text(policy)
    from fedalloy.experiment.recipe import load
    from fedalloy.flower.layout import NodePlace
    from fedalloy.flower.node.checking import check_node

    with pytest.raises(FedalloyError, match=words):
        check_node(NodePlace.read(place).config, load(recipe(tmp_path, **task)))


def test_undeclared_categories_are_refused_on_a_node(tmp_path):
    frame, _ = own_frame()
    frame.to_csv(tmp_path / "mine.csv", index=False)
    (tmp_path / "schema.toml").write_text('label = "kind"\nignore = ["note"]\n')
    with pytest.raises(FedalloyError, match=r"column 'kind' must be declared, alike on all nodes"):
        local_task(str(tmp_path / "mine.csv"), 0, check_task(SPEC))


class TestMissingValues:
    """A node fills its gaps from its own training part."""

    def table(self) -> Any:
        frame, columns = own_frame()
        frame.loc[::3, "f0"] = None
        frame["sex"] = ["f", "m", None, "m"] * (len(frame) // 4)
        return frame, {**columns, "missing": "mean", "categorical": {"sex": ["f", "m"]}}

    def test_they_are_those_of_a_task_in_memory(self, tmp_path, monkeypatch):
        import fedalloy

        frame, columns = self.table()
        spec = check_task({**SPEC, "shape": [shares.FEATURES + 3], "standardise": "client"})
        frame.to_csv(tmp_path / "mine.csv", index=False)
        (tmp_path / "schema.toml").write_text(toml.dumps(columns))
        monkeypatch.setattr(sys.modules[__name__], "own_pair", lambda: (frame, columns))
        sources = (str(tmp_path / "mine.csv"), f"{__name__}:own_pair")
        task = fedalloy.task([frame], "logistic", columns=columns, standardise="client", seed=spec.seed)
        for source in sources:
            found = local_task(source, 0, spec)
            assert found.filled == len(frame[::3])
            for part in ("train", "test"):
                expected = task.data(part, torch.tensor([0])).client(0)
                assert torch.equal(found.examples(part).x, expected.x)
                assert torch.equal(found.examples(part).y, expected.y)

    def test_they_are_learnt_on_the_training_part_alone(self, monkeypatch):
        x, y = shares.share(0)
        gaps = x[:4].copy()
        gaps[:, 0] = np.nan
        names = [f"f{k}" for k in range(shares.FEATURES)]
        frames = [pandas_frame(rows, some, names) for rows, some in ((x[:20], y[:20]), (gaps, y[:4]))]
        monkeypatch.setattr(sys.modules[__name__], "own_pair", lambda: (tuple(frames), {"missing": "mean"}))
        found = local_task(f"{__name__}:own_pair", 0, check_task(SPEC))
        assert torch.allclose(found.examples("test").x[:, 0], torch.tensor(x[:20, 0].mean()))
        assert (len(found.examples("train")), found.filled) == (20, 4)
        frames[0].loc[0, "f1"] = float("inf")
        with pytest.raises(FedalloyError, match="NaN or infinity"):
            local_task(f"{__name__}:own_pair", 0, check_task(SPEC))

    def test_a_missing_category_has_its_column_on_every_node(self, monkeypatch):
        import pandas

        frame, columns = own_frame()
        frame["sex"] = pandas.Categorical(["f", "m"] * (len(frame) // 2))
        monkeypatch.setattr(sys.modules[__name__], "own_pair", lambda: (frame, {**columns, "missing": "mean"}))
        spec = check_task({**SPEC, "shape": [shares.FEATURES + 3]})
        assert local_task(f"{__name__}:own_pair", 0, spec).examples("train").x.shape[1] == shares.FEATURES + 3

    def test_the_command_says_how_many(self, tmp_path):
        shares.write_share(tmp_path / "data", 0)
        place, told = node(tmp_path / "node", str(tmp_path / "mine.csv")), recipe(tmp_path)
        frame, columns = own_frame()
        frame.loc[:4, "f0"] = None
        frame.to_csv(tmp_path / "mine.csv", index=False)
        (tmp_path / "schema.toml").write_text(toml.dumps({**columns, "missing": "median"}))
        result = check(place, told)
        assert result.exit_code == 0, result.output
        assert "5 missing values are filled from the node's own training part" in result.output


def pandas_frame(x: Any, y: Any, names: list[str]) -> Any:
    import pandas

    return pandas.DataFrame(x, columns=names).assign(y=y)


def test_a_changed_schema_is_noticed_by_a_process_that_remembers_its_data(tmp_path):
    from fedalloy.flower.node.data import remembering

    source, spec = table(tmp_path), check_task(SPEC)
    make = remembering(local_task)
    first = make(source, 0, spec)
    assert make(source, 0, spec) is first
    told = (tmp_path / "schema.toml").read_text()
    (tmp_path / "schema.toml").write_text(told.replace('["a", "b", "c"]', '["c", "b", "a"]'))
    again = make(source, 0, spec)
    assert not torch.equal(again.examples("train").y, first.examples("train").y)


def test_another_database_is_noticed_by_a_process_that_remembers_its_data(tmp_path):
    from fedalloy.flower.node.data import remembering

    made: list[str] = []
    make = remembering(lambda *_: made.append((tmp_path / "database.toml").read_text()))  # type: ignore[arg-type]
    (tmp_path / "visits.sql").write_text("SELECT 1 AS y")
    for url in ("sqlite:///old.db", "sqlite:///old.db", "sqlite:///newer.db"):
        if not made or url not in made[-1]:
            (tmp_path / "database.toml").write_text(f'url = "{url}"')
        make(str(tmp_path / "visits.sql"), 0, check_task(SPEC))
    assert ["newer" in one for one in made] == [False, True]
