"""A result that is saved, and read again without executing anything; predictions and clients' own models."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import fedalloy
from fedalloy.core.errors import CheckpointError, SpecError


@pytest.fixture(scope="module")
def task():
    return fedalloy.task("synthetic", lambda inputs, classes: nn.Linear(inputs, classes), clients=4)


@pytest.fixture(scope="module")
def result(task):
    return fedalloy.fit("fedavg", task, rounds=2, engine="loop")


@pytest.fixture(scope="module")
def personal(task):
    return fedalloy.fit("ditto", task, rounds=2, engine="loop")


def test_what_is_saved_comes_back(result, tmp_path):
    result.save(tmp_path / "kept")
    found = fedalloy.load(tmp_path / "kept")
    assert (found.name, found.seed, found.status, found.round) == ("fedavg", 0, "finished", 2)
    assert [row["round"] for row in found.rounds()] == [1, 2]
    assert found.model.keys() == result.model.keys()
    for name, leaf in result.model.items():
        assert torch.equal(found.model[name], leaf)
    assert sorted(file.name for file in (tmp_path / "kept").iterdir()) == ["model.safetensors", "result.json"]


def test_a_saved_model_fills_the_users_module(result, task, tmp_path):
    result.save(tmp_path / "kept")
    x = task.test.x[:5]
    shape = result.model["weight"].shape
    filled = fedalloy.load(tmp_path / "kept").module(nn.Linear(shape[1], shape[0]))
    torch.testing.assert_close(filled(x), result.predict(x))
    with pytest.raises(SpecError, match="is not the model that was saved"):
        fedalloy.load(tmp_path / "kept").module(nn.Linear(3, 3))
    with pytest.raises(SpecError, match=r"module takes your module, such as module\(YourModel\(\)\)"):
        fedalloy.load(tmp_path / "kept").module(nn.Linear)  # type: ignore[call-overload]


class Tied(nn.Module):
    """Two layers with one weight, as embedding and output of language models have it, on a frozen base."""

    def __init__(self, inputs, classes):
        super().__init__()
        self.base, self.head = nn.Linear(inputs, 6), nn.Linear(6, classes)
        self.one, self.other = nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.one.weight
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.head(self.other(self.one(self.base(x)).relu()).relu())


def test_tied_leaves_are_saved_once_and_frozen_ones_are_the_modules_own(tmp_path):
    task: Any = fedalloy.task("synthetic", Tied(60, 10), clients=3)
    result = fedalloy.fit("fedavg", task, rounds=1, engine="loop")
    trained: Any = result.module()
    kept = fedalloy.load(result.save(tmp_path / "kept"))
    again = Tied(60, 10)
    again.base.load_state_dict(trained.base.state_dict())
    x = task.test.x[:5]
    torch.testing.assert_close(kept.module(again)(x), result.predict(x))
    with pytest.raises(SpecError, match=r"no weights for base\.weight, base\.bias; freeze what was not trained"):
        kept.module(Tied(60, 10).requires_grad_())
    with pytest.raises(SpecError, match=r"it has no head\.bias, head\.weight, one\.bias"):
        kept.module(nn.Sequential())


def test_predictions_are_those_of_the_module(result, personal, task):
    x = task.test.x
    torch.testing.assert_close(result.predict(x), result.module()(x).detach())
    torch.testing.assert_close(result.predict(x.numpy()), result.predict(x))
    own = personal.predict(x, client=1)
    torch.testing.assert_close(own, personal.personal_module(1)(x).detach())
    assert not torch.equal(own, personal.predict(x))
    assert not torch.equal(own, personal.predict(x, client=2))


def test_clients_without_a_model_of_their_own_are_refused(result, personal, tmp_path):
    for ask in (lambda: result.personal_module(0), lambda: result.predict(torch.zeros(1, 60), client=0),
                lambda: result.save(tmp_path / "a", clients=[0])):  # fmt: skip
        with pytest.raises(SpecError, match="no model of their own"):
            ask()
    with pytest.raises(SpecError, match="clients are 0 to 3"):
        personal.personal_module(9)


def test_clients_models_are_saved_too(personal, tmp_path):
    personal.save(tmp_path / "kept", clients=[2, 0])
    found = fedalloy.load(tmp_path / "kept")
    assert list(found.clients) == [0, 2]
    assert torch.equal(found.clients[2]["weight"], personal.personal_module(2).weight)
    with pytest.raises(SpecError, match="client 1 was not saved; saved clients: 0, 2"):
        found.module(nn.Linear(1, 1), client=1)


def test_a_folder_that_is_used_is_not_written_to(result, tmp_path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match="not an empty folder"):
        result.save(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("result.json", "{", "cannot be read"),
        ("result.json", json.dumps({"format": 1}), "'name' is missing"),
        ("result.json", "[" * 100_000, "cannot be read"),
        ("model.safetensors", "\x80\x04cos\nsystem\n", "cannot be read"),
    ],
)
def test_damaged_files_are_refused_in_words(name, content, said, result, tmp_path):
    result.save(tmp_path / "kept")
    (tmp_path / "kept" / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=said):
        fedalloy.load(tmp_path / "kept")
    with pytest.raises(CheckpointError, match="holds no saved result"):
        fedalloy.load(tmp_path)


def test_what_is_no_folder_is_refused_in_words(result, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(CheckpointError, match="file holds no saved result"):
        fedalloy.load(tmp_path / "file")
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        result.save(tmp_path / "file")
    wrong: Any = None
    for call in (fedalloy.load, result.save):
        with pytest.raises(SpecError, match=r"path of a .*folder.*, got None"):
            call(wrong)


def test_a_client_without_a_model_of_its_own_is_not_given_that_of_all(result, personal, tmp_path):
    assert personal.module(client=1) is not None
    for ask in (result.module, result.personal_module, lambda client: result.save_pretrained(tmp_path, client)):
        with pytest.raises(SpecError, match="have no model of their own"):
            ask(1)


@pytest.mark.parametrize("model", ["logistic", {"kind": "mlp", "hidden": [5]}])
def test_a_model_by_name_is_built_anew(model, tmp_path):
    task: Any = fedalloy.task("synthetic", model, clients=3, dtype="float64")
    result = fedalloy.fit("ditto", task, rounds=1, engine="loop")
    kept = fedalloy.load(result.save(tmp_path / "kept", clients=[1]))
    x, before = task.test.x[:5], torch.random.get_rng_state()
    assert torch.equal(kept.module()(x), result.module()(x))
    assert torch.equal(kept.module(client=1)(x), result.personal_module(1)(x))
    assert torch.equal(kept.predict(kept.module(), x), result.predict(x))
    assert torch.equal(torch.random.get_rng_state(), before)
    with pytest.raises(SpecError, match=r"predict\(saved\.module\(\), x\)"):
        kept.predict(x, None)


def test_a_model_that_only_its_program_has_is_not_built(result, tmp_path):
    with pytest.raises(SpecError, match="not one of fedalloy's by name: give your module"):
        fedalloy.load(result.save(tmp_path / "kept")).module()
    frozen = fedalloy.task("synthetic", {"kind": "mlp", "hidden": [5]}, clients=3, trainable=("output.*",))
    part = fedalloy.load(fedalloy.fit("fedavg", frozen, rounds=1, engine="loop").save(tmp_path / "part"))
    with pytest.raises(SpecError, match="give your module"):
        part.module()  # its frozen layer is not in the file


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "os:system"}, "no model is called 'os:system'"),
        ({"kind": "nobody"}, "no model is called 'nobody'"),
        ({"dtype": "torch.save"}, "how the model is built cannot be read"),
        ({"settings": {"depth": 3}}, "no argument 'depth'"),
        ({"settings": {"hidden": [10**12]}}, "has other weights than its file"),
        ({"outputs": 3}, "has other weights than its file"),
    ],
)
def test_a_changed_file_builds_no_other_model(changed, said, tmp_path):
    task = fedalloy.task("synthetic", {"kind": "mlp", "hidden": [5]}, clients=3)
    folder = fedalloy.fit("fedavg", task, rounds=1, engine="loop").save(tmp_path / "kept")
    told = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**told, "model": {**told["model"], **changed}}))
    with pytest.raises(CheckpointError, match=said):
        fedalloy.load(folder).module()
